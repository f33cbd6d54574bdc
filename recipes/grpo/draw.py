"""Which prompt is sampled next: the stream's order, without the prompts of environments that are paused.

A circuit breaker pauses an environment when too many of its rollouts end without a verdict. Otherwise it would use up
its rows one by one, while training goes on with the easy remainder. Its prompts wait unconsumed; from time to time one
of them is tried, and a group with verdicts ends the pause.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.errors import RunError
from recipes.grpo.data import PromptStream
from recipes.tokens import GroupTokens
from recipes.types import Group, PromptRef, RolloutStatus, Row, Sampling

if TYPE_CHECKING:
    from recipes.config.tree import CircuitBreakerConfig

logger = logging.getLogger(__name__)

Prompt = tuple[PromptRef, Row]
NO_VARIANCE = "no_variance: all answers earned the same"  # in the ledger, for a prompt that dynamic sampling replaced
_MAX_READ_STEPS = 4  # steps' worth of prompts read in a row that all belong to paused environments


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """What the collector needs from the configuration."""

    num_prompts_per_step: int
    num_generations_per_prompt: int
    max_trajectory_age_steps: int
    max_generation_failures: int
    sampling: Sampling
    max_model_len: int  # tokens, prompt and answer together
    circuit_breaker: CircuitBreakerConfig
    teaches: Callable[[Group], bool] = lambda _group: True  # else the group is replaced by another prompt's
    max_gen_batches: int = 1  # of P and those ahead for one step, when groups are replaced because they do not teach
    num_prompts_ahead: int = 0  # drawn for one step beyond P, since some of their groups will not teach


class CircuitBreaker:
    """What the last rollouts of each environment say about it. Environments are named by the agents of the rows."""

    def __init__(self, cfg: CircuitBreakerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cfg, self._clock = cfg, clock
        self._verdicts: defaultdict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=cfg.window_rollouts))
        self._paused: dict[str, tuple[float, float]] = {}  # name -> paused since, next probe

    def record(self, name: str, verdicts: Sequence[bool]) -> None:
        """Enter the rollouts of one group, each with whether it has a verdict; this may pause or resume `name`."""
        recent = self._verdicts[name]
        if name in self._paused:
            if verdicts.count(False) <= self._cfg.max_no_verdict_share * len(verdicts):
                since, _ = self._paused.pop(name)
                recent.clear()
                logger.warning("environment %s answers again after %.0f s: resumed", name, self._clock() - since)
            return
        recent.extend(verdicts)
        share = self.shares()[name]
        if len(recent) == self._cfg.window_rollouts and share > self._cfg.max_no_verdict_share:
            now = self._clock()
            self._paused[name] = (now, now + self._cfg.probe_seconds)
            logger.error(
                "environment %s paused: %.0f%% of its last %d rollouts have no verdict (env.circuit_breaker); one"
                " of its prompts is tried every %g s",
                name,
                100 * share,
                len(recent),
                self._cfg.probe_seconds,
            )

    def is_paused(self, name: str) -> bool:
        """Whether prompts of this environment wait."""
        return name in self._paused

    def takes_probe(self, name: str) -> bool:
        """Whether a paused environment is to be tried now; if so, the next time is `probe_seconds` later."""
        now = self._clock()
        since, due = self._paused.get(name, (0.0, float("inf")))
        if now < due:
            return False
        self._paused[name] = (since, now + self._cfg.probe_seconds)
        return True

    def seconds_to_probe(self, names: Iterable[str]) -> float | None:
        """Return the seconds until the next probe of one of `names`; None when none of them is paused."""
        due = [self._paused[name][1] for name in names if name in self._paused]
        return max(0.0, min(due) - self._clock()) if due else None

    def paused(self) -> dict[str, float]:
        """Return the paused environments, each with its seconds so far."""
        now = self._clock()
        return {name: now - since for name, (since, _) in sorted(self._paused.items())}

    def shares(self) -> dict[str, float]:
        """Return, per environment, the share of its last rollouts that have no verdict."""
        # Copied at once: the collector's thread may add an environment or a verdict.
        copies = [(name, list(recent)) for name, recent in list(self._verdicts.items())]
        return {name: recent.count(False) / len(recent) for name, recent in copies if recent}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPrompt:
    """A prompt that was drawn for a step and has no finished group yet."""

    position: int  # in the prompt stream
    target_step: int
    prompt: PromptRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorState:
    """What a checkpoint keeps: everything drawn and not yet trained on, at one moment."""

    position: int  # next prompt of the stream to draw
    in_flight: tuple[DrawnPrompt, ...]
    finished: tuple[Group, ...]  # groups that wait in the buffer
    failed: tuple[tuple[PromptRef, str], ...]  # prompts that never trained, with the reason
    skipped: tuple[int, ...] = ()  # positions that are not drawn: their prompts were trained before the data changed
    set_aside: tuple[int, ...] = ()  # positions of prompts that wait for their environment
    finished_tokens: tuple[GroupTokens, ...] = ()  # of `finished`

    def num_left(self, num_prompts: int) -> int:
        """Return how many of the stream's `num_prompts` can still be trained on."""
        ahead = num_prompts - self.position - sum(position >= self.position for position in self.skipped)
        return ahead + len(self.in_flight) + len(self.finished) + len(self.set_aside)


class PromptQueue:
    """The prompts still to be sampled. Whoever calls a method that changes it holds the collector's lock."""

    def __init__(self, stream: PromptStream, breaker: CircuitBreaker, *, prompts_per_step: int, window: int) -> None:
        """`window` is the number of prompts whose rollouts the breaker looks at."""
        self.breaker = breaker
        self.position = 0  # next prompt of the stream
        self.failed: list[tuple[PromptRef, str]] = []  # prompts that never trained, with the reason
        self._stream = stream
        self._max_read = _MAX_READ_STEPS * prompts_per_step
        self._skipped: frozenset[int] = frozenset()  # positions whose prompts were trained before the data changed
        self._waiting: defaultdict[str, deque[int]] = defaultdict(deque)  # positions, by paused environment
        self._returned: deque[int] = deque()  # positions that waited, drawn before new ones
        self._failed_lately: defaultdict[str, deque[tuple[int, PromptRef]]] = defaultdict(lambda: deque(maxlen=window))

    def restore(self, position: int, *, skipped: Iterable[int], set_aside: Iterable[int]) -> None:
        """Continue from a checkpoint. What waited then is tried again."""
        self.position, self._skipped, self._returned = position, frozenset(skipped), deque(sorted(set_aside))

    def skipped(self) -> tuple[int, ...]:
        """Return the positions ahead that are not drawn."""
        return tuple(sorted(position for position in self._skipped if position >= self.position))

    def set_aside(self) -> tuple[int, ...]:
        """Return the positions of prompts that wait, or waited, for their environment."""
        return tuple(sorted(itertools.chain(self._returned, *list(self._waiting.values()))))

    def at(self, position: int) -> Prompt | None:
        """Return the prompt at a position, None beyond the end of the data."""
        return self._stream.draw(position)

    def position_of(self, ref: PromptRef) -> int:
        """Return the position of a prompt that was drawn."""
        return self._stream.position_of(ref)

    def next(self) -> tuple[int, Prompt] | None:
        """Return a position and its prompt: one that probes a paused environment, else the next that is not paused.

        None at the end of the data, and when many prompts in a row belong to paused environments: the rest stays
        unread until one resumes.
        """
        for name, waiting in self._waiting.items():
            if waiting and self.breaker.takes_probe(name):
                position = waiting.popleft()
                prompt = self.at(position)
                return None if prompt is None else (position, prompt)
        for _ in range(self._max_read):
            position = self._next_position()
            prompt = self.at(position)
            if prompt is None:
                self.position = position
                return None
            name = prompt[1]["agent_ref"]["name"]
            if not self.breaker.is_paused(name):
                return position, prompt
            self._waiting[name].append(position)
        return None

    def record(self, group: Group) -> None:
        """Tell the breaker how a group ended.

        When that pauses the environment, the prompts that failed in its window wait with the others.
        """
        name = group.agent
        was_paused = self.breaker.is_paused(name)
        # What the engine gave up says nothing of the environment.
        told = [rollout for rollout in group.rollouts if rollout.status is not RolloutStatus.ABORTED]
        if told:
            self.breaker.record(name, [rollout.reward is not None for rollout in told])
        is_paused = self.breaker.is_paused(name)
        if is_paused and not was_paused:
            lately = self._failed_lately.pop(name, deque())
            refs = {ref for _, ref in lately}
            self.failed = [(ref, reason) for ref, reason in self.failed if ref not in refs]
            self._waiting[name].extend(position for position, _ in lately)
        if was_paused and not is_paused:
            self._returned.extend(sorted(self._waiting.pop(name, ())))

    def give_back(self, position: int, group: Group, reason: str) -> bool:
        """Take back a prompt whose group cannot be trained; return whether it has failed, rather than waits."""
        if self.breaker.is_paused(group.agent):
            self._waiting[group.agent].append(position)
            return False
        self.failed.append((group.prompt, reason))
        self._failed_lately[group.agent].append((position, group.prompt))
        return True

    def draw_again(self, position: int) -> None:
        """Take back a prompt whose group was good, and for which no step had a place."""
        self._returned.append(position)

    def seconds_to_probe(self) -> float | None:
        """Return the seconds until a prompt that waits may be tried; None when none waits."""
        return self.breaker.seconds_to_probe([name for name, waiting in self._waiting.items() if waiting])

    def _next_position(self) -> int:
        if self._returned:
            return self._returned.popleft()
        while self.position in self._skipped:
            self.position += 1
        self.position += 1
        return self.position - 1


def teaches_nothing(target: int, count: int, batches: int) -> RunError:
    """Return why a run ends whose groups for one step had no variance, `count` of them."""
    return RunError(
        f"step {target + 1}: the answers to {count} prompts drawn for it earned the same, too many for "
        f"grpo.dynamic_sampling_max_gen_batches = {batches}: the data is solved or too hard; leave such rows out "
        "(make curriculum), or set grpo.use_dynamic_sampling=false"
    )


def all_fail(count: int, settings: RolloutSettings, *, last: str) -> RunError:
    """Return why a run ends of which `count` prompts in a row failed; `last` is the last one and its reason."""
    return RunError(
        f"{count} prompts in a row failed, more than {settings.max_generation_failures} steps of "
        f"{settings.num_prompts_per_step} (grpo.async_grpo.max_generation_failures); the last one, {last}"
    )
