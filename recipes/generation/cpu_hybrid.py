"""Models with experts or Mamba layers on CPU, where vLLM 0.32 lacks three parts of what they need.

Experts without a gate, such as down(relu(up x)^2), have no CPU kernel, and vLLM refuses to build the model. Where the
ranks of an engine share the experts, the kernel for experts with a gate takes the number of an expert in the model for
its number on the rank: it reads and writes memory that is not its own. With the prefix cache on, Mamba layers promise a
state inside a prompt that the CPU scan does not return.

What vLLM reports of the experts of each token comes from its newer model runner, which needs Triton. Here the older one
gets the same code. vLLM's check of the configuration refuses that; the engine's actor leaves it out.

Shape legend: T tokens, K experts that each token is sent to, H hidden size, E experts of this rank, I units of an
expert.

A random generator for requests with a seed on CPU, where vLLM 0.32 lacks one half of what it expects.

vLLM samples a token also from a prompt of which it has computed only a part, drops the token, and takes the random
number back by the generator's offset. CPU generators have no offset, so the EngineCore process would end there.

Speculative decoding on CPU, where three functions of vLLM 0.32 lead to wrong tokens without an error.

After a rejected draft a Mamba layer must go on from its state before that draft. The CPU forms of the convolution and
of the scan do not look at how many tokens were accepted. And the CPU form of the function that repeats a request's
temperature, top-k and top-p for each of its drafts writes into a copy, so drafts are judged at values from memory that
nothing has written. The functions here are plain torch, one request after the other: right, but slow.

Shape legend: T tokens of all requests, N requests, D convolution channels, W width of the convolution, h heads, d head
size, s state size, g groups of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class RewindingGenerator(torch.Generator):
    """A generator that takes numbers back by starting again from its seed.

    Nothing has been sampled from a prompt that is not complete, so the number taken back is always the first. The one
    exception is a request that was preempted: its numbers are then those of its first tokens once more.
    """

    def get_offset(self) -> int:
        """Return 0: the offset of the start."""
        return 0

    def set_offset(self, _offset: int) -> torch.Generator:
        """Go back to the seed."""
        return self.manual_seed(self.initial_seed())


def install_generators() -> None:
    """Have vLLM make such generators in this process."""
    torch.Generator = RewindingGenerator  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of one request, and how many tokens of its last call were accepted."""

    number: int  # of the request
    slot: int  # where its state lies; `NULL_BLOCK_ID`: it has none
    accepted: int
    begin: int
    end: int


def new_tokens(slots_N: Tensor, accepted_N: Tensor, bounds: Tensor) -> list[NewTokens]:
    """List the requests that have a state and new tokens, which lie between their two `bounds`."""
    ends = bounds.tolist()
    rows = zip(slots_N.tolist(), accepted_N.tolist(), ends[:-1], ends[1:], strict=True)
    found = [NewTokens(number, *row) for number, row in enumerate(rows)]
    return [one for one in found if one.slot != NULL_BLOCK_ID and one.begin < one.end]


def convolve(
    x_TD: Tensor, states: Tensor, weight_DW: Tensor, bias_D: Tensor | None, requests: Sequence[NewTokens], *, silu: bool
) -> Tensor:
    """Return the causal convolution of each request's new tokens, [T, D], and move its state on.

    A state [D, W - 1 + drafts] begins with the W - 1 inputs before the first token of the last call and goes on with
    the tokens of that call: those that count now end with the last accepted one.
    """
    before = weight_DW.shape[1] - 1
    result = torch.zeros_like(x_TD)
    for one in requests:
        state, own = states[one.slot], slice(one.begin, one.end)
        earlier = state[:, one.accepted - 1 : one.accepted - 1 + before]
        inputs = torch.cat([earlier, x_TD[own].T.to(state.dtype)], dim=1)
        value = functional.conv1d(inputs[None].to(weight_DW.dtype), weight_DW[:, None], bias_D, groups=len(weight_DW))
        result[own] = (functional.silu(value) if silu else value)[0].T.to(result.dtype)
        state[:, : inputs.shape[1] - 1] = inputs[:, 1:]
    return result


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a Mamba-2 layer computes for its new tokens: h = exp(dt A) h + dt B x and y = C h + D x.

    dt = softplus(dt_Thd + dt_bias). Source: https://arxiv.org/abs/2405.21060.
    """

    x_Thd: Tensor
    dt_Thd: Tensor
    A_hds: Tensor
    B_Tgs: Tensor
    C_Tgs: Tensor
    D_hd: Tensor
    dt_bias_hd: Tensor

    def step(self, state_hds: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Return the state after a token, and its output [h, d]."""
        repeats = self.x_Thd.shape[1] // self.B_Tgs.shape[1]
        b_hs, c_hs = (x[token].repeat_interleave(repeats, dim=0).float() for x in (self.B_Tgs, self.C_Tgs))
        x_hd, step_hd = self.x_Thd[token].float(), functional.softplus(self.dt_Thd[token].float() + self.dt_bias_hd)
        state_hds = state_hds * torch.exp(step_hd[..., None] * self.A_hds) + (step_hd * x_hd)[..., None] * b_hs[:, None]
        return state_hds, (state_hds * c_hs[:, None]).sum(-1) + self.D_hd * x_hd


def scan(
    states: Tensor, layer: Recurrence, requests: Sequence[NewTokens], *, write_NK: Tensor, out_Thd: Tensor
) -> None:
    """Write the output of each new token to `out_Thd`, and the state after new token k of request n to `write_NK`."""
    for one in requests:
        state_hds = states[one.slot].float()
        for token in range(one.begin, one.end):
            state_hds, out_hd = layer.step(state_hds, token)
            out_Thd[token] = out_hd.to(out_Thd.dtype)
            place = int(write_NK[one.number, token - one.begin])
            if place != NULL_BLOCK_ID:
                states[place] = state_hds.to(states.dtype)


def repeat_for_tokens(
    x_N: Tensor, ends_N: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return entry n of `x_N` for each token of request n, [T]; `replace_from` becomes `replace_to`."""
    replaced_N = torch.where(x_N == replace_from, torch.as_tensor(replace_to, dtype=x_N.dtype), x_N)
    counts_N = ends_N.diff(prepend=ends_N.new_zeros(1)).to(torch.int64)
    return replaced_N.repeat_interleave(counts_N, output_size=num_tokens)


def install_speculation() -> None:
    """Replace the three in this process, the two of Mamba layers only where drafts are judged; harmless to repeat."""
    if rejection_sampler.expand_batch_to_tokens is repeat_for_tokens:
        return
    rejection_sampler.expand_batch_to_tokens = repeat_for_tokens
    plain_convolution, plain_scan = mamba_mixer2.causal_conv1d_update, mamba_mixer2.selective_state_update

    def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        accepted_N = kwargs.get("num_accepted_tokens")
        if accepted_N is None:
            result: Tensor = plain_convolution(x, conv_state, weight, *args, **kwargs)
            return result
        bias, activation = args
        slots = kwargs["conv_state_indices"]
        requests = new_tokens(slots[:, 0] if slots.dim() == 2 else slots, accepted_N, kwargs["query_start_loc"])
        return convolve(x, conv_state, weight, bias, requests, silu=activation in ("silu", "swish", True))

    def selective_state_update(states: Tensor, *args: Any, **kwargs: Any) -> None:
        accepted_N = kwargs.get("num_accepted_tokens")
        if accepted_N is None:
            plain_scan(states, *args, **kwargs)
            return
        # The state after token k of the last call lies in slot k of the request.
        slots_N = kwargs["state_batch_indices"].gather(1, (accepted_N.to(torch.int64) - 1)[:, None])[:, 0]
        requests = new_tokens(slots_N, accepted_N, kwargs["cu_seqlens"])
        places = kwargs["dst_state_batch_indices"]
        scan(states, Recurrence(*args), requests, write_NK=places, out_Thd=kwargs["out"])

    mamba_mixer2.causal_conv1d_update = causal_conv1d_update
    mamba_mixer2.selective_state_update = selective_state_update


_ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    MoEActivation.RELU2_NO_MUL: lambda x: functional.relu(x).square_(),
    MoEActivation.SILU_NO_MUL: functional.silu,
    MoEActivation.GELU_NO_MUL: functional.gelu,
}
_REFUSAL = "is_act_and_mul=False"  # of vLLM's message


class UngatedExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Experts of two matrices each: up [E, I, H] and down [E, H, I], used as they were loaded."""

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _ACTIVATIONS

    @staticmethod
    def is_supported_config(cls: Any, *args: Any) -> Any:
        """Decide by the two methods above, not as the parent does for its gated kernel."""
        return modular_kernel.FusedMoEExperts.is_supported_config(cls, *args)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack nothing, so that a weight push reaches what is used."""

    def apply(self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **options: Any) -> None:
        """Sum over the experts of each token, into `output` [T, H]; vLLM passes `options` by name."""
        assert self.w1_bias is None and self.w2_bias is None, "these experts have no biases"
        assert not options["apply_router_weight_on_input"]
        weights_TK, ids_TK = on_this_rank(options["topk_weights"], options["topk_ids"], options["expert_map"])
        run, num_experts = _ACTIVATIONS[options["activation"]], w1.shape[0]
        order = ids_TK.flatten().argsort(stable=True)
        token = order // ids_TK.shape[1]
        counts = torch.bincount(ids_TK.flatten(), minlength=num_experts).tolist()
        parts = [
            functional.linear(run(functional.linear(own, w1[expert])), w2[expert])
            for expert, own in enumerate(torch.split(hidden_states[token], counts))  # type: ignore[no-untyped-call]
            if len(own)
        ]
        share = weights_TK.flatten()[order, None].to(output.dtype)
        output.zero_().index_add_(0, token, torch.cat(parts) * share)


def on_this_rank(weights_TK: Tensor, ids_TK: Tensor, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers that experts have on this rank; those of other ranks weigh nothing.

    `expert_map` has the number on this rank of each expert of the model, or -1; None: all are on this rank.
    """
    if expert_map is None:
        return weights_TK, ids_TK
    own_TK = expert_map[ids_TK.long()].to(ids_TK.dtype)
    return weights_TK.masked_fill(own_TK < 0, 0.0), own_TK.clamp(min=0)


def install() -> None:
    """Add all parts to vLLM in this process; harmless to repeat."""
    if getattr(FusedMoEConfig, "has_ungated_experts", False):
        return
    FusedMoEConfig.has_ungated_experts = True
    check, kernels = FusedMoEConfig.__post_init__, unquantized.backend_to_kernel_cls
    cache_spec, gated = MambaMixer2.get_kv_cache_spec, CPUUnquantizedExperts.apply

    def post_init(self: Any) -> None:
        try:
            check(self)
        except NotImplementedError as error:  # its last statement: all fields are set
            if _REFUSAL not in str(error):
                raise

    def backend_to_kernel_cls(backend: Any) -> list[Any]:
        own = [UngatedExperts] if backend is unquantized.UnquantizedMoeBackend.CPU else []
        return [*kernels(backend), *own]

    def apply(self: Any, **options: Any) -> None:
        assert options["expert_map"] is None or not options["apply_router_weight_on_input"]
        weights_TK, ids_TK = on_this_rank(options["topk_weights"], options["topk_ids"], options["expert_map"])
        gated(self, **{**options, "topk_weights": weights_TK, "topk_ids": ids_TK})

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = cache_spec(self, vllm_config)
        if getattr(spec, "num_prefill_checkpoint_blocks", 0):  # without it the scheduler ends a prefill at each state
            return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
        return spec

    FusedMoEConfig.__post_init__ = post_init
    CPUUnquantizedExperts.apply = apply
    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
    unquantized.backend_to_kernel_cls = backend_to_kernel_cls


def install_routes() -> None:
    """Let the model runner of this process report the experts of each token, where the engine is asked to."""
    plain_cache, plain_execute = CPUModelRunner.initialize_kv_cache, CPUModelRunner.execute_model
    plain_sample = CPUModelRunner.sample_tokens

    def initialize_kv_cache(self: Any, kv_cache_config: Any, is_profiling: bool = False, **others: Any) -> None:
        plain_cache(self, kv_cache_config, is_profiling, **others)
        self.routes, self.pending_routes = None, None
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self.routes = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self: Any, scheduler_output: Any, *others: Any) -> Any:
        if self.routes is None:
            return plain_execute(self, scheduler_output, *others)
        self.routes.begin_step(scheduler_output.aux_output_connector_metadata)
        result = plain_execute(self, scheduler_output, *others)
        if result is None:  # sampling follows
            count = self.input_batch.num_reqs
            batch = SimpleNamespace(
                req_ids=self.input_batch.req_ids[:count],
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:count].copy(),
                query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
            )
            drafts = scheduler_output.scheduled_spec_decode_tokens
            num_drafts = np.array([len(drafts.get(name, ())) for name in batch.req_ids])
            self.pending_routes = self.routes.prepare_output(batch), num_drafts
        return result

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = plain_sample(self, grammar_output)
        if self.pending_routes is None:
            return output
        (pending, num_drafts), self.pending_routes = self.pending_routes, None
        if pending is not None:  # None on ranks that report nothing
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            num_rejected = np.where(num_sampled > 0, num_drafts + 1 - num_sampled, 0)
            pending.enqueue_cpu_copy(num_sampled, num_rejected)
            output.aux_output_connector_output = pending.process_output()
        return output

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model = execute_model
    CPUModelRunner.sample_tokens = sample_tokens
