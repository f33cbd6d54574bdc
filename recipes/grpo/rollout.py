"""The collector: keeps prompts in flight on the rollout workers, hands whole groups to the replay buffer.

Three loops run at once. What each consumes, waits for, and what unblocks it:

    loop        consumes            waits for                               unblocked by
    ----------  ------------------  --------------------------------------  ----------------------------------
    collector   the prompt stream   its window: targets <= version + age    `set_version` after each refit
    rollouts    one prompt each     a worker: the engine, the environment   their completion, or a deadline
    train loop  groups of a step    P groups of its step in the buffer      `buffer.add`; `fail`, `close` on the way out

The collector is an asyncio loop in a thread of the driver. Everything below runs in that thread, except the methods
that say so. A prompt is drawn once, for one target step; the ledger then says trained or failed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from recipes.environments.contract.rows import last_user_text
from recipes.errors import StalledError, TokensLostError
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.data import (
    NO_VARIANCE,
    CircuitBreaker,
    CollectorState,
    DrawnPrompt,
    Prompt,
    PromptQueue,
    PromptStream,
    RolloutSettings,
    all_fail,
    teaches_nothing,
)
from recipes.rollouts.group import GroupRequest, StoredGroup
from recipes.tokens import TokenStore, lost_groups
from recipes.types import Group, PromptRef, Row, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")
_DUE_PROBE_SECONDS = 1.0  # until a probe that is due, but found no free place, is tried again
_LOOK_SECONDS = 1.0  # between two looks at whether a wait is to end
_SNAPSHOT_SECONDS = 60.0  # a change of the state reads a few rows of the data file at most


class GroupSampler(Protocol):
    """The part of `RolloutWorkers` that the collector uses."""

    async def run_group(self, request: GroupRequest) -> StoredGroup: ...


class RolloutCollector:
    """Owns the thread. Call `restore` when resuming, then `start`, then `set_version` after each refit."""

    def __init__(
        self,
        stream: PromptStream,
        workers: GroupSampler,
        buffer: ReplayBuffer,
        token_store: TokenStore,
        settings: RolloutSettings,
    ) -> None:
        self._workers, self.buffer = workers, buffer
        self.token_store = token_store
        self.settings = settings
        self._version = 0
        self._last_step = 0  # targets from here on are never drawn
        self._assigned: Counter[int] = Counter()  # groups drawn per target, in flight or finished
        self._finished: Counter[int] = Counter()  # groups handed to the buffer per target
        self._in_flight: dict[int, tuple[int, PromptRef, float]] = {}  # position -> target, prompt, start time
        self._retry: list[DrawnPrompt] = []  # restored from a checkpoint, sampled first
        self._consecutive_failures = 0
        self._replaced: Counter[int] = Counter()  # groups that did not teach, per target
        self._num_replaced = 0  # of all targets
        self._num_returned = 0  # prompts whose groups no step needed
        self._has_ended = False
        self._queue = PromptQueue(
            stream,
            CircuitBreaker(settings.circuit_breaker),
            prompts_per_step=settings.num_prompts_per_step,
            window=-(-settings.circuit_breaker.window_rollouts // settings.num_generations_per_prompt),
        )
        self._probe_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()  # held by each change of what a checkpoint keeps
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="collector", daemon=True)
        self._thread.start()

    # -- called by the driver's main thread ---------------------------------------------------------------------

    def start(self, *, version: int, last_step: int) -> None:
        """Begin to draw prompts for the targets `version` .. `version + max_trajectory_age_steps`."""

        def begin() -> None:
            self._version, self._last_step = version, last_step
            self._fill()

        self._loop.call_soon_threadsafe(begin)

    def set_version(self, version: int) -> None:
        """Tell the collector that the engines hold weights `version`; the window moves on by one step."""

        def advance() -> None:
            self._version = version
            for target in [target for target in self._assigned if target < version]:
                del self._assigned[target]
                self._finished.pop(target, None)
                self._replaced.pop(target, None)
            self._fill()

        self._loop.call_soon_threadsafe(advance)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine (validation) on the collector's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def take_back(self, groups: Sequence[Group], lost: TokensLostError) -> None:
        """Take back the groups of a step that could not begin; those whose tokens are lost are sampled again.

        Raises `lost` when all can be read.
        """
        for group in groups:
            self.buffer.add(group)
        self._sample_lost_again(groups, lost)

    def state(self) -> CollectorState:
        """Return a consistent snapshot; call it between steps. It needs the thread only when tokens are lost.

        Finished groups whose tokens are lost are sampled again. Raises `StalledError` when no change of the state ends
        within the deadline, or the tokens do not come.
        """
        while True:
            state = self._snapshot()
            try:
                tokens = self.token_store.get([group.tokens for group in state.finished])
                return replace(state, finished_tokens=tuple(tokens))
            except TokensLostError as lost:
                self._sample_lost_again(state.finished, lost)

    def _sample_lost_again(self, groups: Sequence[Group], lost: TokensLostError) -> None:
        again = lost_groups(groups, self.token_store)
        if not again:
            raise lost
        logger.warning("%s; %d prompts are sampled again", lost, len(again))
        call = self.submit(self._sample_again(again))
        gather_results([call], deadline_seconds=_SNAPSHOT_SECONDS, what="prompts that are sampled again")

    def _snapshot(self) -> CollectorState:
        if not self._lock.acquire(timeout=_SNAPSHOT_SECONDS):
            raise StalledError(f"the collector's state did not come to rest within {_SNAPSHOT_SECONDS:g} s")
        try:
            waiting = [
                DrawnPrompt(position=position, target_step=target, prompt=ref)
                for position, (target, ref, _) in self._in_flight.items()
            ]
            return CollectorState(
                position=self._queue.position,
                in_flight=tuple(sorted(waiting + self._retry, key=lambda drawn: drawn.position)),
                finished=tuple(self.buffer.groups()),
                failed=tuple(sorted(self._queue.failed, key=lambda one: (one[0].epoch, one[0].row_index))),
                skipped=self._queue.skipped(),
                set_aside=self._queue.set_aside(),
            )
        finally:
            self._lock.release()

    def restore(self, state: CollectorState) -> None:
        """Continue from a checkpoint: keep its finished groups, sample what was in flight again."""
        self._queue.restore(state.position, skipped=state.skipped, set_aside=state.set_aside)
        self._queue.failed = list(state.failed)
        self._retry = list(state.in_flight)
        for group, tokens in zip(state.finished, state.finished_tokens, strict=True):
            self._assigned[group.target_step] += 1
            self._finished[group.target_step] += 1
            self.buffer.add(replace(group, tokens=self.token_store.put(tokens)))
        for drawn in self._retry:
            self._assigned[drawn.target_step] += 1

    def prompts_ahead(self, count: int) -> list[Prompt]:
        """Return up to `count` prompts from the position on, without drawing them; call it before `start`."""
        ahead = (self._queue.at(self._queue.position + n) for n in range(count))
        return [prompt for prompt in ahead if prompt is not None]

    def num_in_flight(self) -> int:
        """Return how many prompts have no finished group yet."""
        return len(self._in_flight)

    def environment_metrics(self) -> dict[str, float]:
        """Return, per environment, the share of its last rollouts without a verdict, and what is paused."""
        paused = self.paused()
        return {
            **{f"{name}/no_verdict_share": share for name, share in self._queue.breaker.shares().items()},
            **{f"{name}/paused_seconds": seconds for name, seconds in paused.items()},
            "num_paused_environments": float(len(paused)),
            "num_prompts_set_aside": float(self.num_set_aside()),
            "num_groups_replaced": float(self._num_replaced),
            "num_prompts_returned": float(self._num_returned),
        }

    def paused(self) -> dict[str, float]:
        """Return the environments that are paused, each with its seconds so far."""
        return self._queue.breaker.paused()

    def num_set_aside(self) -> int:
        """Return how many prompts wait for their environment."""
        return len(self._queue.set_aside())

    def waiting_for(self) -> str:
        """Name the oldest work in flight and the paused environments, for a stall's message."""
        oldest = sorted(list(self._in_flight.values()), key=lambda item: item[2])[:3]
        paused = ", ".join(self.paused())
        why = f"{self.num_set_aside()} prompts wait for paused environments: {paused}" if paused else ""
        if not oldest:
            return f"nothing is in flight: {why or 'no prompt could be started'}"
        now = time.monotonic()
        flying = ", ".join(
            f"prompt {ref.key} for step {target + 1} since {now - since:.0f} s" for target, ref, since in oldest
        )
        return f"oldest in flight: {flying}" + (f"; {why}" if why else "")  # the oldest may be a probe

    def close(self) -> None:
        """Cancel what is in flight and end the thread; closing again does nothing."""
        if not self._thread.is_alive():
            return

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.submit(cancel()).result(timeout=10)
        except TimeoutError:
            logger.warning("collector did not stop within 10 s; its thread ends with the process")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    # -- in the collector's thread ------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Draw prompts until every target of the window has its P groups. An error here ends the run."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
        try:
            with self._lock:
                self._draw()
                seconds = self._queue.seconds_to_probe()
        except Exception as failure:
            return self.buffer.fail(failure)
        if seconds is not None:
            self._probe_timer = self._loop.call_later(seconds or _DUE_PROBE_SECONDS, self._fill)

    def _draw(self) -> None:
        for again in self._retry:
            if (prompt := self._queue.at(again.position)) is not None:
                self._launch(again.position, again.target_step, prompt)
        self._retry = []
        newest = min(self._version + self.settings.max_trajectory_age_steps, self._last_step - 1)
        needed = self.settings.num_prompts_per_step
        for target in range(self._version, newest + 1):
            at_once = needed + (self.settings.num_prompts_ahead if self._finished[target] < needed else 0)
            while self._assigned[target] < at_once:
                drawn = self._queue.next()
                if drawn is None:
                    if self._assigned[target] < needed:
                        self._end_of_data(target)
                    return
                self._launch(drawn[0], target, drawn[1])
                self._assigned[target] += 1

    async def _sample_again(self, groups: Sequence[Group]) -> None:
        with self._lock:
            self.buffer.remove(groups)
            for group in groups:
                position = self._queue.position_of(group.prompt)
                self._finished[group.target_step] -= 1
                if (prompt := self._queue.at(position)) is not None:
                    self._launch(position, group.target_step, prompt)

    def _launch(self, position: int, target: int, prompt: Prompt) -> None:
        ref, row = prompt
        self._in_flight[position] = (target, ref, time.monotonic())
        task = self._loop.create_task(self._group(position, target, ref, row))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_of_data(self, target: int) -> None:
        """No prompts are left for `target`: let the train loop end once the complete targets are used.

        It is not the end as long as prompts may come back from a paused environment, or groups from another step.
        """
        may_come_back = bool(self.paused()) and bool(self._queue.set_aside() or self._in_flight)
        is_shared = self.settings.num_prompts_ahead > 0
        may_come_back |= any(is_shared or drawn_for < target for drawn_for, *_ in self._in_flight.values())
        if target == self._version and not self._has_ended and not may_come_back:
            self._has_ended = True
            logger.info("end of data: %d prompts drawn, none left for step %d", self._queue.position, target + 1)
            self.buffer.close()

    async def _group(self, position: int, target: int, ref: PromptRef, row: Row) -> None:
        """Sample one prompt G times; hand the group over, or replace the prompt when it gave no signal."""
        version = self._version
        try:
            headers, tokens = await self.run_group(row, self.settings.sampling, affinity=position)
            group = Group(
                prompt=ref,
                agent=row["agent_ref"]["name"],
                prompt_text=last_user_text(row),
                target_step=target,
                version=version,
                rollouts=headers,
                tokens=tokens,
            )
            self._finish(position, group)
        except Exception as failure:  # ends the run with its cause: a task that died unseen would stall it
            self.buffer.fail(failure)

    def _place(self, position: int, group: Group) -> None:
        """Hand a group to its step. The lock is held.

        Where prompts are drawn ahead, a step has more groups than it needs: a group goes to the first step that lacks
        one and may train on it; where there is none, its prompt is sampled again.
        """
        first = self._version if self.settings.num_prompts_ahead else max(group.target_step, self._version)
        newest = min(group.version + self.settings.max_trajectory_age_steps, self._last_step - 1)
        for target in range(first, newest + 1):
            if self._finished[target] < self.settings.num_prompts_per_step:
                self._assigned[target] += 1
                self._finished[target] += 1
                self.buffer.add(replace(group, target_step=target))
                return
        self._queue.draw_again(position)
        self._num_returned += 1

    def _is_solved(self, target: int) -> bool:
        """Whether so many groups of a step did not teach that its batches of prompts cannot fill it."""
        needed = self.settings.num_prompts_per_step
        most = self.settings.max_gen_batches * (needed + self.settings.num_prompts_ahead) - needed
        return self._replaced[target] > most

    def _finish(self, position: int, group: Group) -> None:
        counts = Counter(f"{rollout.status}: {rollout.reason}" for rollout in group.rollouts if not rollout.is_valid)
        is_valid = group.num_valid >= min(2, len(group.rollouts))
        teaches, target = is_valid and self.settings.teaches(group), group.target_step
        with self._lock:
            del self._in_flight[position]
            self._queue.record(group)
            reason, count = ("", 0) if is_valid else counts.most_common(1)[0]
            self._assigned[target] -= 1
            if teaches:
                self._place(position, group)
            if is_valid and not teaches:
                self._queue.failed.append((group.prompt, NO_VARIANCE))
                self._replaced[target] += target >= self._version  # else the step has its groups
                self._num_replaced += 1
            is_failed = not is_valid and self._queue.give_back(position, group, reason)
            self._consecutive_failures = self._consecutive_failures + 1 if is_failed else 0
        if self._is_solved(target):
            return self.buffer.fail(teaches_nothing(target, self._replaced[target], self.settings.max_gen_batches))
        if not is_failed:
            self._fill()  # the environment may have been paused or resumed, or the group is to be replaced
            return
        logger.warning("prompt %s failed (%d of %d rollouts: %s)", group.prompt.key, count, len(group.rollouts), reason)
        if self._consecutive_failures > self.settings.max_generation_failures * self.settings.num_prompts_per_step:
            last = f"{group.prompt.key}: {reason}"
            return self.buffer.fail(all_fail(self._consecutive_failures, self.settings, last=last))
        self._fill()

    async def run_group(self, row: Row, sampling: Sampling, *, affinity: int, num: int = 0) -> StoredGroup:
        """Have a worker sample G rollouts of one row to train on, or `num` that only measure."""
        count = num or self.settings.num_generations_per_prompt
        request = GroupRequest(row=row, sampling=sampling, affinity=affinity, num_rollouts=count, is_trained=num == 0)
        return await self._workers.run_group(request)


def gather_results(
    futures: Sequence[Future[T]], *, deadline_seconds: float, what: str, look: Callable[[], None] = lambda: None
) -> list[T]:
    """Wait, from the main thread, for all `futures`; raises `StalledError` naming `what` at the deadline.

    The first of them that fails ends the wait. So does `look`, which is called each second, when it raises.
    """
    end = time.monotonic() + deadline_seconds
    while waiting := [future for future in futures if not future.done()]:
        look()
        if (left := end - time.monotonic()) <= 0:
            raise StalledError(f"{what}: {len(waiting)} of {len(futures)} not done after {deadline_seconds:g} s")
        for future in wait(waiting, timeout=min(left, _LOOK_SECONDS), return_when=FIRST_EXCEPTION).done:
            future.result()
    return [future.result() for future in futures]
