"""The values that travel between the steps of the pipeline. Frozen, light to import (no torch at run time).

Shape suffixes: B rollouts in a batch, F combinations of `TurnFlags`, G generations per prompt, P prompts of a step,
T tokens of one span.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Row = Mapping[str, Any]
"""One training row as read from JSONL: `responses_create_params`, `agent_ref`, and the verifier's own fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of one completion were sampled with weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling profile of a request. `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine returned for one sample: ids and log-probabilities, never text."""

    token_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T] natural log, of the sampled token, at the sampling temperature
    versions: tuple[VersionSpan, ...]  # cover [0, T) without gaps
    finish_reason: str  # "stop" | "length"; anything else is the engine's failure
    routes: bytes = b""  # of prompt and answer, see `recipes.routes`; empty where the engine reports none


class ModelClient(Protocol):
    """How an agent samples from the policy: token ids in, one completion out."""

    @property
    def max_model_len(self) -> int:
        """Tokens that the context holds, prompt and answer together."""
        ...

    async def generate(self, prompt_token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Sample one completion; raises `RequestError` when this fails, `EngineError` when no engine is left."""
        ...


class RolloutStatus(StrEnum):
    """How a rollout ended. Only COMPLETED and TRUNCATED carry a reward."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # the context or token budget ended it; scored as it stands
    ENV_FAILED = "env_failed"  # the environment gave no verdict
    JUDGE_FAILED = "judge_failed"  # a judge gave no verdict
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call of a rollout: the ids that were new in its prompt, then what was sampled."""

    prompt_token_ids: tuple[int, ...]  # only what extends the ids seen so far; masked in the loss
    token_ids: tuple[int, ...]  # [T] sampled; trained on
    logprobs: tuple[float, ...]  # [T] from the engine
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    is_invalid_tool_call: bool = False
    has_malformed_thinking: bool = False
    routes: bytes = b""  # of the sequence up to here, those that earlier turns have not got; see `recipes.routes`
    teacher_logprobs: tuple[float, ...] = ()  # [T] of the sampled tokens under a teacher; () where none was asked
    tool_calls: tuple[int, int] = (0, 0)  # how many, and how many of them name a tool that its row does not offer


PREFIX_BREAKS = "prefix_breaks"  # metric of a rollout that ended because a prompt did not extend the ids seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one prompt with its turns. `reward` is None exactly when there was no verdict.

    An agent may make calls that do not continue each other: it edits its history, or asks beside it. They form further
    sequences in `branches`. A call is sampled tokens of one turn, in one sequence; in others it is prompt.
    """

    turns: tuple[Turn, ...]  # of the main sequence
    status: RolloutStatus
    reason: str  # why this reward, or why none
    reward: float | None
    is_flagged: bool = False  # the environment asked to keep it out of the loss (instance_config.mask_sample)
    output_text: str = ""  # decoded last answer, for logs and the report
    metrics: Mapping[str, float] = field(default_factory=dict)  # numeric extras of the verifier
    seconds: float = 0.0  # wall time from first request to verdict
    env_seconds: float = 0.0  # part of it spent in the environment
    response: Mapping[str, Any] | None = None  # the answer, until it is scored together with those of its group
    trajectory: Mapping[str, Any] | None = None  # what an agent in a repository did, for logs; JSON of bounded size
    branches: tuple[tuple[Turn, ...], ...] = ()  # the turns of each further sequence

    @property
    def is_valid(self) -> bool:
        """Whether it has a verdict on at least one sampled token."""
        return self.reward is not None and self.num_generated_tokens > 0

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.all_turns())

    def all_turns(self) -> Iterator[Turn]:
        """Yield the turns of the main sequence, then those of each branch."""
        return itertools.chain(self.turns, *self.branches)


class TurnFlags(IntFlag):
    """What may be wrong with a turn. Where something is counted per combination of flags, this is the index."""

    INVALID_TOOL_CALL = 1
    MALFORMED_THINKING = 2


NUM_FLAGS = 4  # combinations of `TurnFlags`


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutHeader:
    """What the driver keeps of a rollout: everything but its tokens and its text. Of one size, however long it was."""

    status: RolloutStatus
    reason: str
    reward: float | None
    is_flagged: bool
    metrics: Mapping[str, float]
    seconds: float
    env_seconds: float
    num_tokens: int  # of all turns of all sequences, prompts included
    num_prompt_tokens: int  # before the first answer
    first_answer_tokens: int  # sampled in the first turn; 0 without turns, as the next two
    last_answer_tokens: int
    longest_answer_tokens: int
    turns_by_flags: tuple[int, ...]  # [F] how many turns
    generated_by_flags: tuple[int, ...]  # [F] sampled tokens of these turns
    tokens_by_version: tuple[tuple[int, int], ...]  # weight version and how many tokens it sampled, ascending
    finish_reason: str | None  # of the last turn
    branches: tuple[tuple[int, int], ...] = ()  # of each further sequence: tokens, and how many of them were sampled
    tool_calls: tuple[int, int] = (0, 0)  # of all turns, as `Turn` has them

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Tokens, and how many of them were sampled, of the main sequence and of each branch."""
        tokens, sampled = sum(branch[0] for branch in self.branches), sum(branch[1] for branch in self.branches)
        return (self.num_tokens - tokens, self.num_generated_tokens - sampled), *self.branches

    @property
    def is_valid(self) -> bool:
        """Whether it may enter a group's statistics and the loss."""
        return self.reward is not None and self.num_generated_tokens > 0

    @property
    def num_turns(self) -> int:
        return sum(self.turns_by_flags)

    @property
    def num_generated_tokens(self) -> int:
        return sum(self.generated_by_flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRef:
    """Identity of one prompt in one pass over the data: the unit of the ledger."""

    epoch: int
    row_index: int  # 0-based line of the train file
    prompt_id: str  # sha256 of the row's canonical JSON, first 16 hex digits

    @property
    def key(self) -> str:
        return f"{self.epoch}:{self.row_index}:{self.prompt_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The header of a finished group: G rollouts of one prompt, earmarked for one training step."""

    prompt: PromptRef
    agent: str  # agent_ref.name of the row
    prompt_text: str  # last user message, for logs
    target_step: int  # the 0-based step that trains on it
    version: int  # weight version when it was started
    rollouts: tuple[RolloutHeader, ...]  # [G]
    tokens: Any = None  # reference to the group's arrays in the `TokenStore`; None in a file

    @property
    def num_valid(self) -> int:
        return sum(rollout.is_valid for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One optimizer step's rows: one value per row and field, and where the rows' tokens lie.

    A row is a rollout until `spread_over_sequences`, then one sequence of a rollout.
    """

    tokens: tuple[Any, ...]  # [P] references into the `TokenStore`; a rank puts the arrays in their place
    group_B: Tensor  # int64, number of the row's group: its entry of `tokens`
    member_B: Tensor  # int64, number of the row within its group
    lengths_B: Tensor  # int64, tokens; 1 for a row without any
    sample_mask_B: Tensor  # float32, 0 removes a row from the loss
    rewards_B: Tensor  # float64, NaN where there was no verdict
    advantages_B: Tensor  # float32
    flag_advantages: tuple[float | None, ...] = (None,) * NUM_FLAGS  # [F] of flagged turns; None is the row's own
    nll_weight_B: Tensor | None = None  # float32, factor on the row's negative log-likelihood in the loss; None = 0
    pair_B: Tensor | None = None  # int64, n in the preferred row of pair n, -n in the other, 0 in none; None = 0
    rollout_B: Tensor | None = None  # int64, ascending, number of the row's rollout; None: each row is a rollout
    row_weight_B: Tensor | None = None  # float32, the row's share of its rollout in a mean over rollouts; None = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss needs beside the current log-probabilities; constants with respect to the gradient.

    B rows of a microbatch, T = padded length - 1: entry t belongs to token t + 1. Every row is a whole sequence.
    """

    token_mask_BT: Tensor  # 1 on sampled tokens
    sample_mask_B: Tensor  # 0 removes a sample
    advantages_BT: Tensor
    rewards_B: Tensor  # float64, NaN where there was no verdict
    prev_logprobs_BT: Tensor  # of the policy before the step
    generation_logprobs_BT: Tensor
    reference_logprobs_BT: Tensor | None = None  # needed when the KL penalty is on
    nll_weight_B: Tensor | None = None  # factor on the row's negative log-likelihood; None = 0
    row_weight_B: Tensor | None = None  # factor on the row's part of a loss that is a mean over rows; None = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What one microbatch adds to the loss of the whole batch; all tensors are scalars.

    How many tokens and sequences stay in the loss is known only after the last microbatch. So nothing is divided here:
    the loss of the batch is the sum of all `loss` divided by the sum of all `count`, and so is its gradient.
    """

    loss: Tensor  # with gradient
    count: Tensor  # tokens, or sequences, that stay in the loss
    sample_mask_B: Tensor  # of the microbatch's rows; 0 also for those that the loss itself has taken out
    metrics: Mapping[str, Tensor | tuple[Tensor, Tensor]]
    """A pair is a mean: both entries add up over the batch, then the first is divided by the second. Other metrics add
    up, except names with `min` or `max` at one end, which combine by it and are infinite where there is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One rollout on the rank that trains on it, before the step. Entry t of a tensor belongs to token t."""

    advantage: float
    loss_mask_S: Tensor  # float32, 1 on tokens in the loss
    logprobs_S: Tensor  # float32, under the weights before the step; the first is 0
    reference_logprobs_S: Tensor | None = None  # float32, under the reference policy, if there is one; the first is 0
    teacher_logprobs_S: Tensor | None = None  # float32, under the teacher that was asked; 0 on tokens not sampled
    pair: int = 0  # as `TrainBatch.pair_B`


class TokenAdvantages(Protocol):
    """Turns one advantage per rollout into one per token; picklable, because every rank gets its copy."""

    def __call__(
        self, rows: Sequence[PolicyRow], total: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], dict[str, float | tuple[float, float]]]:
        """Return float32 [S] for each row of this rank, and metrics of the form of `LossSums.metrics`.

        `total` adds a tensor up over all data-parallel ranks, which all call it equally often.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceUse:
    """What a policy is compared with: log-probabilities of its start weights, or those that a teacher gave rollouts.

    The first enter the loss or change the advantages, the others are the advantages.
    """

    token_advantages: TokenAdvantages | None = None  # None: they enter the loss
    keeps_start: bool = True  # false where a teacher alone is compared with


class LossFunction(Protocol):
    """The loss that a policy is given: picklable, because every rank gets its copy."""

    def __call__(self, logprobs_BT: Tensor, inputs: LossInputs) -> LossSums:
        """Return the sums of one microbatch."""
        ...


PUSH_BUCKET_BYTES = 256 << 20  # of tensors that are broadcast as one; the last of them may go over
_BLOCK = re.compile(r"(.*\.experts\.)(\d+)-(\d+)(\..+)")


def experts_of(name: str) -> tuple[str, ...] | None:
    """Return the names of the experts of a block, in its order; None for any other tensor of a push.

    A block is one matrix of consecutive experts of a layer, stacked: `...experts.0-31.up_proj.weight` has 32.
    """
    found = _BLOCK.fullmatch(name)
    if found is None:
        return None
    return tuple(f"{found[1]}{number}{found[4]}" for number in range(int(found[2]), int(found[3]) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Where each tensor of a push lies in the shared-memory file the policy writes and the engines read.

    They are full tensors under Hugging Face names, or blocks of experts (`experts_of`).
    """

    path: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # torch names without the prefix, e.g. "float32"
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # bytes, 64-aligned
    num_bytes: int  # of the whole file
    host: str = ""  # that has the file; an engine elsewhere gets a copy
    count_offset: int | None = None  # of an int64 in the file: how many tensors all pushes have written
    is_verified: bool = False  # whether both sides compute a checksum of each tensor, to be compared after each push

    @property
    def digest(self) -> str:
        """Identify names, dtypes and shapes in their order: what cuts the bytes of a push into tensors."""
        return hashlib.sha256(repr((self.names, self.dtypes, self.shapes)).encode()).hexdigest()[:16]
