"""What a rehearsal has built, without torch: a process that has built it sends this to the one that prints it."""

from __future__ import annotations

from dataclasses import dataclass

Tensors = list[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRank:
    """One rank as it was built."""

    rank: int
    stage: int  # of the pipeline
    num_bytes: int  # of weights
    num_tensors: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPolicy:
    """A rank of each kind, and all tensors of the model."""

    ranks: tuple[BuiltRank, ...]
    full: Tensors  # as an export has them
    pushed: Tensors  # as engines get them: experts in blocks
    reference: str  # what the tensors were compared with
    num_compared: int
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """One rank of an engine, and how it took a push."""

    num_bytes: int  # of weights on this rank
    num_loaded: int  # tensors
    has_drafter: bool
    differences: tuple[str, ...]
    seconds: float
