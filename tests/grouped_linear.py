"""A stand-in for Transformer Engine's GroupedLinear on a CPU, below Megatron's own classes for it.

Written after release 2.11.0, the pinned one: its arguments, the names of its weights, its assertions, and an extra
state that is empty without fp8. Megatron defines its classes on top of it, and how they lie in a checkpoint, only where
Transformer Engine is installed; here they are taken from its source.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_CLASSES = ("TEGroupedLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")


class GroupedLinear(torch.nn.Module):
    """y_i = x_i A_i^T for each of several weights, which one call takes parts of the input to."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        del sequence_parallel, rng_tracker_name, get_rng_state_tracker, ub_name
        assert not bias and not return_bias, "the stand-in has none"
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        assert parallel_mode in ("row", "column", None)
        self.num_gemms, self.use_bias = num_gemms, bias
        size = tp_size if tp_group is None else tp_group.size()
        out_features //= size if parallel_mode == "column" else 1
        in_features //= size if parallel_mode == "row" else 1
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))
            self.register_parameter(f"weight{index}", weight)
            assert init_method is not None
            init_method(weight)
            weight.tensor_model_parallel, weight.partition_stride = True, 1  # type: ignore[attr-defined]
            weight.partition_dim = 1 if parallel_mode == "row" else 0  # type: ignore[attr-defined]
            setattr(self, f"bias{index}", torch.Tensor().to(dtype=params_dtype, device=device))

    def forward(self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert not self.fuse_wgrad_accumulation, "the stand-in has no such kernel"
        assert is_first_microbatch is None, "it would overwrite gradients that are added up in the kernel"
        assert isinstance(m_splits, list) and all(isinstance(size, int) for size in m_splits)
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        assert sum(m_splits) == len(inp)
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        assert all(weight.dtype == inp.dtype for weight in weights)
        parts = torch.split(inp, m_splits)  # type: ignore[no-untyped-call]
        return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        assert num_gemms == self.num_gemms

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


def stand_in(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Give Megatron the classes that it defines where Transformer Engine is installed, on top of the stand-in.

    No configuration is refused any more for a package. A test that shares its process gives its monkeypatch's method.
    """
    from megatron.core.extensions import transformer_engine  # only after `recipes.policy.cpu`

    from recipes.config import packages

    module: Any = transformer_engine
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    assert len(found) == len(_CLASSES)
    te = types.SimpleNamespace(pytorch=types.SimpleNamespace(GroupedLinear=GroupedLinear))
    names = {**vars(module), "te": te}
    exec(compile(ast.Module(body=list(found), type_ignores=[]), module.__file__, "exec"), names)
    names["_get_extra_te_kwargs"] = lambda config: {"params_dtype": config.params_dtype, "device": "cpu"}
    for name in _CLASSES:
        set_attribute(module, name, names[name])
    set_attribute(packages, "_wrong", lambda name, *, imports: "")
