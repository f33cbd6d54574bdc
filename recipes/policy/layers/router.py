"""What the routers of experts do differently from Megatron's: frozen weights, and a bias that pads do not move."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


def routers(model: torch.nn.Module) -> list[TopKRouter]:
    """Return the routers of a model."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def freeze_routers(model: torch.nn.Module) -> None:
    """Keep the weights of the routers as they are; their bias is no weight and may still move."""
    for router in routers(model):
        router.weight.requires_grad_(False)


def leave_pads_uncounted(model: torch.nn.Module) -> None:
    """Let each router count tokens by expert, from which its bias is updated, without the pads of `pads_of_rank`.

    Megatron's router combines a mask of tokens with a map of tokens and experts, which fails for any mask.
    """
    for router in routers(model):
        router._apply_expert_bias = _Counting(router)


class _Counting:
    """Calls the router's own method with a mask of the map's rank."""

    def __init__(self, router: TopKRouter) -> None:
        self._inner = router._apply_expert_bias

    def __call__(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        self._inner(routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])


def pads_of_rank(pads_1T: Tensor, *, is_divided: bool) -> Tensor:
    """Return the part of a row's pads, True where there is one, that a tensor-parallel rank has the tokens of."""
    if not is_divided:
        return pads_1T
    size = parallel_state.get_tensor_model_parallel_world_size()
    own: Tensor = pads_1T.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return own
