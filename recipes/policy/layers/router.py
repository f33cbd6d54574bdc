"""What the routers of experts do beyond Megatron's: frozen weights, counts of tokens without pads, replayed routes.

Shape legend: T tokens of a row that this rank routes, E experts of a layer, K of them that a token is sent to, L layers
with experts of this rank, R their routers.

How tokens reach their experts by an all-gather, where ranks have different numbers of tokens.

Megatron's own all-gather takes the numbers for equal. Packed rows of two data-parallel ranks are not, and expert
parallelism makes one group of such ranks.

Shape legend: T tokens of this rank, A tokens of all ranks of the group, H hidden or latent size, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor


class UnevenAllGather(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """Every rank of the group gets all tokens of the group, and computes those of its own experts."""

    routing_map: Tensor

    def token_dispatch(self, hidden_TH: Tensor, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the tokens, their shares of the experts and the map of who is routed where: [A, ...] each."""
        self._sizes = _sizes(len(hidden_TH), self.tp_ep_group, hidden_TH.device)
        self.routing_map = self._gather(self.routing_map)
        return self._gather(hidden_TH), self._gather(probs_TE)

    def token_combine(self, hidden_AH: Tensor) -> Tensor:
        """Add up what the experts of all ranks made of each token, where the token came from: [T, H]."""
        if len(self._sizes) == 1:
            return hidden_AH
        summed: Tensor = reduce_scatter_to_sequence_parallel_region(
            hidden_AH.to(self.local_probs.dtype), group=self.tp_ep_group, input_split_sizes=self._sizes
        )
        return summed.to(hidden_AH.dtype)

    def _gather(self, rows: Tensor) -> Tensor:
        if len(self._sizes) == 1:
            return rows
        gathered: Tensor = gather_from_sequence_parallel_region(
            rows.contiguous(), group=self.tp_ep_group, output_split_sizes=self._sizes
        )
        return gathered


def use_uneven_gather() -> None:
    """Let layers of experts that are built from now on take `UnevenAllGather` where they would take Megatron's."""
    moe_layer.MoEAllGatherTokenDispatcher = UnevenAllGather


def _sizes(num_tokens: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the number of tokens of each rank of the group."""
    if group.size() == 1:
        return [num_tokens]
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([num_tokens], device=device), group=group)
    found: list[int] = sizes.tolist()
    return found


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


def replay_routes(model: torch.nn.Module) -> None:
    """Let the layers of experts send tokens where `row_marks` says that the engine has sent them."""
    for place, layer in enumerate(_layers(model)):
        layer.router.router_replay = _Replay(layer, place)


def routed_layers(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the numbers, from 1, of this rank's layers with experts."""
    return tuple(layer.layer_number for layer in _layers(model))


def row_marks(pads_1T: Tensor, routes_TLK: Tensor | None) -> Tensor:
    """Return what Megatron is given as its mask of pads: with routes, one int16 for the pad and then L * K experts.

    So each pass has the routes of its own row, also one that is computed again while others are under way.
    """
    if routes_TLK is None:
        return pads_1T
    return torch.cat([pads_1T[..., None].to(routes_TLK.dtype), routes_TLK.flatten(1)[None]], dim=2)


class _Replay:
    """Stands for Megatron's record of the routes of one router, and for the `forward` of its layer."""

    def __init__(self, layer: MoELayer, place: int) -> None:
        self._inner: Callable[..., Any] = layer.forward
        self._first = 1 + place * layer.router.topk  # of the marks of a token
        self._routes_TK: Tensor | None = None  # of the pass that is computed now
        # Choices that were replayed, and those of them that the router would not have made.
        self.counts = torch.zeros(2, dtype=torch.float64, device=layer.router.weight.device)
        layer.forward = self._forward

    def _forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> Any:
        if padding_mask is None or padding_mask.dim() == 2:
            return self._inner(hidden_states, intermediate_tensors, padding_mask)
        marks_T, pads_1T = padding_mask[0], padding_mask[:, :, 0]
        self._routes_TK = marks_T[:, self._first :]
        try:
            return self._inner(hidden_states, intermediate_tensors, pads_1T)
        finally:
            self._routes_TK = None

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the numbers of the experts of each token, the best first, as Megatron calls it.

        The order is that of the router's own choice, so that equal choices give equal bits.
        """
        own_TK: Tensor
        scores_TK, own_TK = compute(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        if self._routes_TK is None:
            return scores_TK, own_TK
        routes_TK = self._routes_TK[:, :topk].long()
        is_known_TK = routes_TK >= 0
        chosen_TK = torch.where(is_known_TK, routes_TK, own_TK)
        if torch.is_grad_enabled():  # neither in evaluation nor in a pass that is computed again
            is_changed_TK = (chosen_TK[:, :, None] != own_TK[:, None, :]).all(2)
            self.counts += torch.stack([is_known_TK.sum(), is_changed_TK.sum()])
        scores_TK, order_TK = scores_TE.gather(1, chosen_TK).sort(dim=1, descending=True)
        return scores_TK, chosen_TK.gather(1, order_TK)


def take_changed_routes(model: torch.nn.Module) -> tuple[float, float]:
    """Return the replayed choices that the routers would not have made, and all replayed ones, since the last call.

    Collective over all ranks, which all get the sums over layers and ranks.
    """
    replays = [layer.router.router_replay for layer in _layers(model)]
    counts = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for replay in replays:
        counts += replay.counts
        replay.counts.zero_()
    dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(counts, group=parallel_state.get_pipeline_model_parallel_group())
    replayed, changed = counts.tolist()
    return changed, replayed


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
