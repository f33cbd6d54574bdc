"""What the routers of experts do beyond Megatron's: frozen weights, and counts of tokens per expert without pads.

Shape legend: T tokens of a row that this rank routes, E experts of a layer, R routers of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


def freeze_routers(model: torch.nn.Module) -> None:
    """Keep the weights of the routers as they are; their bias is no weight and may still move."""
    for layer in _layers(model):
        layer.router.weight.requires_grad_(False)


def count_tokens(model: torch.nn.Module) -> None:
    """Let each router count the tokens of its experts in training passes, without the pads that it is told of."""
    for layer in _layers(model):
        layer.router._apply_expert_bias = _TokenCount(layer.router)


class _TokenCount:
    """Stands for the method by which a router counts tokens for its bias, and keeps a count of its own.

    Megatron's method combines a mask of tokens with a map of tokens and experts, which fails for any mask.
    """

    def __init__(self, router: TopKRouter) -> None:
        self._inner = router._apply_expert_bias
        self.tokens_E = torch.zeros(router.weight.shape[0], device=router.weight.device)

    @torch.no_grad()
    def _count(self, chosen_TE: Tensor, pads_T: Tensor | None) -> None:
        self.tokens_E += (chosen_TE if pads_T is None else chosen_TE & ~pads_T[:, None]).sum(0)

    def __call__(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if torch.is_grad_enabled():  # neither in evaluation nor in a pass that is computed again
            self._count(routing_map, padding_mask)
        self._inner(routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])


def take_expert_loads(model: torch.nn.Module) -> dict[int, float]:
    """Return, by layer number from 1, the tokens of the busiest expert over the mean, since the last call.

    Collective over all ranks; every rank gets the layers of all pipeline stages.
    """
    layers = _layers(model)
    loads: dict[int, float] = {}
    if layers:
        counts_RE = torch.stack([layer.router._apply_expert_bias.tokens_E for layer in layers])
        dist.all_reduce(counts_RE, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        ratios = (counts_RE.amax(1) / counts_RE.mean(1).clamp(min=1e-9)).tolist()
        loads = {layer.layer_number: ratio for layer, ratio in zip(layers, ratios, strict=True)}
        for layer in layers:
            layer.router._apply_expert_bias.tokens_E.zero_()
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() == 1:
        return loads
    all_loads = [loads] * stages.size()
    dist.all_gather_object(all_loads, loads, group=stages)
    return {number: ratio for own in all_loads for number, ratio in own.items()}


def biases_now(*models: torch.nn.Module | None) -> list[tuple[Tensor, Tensor]]:
    """Return the bias of each router that has one, and a copy of it, by which a step that is skipped is undone."""
    routers = [layer.router for model in models if model is not None for layer in _layers(model)]
    return [(router.expert_bias, router.expert_bias.clone()) for router in routers if router.expert_bias is not None]


def pads_of_rank(pads_1T: Tensor, *, is_divided: bool) -> Tensor:
    """Return the part of a row's pads, True where there is one, that a tensor-parallel rank has the tokens of."""
    if not is_divided:
        return pads_1T
    size = parallel_state.get_tensor_model_parallel_world_size()
    own: Tensor = pads_1T.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return own


def _layers(model: torch.nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]
