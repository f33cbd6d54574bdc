"""Run Megatron-core on a machine without CUDA: gloo groups, CPU tensors, nothing else changed.

`install()` adds an import hook that compiles `megatron.core` from its own source after a few textual substitutions
(device literals, `torch.cuda.` calls). It has to be source: the literals cannot be reached by patching objects. `torch`
itself is never patched and no byte code is written. With CUDA present the hook does nothing.

The substitutions were written for megatron-core 0.16.1. The modules that training depends on are counted: another
release fails at import, naming the module, instead of computing something else.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CHECKED_VERSION = "0.16.1"
_PACKAGE = "megatron.core."
_STAND_IN = "recipes_cpu_cuda"

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"device=(['\"])cuda(:0)?\1"), "device='cpu'"),
    (re.compile(r"'torch\.cuda\.(Float|Half|BFloat16)Tensor'"), r"'torch.\1Tensor'"),
    (re.compile(r"\.cuda\((?:torch\.cuda\.current_device\(\)|non_blocking=True)?\)"), ".cpu()"),
    (re.compile(r"\bpin_memory=True"), "pin_memory=False"),
    (re.compile(r"(?<![\w'`])(?<!from )(?<!import )torch\.cuda\.(?!amp\b)"), "_cpu_cuda."),
    (re.compile(r"^from torch\.cuda import (.*)$", re.MULTILINE), rf"from {_STAND_IN} import \1"),
)

# Substitutions per rule, in the order of _RULES, where a missed one would train wrongly rather than fail.
_EXPECTED: dict[str, tuple[int, ...]] = {
    "dist_checkpointing.exchange_utils": (3, 0, 2, 0, 0, 0),
    "distributed.distributed_data_parallel": (0, 0, 0, 0, 8, 0),
    "distributed.param_and_grad_buffer": (1, 0, 0, 0, 6, 0),
    "optimizer.clip_grads": (5, 1, 0, 0, 0, 0),
    "optimizer.distrib_optimizer": (0, 5, 1, 0, 2, 0),
    "optimizer.optimizer": (4, 3, 2, 0, 2, 0),
    "pipeline_parallel.schedules": (3, 0, 0, 0, 0, 0),
    "ssm.mamba_block": (1, 0, 0, 0, 0, 0),
    "ssm.mamba_mixer": (0, 0, 0, 0, 5, 0),
    "tensor_parallel.layers": (0, 0, 0, 0, 8, 0),
    "tensor_parallel.mappings": (0, 0, 0, 0, 5, 0),
    "tensor_parallel.random": (0, 0, 0, 0, 13, 2),
    "transformer.moe.experts": (0, 0, 0, 0, 2, 0),
    "transformer.moe.moe_utils": (1, 0, 0, 0, 1, 0),
    "transformer.moe.router": (0, 0, 0, 0, 6, 0),
    "transformer.moe.shared_experts": (0, 0, 0, 0, 8, 0),
    "transformer.moe.token_dispatcher": (0, 0, 0, 0, 4, 0),
}


def install() -> None:
    """Make every later import of `megatron.core` fit this machine; harmless to repeat."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Gives modules of `megatron.core` the rewriting loader when there is no CUDA device."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGE) or torch.cuda.is_available():
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader and _concerns(spec.loader):
            if _STAND_IN not in sys.modules:
                _check_version()
                sys.modules[_STAND_IN] = _cuda_stand_in()
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def _concerns(loader: importlib.machinery.SourceFileLoader) -> bool:
    """Tell whether a module has something to rewrite; the others keep their byte code, which loads much faster."""
    return loader.name == f"{_PACKAGE}jit" or b"cuda" in loader.get_data(loader.path)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source; reads and writes no byte code, which a CUDA run might pick up."""

    def get_code(self, fullname: str) -> types.CodeType:
        source = rewrite(Path(self.path).read_text(encoding="utf-8"), fullname.removeprefix(_PACKAGE))
        return compile(source, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["_cpu_cuda"] = sys.modules[_STAND_IN]
        module.__dict__["te_general_gemm"] = None  # 0.16.1 leaves it undefined without Transformer Engine
        super().exec_module(module)
        if module.__name__ == f"{_PACKAGE}distributed.param_and_grad_buffer":
            module.__dict__["dist_all_gather_func"] = gather_in_place
            module.__dict__["dist_reduce_scatter_func"] = reduce_in_place


def gather_in_place(whole: torch.Tensor, own: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
    """Fill `whole` with the equal parts of all ranks; `own` is this rank's part of it.

    For the weights of the distributed optimizer. torch's form for gloo copies all of them twice more, into memory that
    it allocates anew, also where there is one rank. This one has ended when it returns, whatever `async_op` says.
    """
    del own, async_op
    if group.size() > 1:
        for rank, part in enumerate(whole.chunk(group.size())):
            dist.broadcast(part, group=group, group_src=rank)


def reduce_in_place(
    own: torch.Tensor, whole: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
) -> None:
    """Reduce `whole` over the ranks, of which each then reads its part: `own`, a view of it.

    For the gradients of the distributed optimizer, with the same reason as `gather_in_place`. torch's form for gloo
    reduces a copy of all of them, too.
    """
    del own, async_op
    if group.size() > 1:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce([whole], options).wait()  # torch's function would leave it to the block that it is called in


def rewrite(source: str, module: str) -> str:
    """Return the CPU form of one module's source; `module` is its name below `megatron.core`."""
    counts = []
    for pattern, replacement in _RULES:
        source, count = pattern.subn(replacement, source)
        counts.append(count)
    expected = _EXPECTED.get(module)
    if expected is not None and tuple(counts) != expected:
        raise ImportError(
            f"{_PACKAGE}{module} is not the source that the CPU rewrite was checked with "
            f"(substitutions {tuple(counts)}, expected {expected}); install megatron-core {CHECKED_VERSION}"
        )
    if module == "jit":
        source += "\ndisable_jit_fuser()\n"  # the fuser is torch.compile, which needs a compiler and pays nothing here
    if module == "transformer.moe.moe_utils":
        # all_to_all wants the split sizes as a list on the CPU as well, and there is no stream to record them on.
        for text, replacement in (
            (r"if torch\.is_tensor\(tensor\) and tensor\.is_cuda:", "if torch.is_tensor(tensor):"),
            (r"\btensor\.record_stream\([^\n]*\)$", "pass"),
        ):
            source, count = re.subn(text, replacement, source, flags=re.MULTILINE)
            if count != 1:
                raise ImportError(f"{_PACKAGE}{module} moves split sizes differently; install {CHECKED_VERSION}")
    return source


def _check_version() -> None:
    installed = version("megatron-core")
    if installed != CHECKED_VERSION:
        raise ImportError(
            f"megatron-core {installed} is installed; the CPU rewrite was checked with {CHECKED_VERSION}, install that"
        )


class _Stream:
    """Stands for a CUDA stream or event: everything on the CPU is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def record_event(self) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: object, **kwargs: object) -> None:
    del args, kwargs


def _cuda_stand_in() -> types.ModuleType:
    """Return a module with the part of `torch.cuda` that `megatron.core` reaches on its training path."""
    cpu = torch.device("cpu")
    module = types.ModuleType(_STAND_IN)
    names: dict[str, Any] = {
        "current_device": lambda: cpu,
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "get_device_capability": lambda *_: (0, 0),
        "current_stream": lambda *_, **__: _Stream(),
        "default_stream": lambda *_, **__: _Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Stream,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "default_generators": defaultdict(lambda: torch.default_generator),
        "_lazy_call": lambda function, **_: function(),
        "_lazy_init": _nothing,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    }
    for name in ("set_device", "synchronize", "empty_cache"):
        names[name] = _nothing
    names["random"] = types.SimpleNamespace(get_rng_state=names["get_rng_state"], set_rng_state=names["set_rng_state"])
    module.__dict__.update(names)
    module.__dict__["__getattr__"] = lambda name: getattr(torch.cuda, name)  # class names used in annotations
    return module


class Adam(torch.optim.Optimizer):
    """Adam with the state layout that Megatron's DistributedOptimizer saves and restores exactly.

    The step count lives in the parameter group, as in the fused optimizers Megatron is written for. torch.optim.AdamW
    keeps it per parameter: with megatron-core 0.16.1 a resumed run then fails or silently restarts the bias correction.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,  # Megatron's optimizer for two devices gives all of these with the groups
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,  # Megatron passes it to every fused Adam
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update to every parameter that has a gradient."""
        assert closure is None, "Megatron never passes one"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update_group(group, params)

    def _update_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        steps = [torch.tensor(float(group["step"]), device=param.device) for param in params]
        self._update(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def use_exact_adam() -> None:
    """Let Megatron use `Adam` instead of torch.optim.AdamW, its choice where no fused implementation is installed."""
    from megatron.core import optimizer as factory  # only after install()
    from megatron.core.optimizer import distrib_optimizer

    if factory.USING_PYTORCH_OPTIMIZER:
        factory.Adam, factory.USING_PYTORCH_OPTIMIZER = Adam, False
        distrib_optimizer.Adam = Adam
        distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.USING_TE_OPTIMIZER = True, True
