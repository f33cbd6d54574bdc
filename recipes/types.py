"""The values that travel between the steps of the pipeline. Frozen, light to import (no torch at run time).

Shape suffixes: B rollouts in a batch, S padded sequence length (position-aligned to tokens),
G generations per prompt, T tokens of one span.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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


class ModelClient(Protocol):
    """How an agent samples from the policy: token ids in, one completion out."""

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
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


PREFIX_BREAKS = "prefix_breaks"  # metric of a rollout that ended because a prompt did not extend the ids seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one prompt with its turns. `reward` is None exactly when there was no verdict."""

    turns: tuple[Turn, ...]
    status: RolloutStatus
    reason: str  # why this reward, or why none
    reward: float | None
    is_flagged: bool = False  # the environment asked to keep it out of the loss (instance_config.mask_sample)
    output_text: str = ""  # decoded last answer, for logs and the report
    metrics: Mapping[str, float] = field(default_factory=dict)  # numeric extras of the verifier
    seconds: float = 0.0  # wall time from first request to verdict
    env_seconds: float = 0.0  # part of it spent in the environment
    response: Mapping[str, Any] | None = None  # the answer, until it is scored together with those of its group

    @property
    def is_valid(self) -> bool:
        """Whether it may enter a group's statistics and the loss."""
        return self.reward is not None and any(turn.token_ids for turn in self.turns)

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)


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
    """G rollouts of one prompt, earmarked for one training step."""

    prompt: PromptRef
    agent: str  # agent_ref.name of the row
    prompt_text: str  # last user message, for logs
    target_step: int  # the 0-based step that trains on it
    version: int  # weight version when it was started
    rollouts: tuple[Rollout, ...]  # [G]

    @property
    def num_valid(self) -> int:
        return sum(rollout.is_valid for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """Where one sampled turn lies in a batch: tokens [start, end) of `row`."""

    row: int
    start: int
    end: int
    is_invalid_tool_call: bool = False
    has_malformed_thinking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One optimizer step's samples, right-padded; entry [b, t] belongs to token t, entry 0 is unused."""

    input_ids_BS: Tensor  # int64
    input_lengths_B: Tensor  # int64, unpadded
    token_mask_BS: Tensor  # float32, 1 on sampled tokens
    sample_mask_B: Tensor  # float32, 0 removes a sample from the loss
    generation_logprobs_BS: Tensor  # float32, 0 where token_mask is 0
    advantages_BS: Tensor  # float32
    rewards_B: Tensor  # float64, NaN where there was no verdict
    group_B: Tensor  # int64, number of the row's group
    turn_spans: tuple[TurnSpan, ...] = ()  # every sampled turn
    nll_weight_B: Tensor | None = None  # float32, factor on the row's negative log-likelihood in the loss; None = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """What one microbatch adds to the loss of the whole batch; all tensors are scalars.

    How many tokens and sequences stay in the loss is known only after the last microbatch. So nothing is divided here:
    the loss of the batch is the sum of all `loss` divided by the sum of all `count`, and so is its gradient.
    """

    loss: Tensor  # with gradient
    count: Tensor  # tokens, or sequences, that stay in the loss
    metrics: Mapping[str, Tensor | tuple[Tensor, Tensor]]
    """A pair is a mean: both entries add up over the batch, then the first is divided by the second. Other metrics add
    up, except names with `min` or `max` at one end, which combine by it and are infinite where there is no value."""


class LossFunction(Protocol):
    """The loss that a policy is given: picklable, because every rank gets its copy."""

    def __call__(self, logprobs_BT: Tensor, inputs: LossInputs) -> LossSums:
        """Return the sums of one microbatch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Where each full, HF-named tensor lies in the shared-memory file the policy writes and the engines read."""

    path: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # torch names without the prefix, e.g. "float32"
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # bytes, 64-aligned
    num_bytes: int  # of the whole file
    host: str = ""  # that has the file; an engine elsewhere gets a copy
