"""Training rows from JSONL, the order they are drawn in, and the check of a whole file before anything starts.

Invariant: given the file, the seed and `data.shuffle`, a position in the stream always means the same (epoch, row). So
a checkpoint stores positions, and a resumed run draws exactly the prompts that were not drawn before.

Which prompt is sampled next: the stream's order, without the prompts of environments that are paused.

A circuit breaker pauses an environment when too many of its rollouts end without a verdict. Otherwise it would use up
its rows one by one, while training goes on with the easy remainder. Its prompts wait unconsumed; from time to time one
of them is tried, and a group with verdicts ends the pause.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from recipes.config.tree import GrpoConfig
from recipes.errors import DataError, Problem, RunError
from recipes.exact_json import dumps, loads, loads_row
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
        """Continue from a checkpoint. Prompts that waited for a paused environment are tried again."""
        self.position, self._skipped, self._returned = position, frozenset(skipped), deque(sorted(set_aside))

    def skipped(self) -> tuple[int, ...]:
        """Return the later positions that will not be drawn in their turn, in order."""
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
        """Take back a prompt whose group cannot be trained; return True where it has failed, False where it waits."""
        if self.breaker.is_paused(group.agent):
            self._waiting[group.agent].append(position)
            return False
        self.failed.append((group.prompt, reason))
        self._failed_lately[group.agent].append((position, group.prompt))
        return True

    def draw_again(self, position: int) -> None:
        """Take back a prompt whose group was good, but which no step needed."""
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
    """Return the error that ends a run after `count` groups for one step had no variance."""
    return RunError(
        f"step {target + 1}: the answers to {count} prompts drawn for it earned the same, too many for "
        f"grpo.dynamic_sampling_max_gen_batches = {batches}: the data is solved or too hard; leave such rows out "
        "(make curriculum), or set grpo.use_dynamic_sampling=false"
    )


def all_fail(count: int, settings: RolloutSettings, *, last: str) -> RunError:
    """Return the error that ends a run after `count` prompts in a row failed; `last` is the last one and its reason."""
    return RunError(
        f"{count} prompts in a row failed, more than {settings.max_generation_failures} steps of "
        f"{settings.num_prompts_per_step} (grpo.async_grpo.max_generation_failures); the last one, {last}"
    )


_MAX_PROBLEMS = 20
NO_LIMIT = 1_000_000  # grpo.max_num_steps of the published stages: as many steps as the rows suffice for
# Agents that write the prompt themselves: the input of their rows is empty.
WRITE_THE_PROMPT = frozenset({"swe_agents_train", "swe_agents_val"})


def row_id(row: Row) -> str:
    """Return the first 16 hex digits of the sha256 of the row's canonical JSON."""
    return hashlib.sha256(dumps(row, sort_keys=True)).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIdentity:
    """What decides which prompt a position of the stream is; a checkpoint holds it."""

    sha256: str  # of the whole file
    num_rows: int
    shuffle: bool
    seed: int


class PromptDataset:
    """Rows of one JSONL file, read on demand; only the place and the checksum of each line are kept in memory."""

    def __init__(self, path: Path) -> None:
        """Read the file once: `sha256` is that of exactly the bytes whose lines are indexed here."""
        self.path = path
        self._offsets: list[int] = []
        self._checksums = array("L")
        self._file = path.open("rb")
        offset, digest = 0, hashlib.sha256()
        for line in self._file:
            if line.strip():
                self._offsets.append(offset)
                self._checksums.append(crc32(line))
            offset += len(line)
            digest.update(line)
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        """Return a row; raises `RunError` when its line of the file has changed."""
        self._file.seek(self._offsets[index])
        line = self._file.readline()
        if crc32(line) != self._checksums[index]:
            changed = f"{self.path}: row {index + 1} is not what it was when the run began: the file was changed"
            raise RunError(f"{changed} during the run; restore it and start again")
        row: dict[str, Any] = loads(line)
        return row


class PromptStream:
    """`num_epochs` passes over a dataset as one numbered stream of prompts."""

    def __init__(self, dataset: PromptDataset, *, num_epochs: int, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._order: list[int] = []
        self._order_epoch = -1
        self.num_prompts = len(dataset) * num_epochs

    def draw(self, position: int) -> tuple[PromptRef, Row] | None:
        """Return the prompt at `position`, or None past the end of the last epoch."""
        if position >= self.num_prompts:
            return None
        epoch, offset = divmod(position, len(self.dataset))
        return self._prompt(epoch, self._permutation(epoch)[offset])

    def position_of(self, ref: PromptRef) -> int:
        """Return the position of a prompt that was drawn from this stream."""
        return ref.epoch * len(self.dataset) + self._permutation(ref.epoch).index(ref.row_index)

    def find(self, ref: PromptRef) -> tuple[PromptRef, Row] | None:
        """Return the prompt that is now where `ref` says, or None when there is no such row."""
        return self._prompt(ref.epoch, ref.row_index) if ref.row_index < len(self.dataset) else None

    def _prompt(self, epoch: int, index: int) -> tuple[PromptRef, Row]:
        row = self.dataset[index]
        return PromptRef(epoch=epoch, row_index=index, prompt_id=row_id(row)), row

    @property
    def identity(self) -> DataIdentity:
        """Return what a position of this stream depends on."""
        return DataIdentity(
            sha256=self.dataset.sha256, num_rows=len(self.dataset), shuffle=self._shuffle, seed=self._seed
        )

    def positions_of(self, prompt_ids: Mapping[str, int]) -> tuple[int, ...]:
        """Return the first n positions of each prompt id, where `prompt_ids` maps the id to n."""
        ids = [row_id(self.dataset[index]) for index in range(len(self.dataset))]
        left = Counter(prompt_ids)
        found = []
        for position in range(self.num_prompts):
            epoch, offset = divmod(position, len(ids))
            prompt_id = ids[self._permutation(epoch)[offset]]
            if left[prompt_id] > 0:
                left[prompt_id] -= 1
                found.append(position)
        return tuple(found)

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._order_epoch:
            self._order = list(range(len(self.dataset)))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        return self._order


def check_file(path: Path, check_row: Callable[[Row], list[str]]) -> list[Problem]:
    """Return the problems of a data file, each with its line number; at most 20, with a count of the rest.

    `check_row` returns what is wrong with one row beyond its general shape (unknown agent, verifier fields).
    """
    if not path.is_file():
        fix = "run `make data`, or set TRAIN_PATH / VAL_PATH"
        return [Problem(where=str(path), wrong="there is no such file", fix=fix)]
    problems: list[Problem] = []
    num_rows = num_bad = 0
    for number, line in _lines(path):
        num_rows += 1
        found = check_line(line, check_row)
        num_bad += bool(found)
        if len(problems) < _MAX_PROBLEMS:
            problems += [
                Problem(where=f"{path}:{number}", wrong=what, fix="correct or remove the row") for what in found
            ]
    if num_bad > _MAX_PROBLEMS:
        more = f"{num_bad} of {num_rows} rows are wrong; only the first are listed"
        problems.append(Problem(where=str(path), wrong=more, fix="run `make data-validate` to see all"))
    if num_rows == 0:
        problems.append(Problem(where=str(path), wrong="the file has no rows", fix="run `make data` again"))
    return problems


def require_rows(path: Path, check_row: Callable[[Row], list[str]]) -> PromptDataset:
    """Open a data file after checking every row; raises `DataError` with all problems."""
    if problems := check_file(path, check_row):
        raise DataError(problems)
    return PromptDataset(path)


def too_few_rows(path: Path, num_rows: int, cfg: GrpoConfig) -> Problem | None:
    """Return a problem when the rows of a run do not suffice for one step."""
    if num_rows * cfg.max_num_epochs >= cfg.num_prompts_per_step:
        return None
    return Problem(
        where=str(path),
        got=f"{num_rows * cfg.max_num_epochs} prompts ({num_rows} rows, {cfg.max_num_epochs} times)",
        expected=f"enough for one step: grpo.num_prompts_per_step is {cfg.num_prompts_per_step}",
        fix="add rows, raise grpo.max_num_epochs, or lower grpo.num_prompts_per_step",
    )


RESTORE_DATA = "restore it, or set data.on_change to keep_ledger (draw the rows that were not trained yet) or restart"
COMPARED_ALONE = Problem(
    where="grpo.val_num_generations_per_prompt",
    wrong="is 1, and answers to rows of the validation set are scored by comparing them",
    fix="set it to 2 or more",
)


def identity_problems(was: DataIdentity, now: DataIdentity, file: Path, saved_at: Path) -> list[Problem]:
    """Name what differs between the data of the checkpoint `saved_at` and that of now, in `file`."""
    names = {"sha256": f"{file}: sha256", "num_rows": f"{file}: rows", "shuffle": "data.shuffle", "seed": "grpo.seed"}
    return [
        Problem(
            where=where,
            got=str(getattr(now, key)),
            expected=f"{getattr(was, key)}, as when {saved_at} was saved",
            fix=RESTORE_DATA,
        )
        for key, where in names.items()
        if getattr(now, key) != getattr(was, key)
    ]


def few_rows(path: Path, num_rows: int, cfg: GrpoConfig) -> Problem | None:
    """Return a problem when the rows of a run suffice for at least one step, but for fewer than it is asked for."""
    drawn, size, asked = num_rows * cfg.max_num_epochs, cfg.num_prompts_per_step, cfg.max_num_steps
    steps = drawn // size
    if not 0 < steps < asked or asked >= NO_LIMIT:
        return None
    epochs = f"{cfg.max_num_epochs} epoch{'s' if cfg.max_num_epochs > 1 else ''}"
    unused = f"; {drawn % size} prompts are left over" if drawn % size else ""
    wrong = f"{num_rows} rows x {epochs} / {size} prompts a step = {steps} of the {asked} steps asked for{unused}"
    fix = "raise grpo.max_num_epochs, lower grpo.num_prompts_per_step, or add rows"
    return Problem(where=str(path), wrong=wrong, fix=fix)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def check_line(line: bytes, check_row: Callable[[Row], list[str]]) -> list[str]:
    """Return what is wrong with one line of a data file."""
    try:
        row = loads_row(line)
    except ValueError as error:
        return [f"invalid JSON ({error})"]
    if not isinstance(row, dict):
        return [f"a JSON {type(row).__name__} instead of an object"]
    if "_hf_placeholder" in row:
        return ["an unfilled `_hf_placeholder`; run the fill step"]
    return _shape_problems(row) or check_row(row)


def _shape_problems(row: Row) -> list[str]:
    params, agent = row.get("responses_create_params"), row.get("agent_ref")
    items = params.get("input") if isinstance(params, dict) else None
    name = agent.get("name") if isinstance(agent, dict) else None
    if not isinstance(items, str | list) or (not items and (items == "" or name not in WRITE_THE_PROMPT)):
        return ["no `responses_create_params.input` (a string or a non-empty list of items)"]
    if not isinstance(name, str):
        return ["no `agent_ref.name`: nothing routes this row to an agent"]
    return []
