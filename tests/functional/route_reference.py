"""To which experts transformers sends each token of a sequence, to compare what an engine has reported with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from recipes import routes


@torch.no_grad()
def reference(model: Any, token_ids: Sequence[int]) -> tuple[dict[int, np.ndarray[Any, Any]], dict[int, Any]]:
    """Return for each layer with experts, by its number from 1, the experts of each token and how close a tie was."""
    found, ties = {}, {}
    hooks = []
    for number, layer in enumerate(model.model.layers, start=1):
        gate = getattr(layer.mixer if hasattr(layer, "mixer") else layer.mlp, "gate", None)
        if gate is None:
            continue

        def note(_: Any, __: Any, scores: Any, number: int = number, gate: Any = gate) -> None:
            logits = scores if isinstance(scores, torch.Tensor) else scores[0]
            scores_TE = logits.view(len(token_ids), -1).float().sigmoid() + getattr(
                gate, "e_score_correction_bias", 0.0
            )
            ranked = scores_TE.sort(dim=1, descending=True)
            count = model.config.num_experts_per_tok
            found[number] = np.sort(ranked.indices[:, :count].numpy(), axis=1)
            ties[number] = (ranked.values[:, count - 1] - ranked.values[:, count]).numpy() < 1e-4

        hooks.append(gate.register_forward_hook(note))
    model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return found, ties


def check_routes(
    model: Any, token_ids: Sequence[int], reported: bytes, *, start: int, end: int, compared_from: int = 0
) -> None:
    """Compare what an engine has reported of tokens from `start` to `end`, which must be all that it has reported."""
    expected, ties = reference(model, token_ids)
    layers = tuple(sorted(expected))
    assert [(span.start, span.end, span.layers) for span in routes.spans(reported)] == [(start, end, layers)]
    chosen = routes.laid_out(reported, end, layers, model.config.num_experts_per_tok)[start:]
    for place, layer in enumerate(layers):
        is_equal = (chosen[:, place] == expected[layer][start:end]).all(axis=1)
        is_right = is_equal | ties[layer][start:end]
        assert is_right[max(compared_from - start, 0) :].all(), f"layer {layer}: {np.flatnonzero(~is_equal)}"
