"""Load a model from a push, with the drafter that guesses tokens for it with the model's own multi-token heads.

A push brings the tensors of both once, under one set of names, and vLLM loads one model at a time. So both are given to
vLLM's weight transfer as one model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from recipes.errors import EngineError, Problem
from recipes.generation.expert_blocks import BlockLoader, Shape

_MOST_NAMES = 5  # in a message


class PushedModels(Module):
    """A model and its drafter, if it drafts with its own heads, as a push loads them.

    What the drafter shares with the model (embedding, output head) belongs to the model. `blocks` are the blocks of
    experts of a push.
    """

    def __init__(self, model: Module, drafter: Module | None = None, blocks: Sequence[Shape] = ()) -> None:
        super().__init__()
        self.model, self.drafter = model, drafter
        self._load = BlockLoader(model, blocks)
        self._shared: list[tuple[Module, str, Module]] = []
        self._all: set[str] = set()
        self._loaded: set[str] = set()
        if drafter is None:
            return
        self._load_drafter = BlockLoader(drafter, blocks)
        own = set(model.modules())
        self._shared = [
            (parent, name, child)
            for parent in drafter.modules()
            if parent not in own
            for name, child in parent.named_children()
            if child in own
        ]
        with self._apart():
            self._all = {name for name, _ in drafter.named_parameters()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Let both models take the tensors that they know; a push may come in several parts."""
        weights = list(weights)
        loaded = self._load.load(weights)
        if self.drafter is not None:
            with self._apart():
                self._loaded |= self._load_drafter.load(weights)
        return loaded

    def require_drafter(self) -> None:
        """Raise `EngineError` where no push has brought a parameter of the drafter; vLLM would not say so."""
        missing = sorted(self._all - self._loaded)
        if missing:
            names = ", ".join(missing[:_MOST_NAMES]) + (", ..." if len(missing) > _MOST_NAMES else "")
            wrong = f"the push has no value for {len(missing)} of {len(self._all)} parameters of the drafter: {names}"
            fix = "train a model whose files have multi-token heads (mtp.*), or remove speculative_config"
            where = "policy.generation.vllm_kwargs.speculative_config"
            raise EngineError(str(Problem(where=where, wrong=wrong, fix=fix)))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Take the shared parts out of the drafter, so that they are not loaded twice."""
        for parent, name, _ in self._shared:
            setattr(parent, name, None)
        try:
            yield
        finally:
            for parent, name, child in self._shared:
                setattr(parent, name, child)


def pushed_drafter(worker: Any) -> Module | None:
    """Return the drafter of a vLLM worker where its weights are part of a push, the model's own heads; None otherwise.

    A drafter of other files than the model's keeps what it has read there.
    """
    speculation, config = worker.speculative_config, worker.model_config
    if speculation is None or speculation.method != "mtp":
        return None
    if speculation.model not in (config.model, config.model_weights):
        return None
    drafter: Module | None = worker.get_draft_model()  # None on a pipeline stage without the output
    return drafter
