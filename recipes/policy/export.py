"""Turn a saved checkpoint into a Hugging Face directory: one process, no run, on the CPU.

The model is built as one rank's, but its memory is never touched: tensors are read from the checkpoint, whichever
layout saved it, one parameter at a time, and written one after the other. So it takes about the memory of the largest
parameter, twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from recipes.config.fits import FORM_FILE, base_problems
from recipes.errors import CheckpointError, Problem
from recipes.files import read_object, sync_tree
from recipes.policy import hf, parallel
from recipes.policy.checkpoint import HEADS, model_state
from recipes.policy.families.mapping import TensorShape, WeightMapping, join, load
from recipes.policy.lora import adapters_of, with_adapters, write_peft
from recipes.policy.model import build_heads, build_model, transformer_config

if TYPE_CHECKING:
    from recipes.config.tree import PolicyConfig

_ALONE: dict[str, Any] = {
    **dict.fromkeys(
        (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")), 1
    ),
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "attention_backend": "local",
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_enable_deepep": False,
    "moe_grouped_gemm": False,
    "use_fused_weighted_squared_relu": False,
    "moe_shared_expert_overlap": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """One parameter of the model, and what it is in the checkpoint."""

    key: str
    stored: Any  # Megatron's description of it, by which it is read
    mapping: WeightMapping

    @property
    def is_frozen(self) -> bool:
        """Whether it is a weight that lies beside adapters, which a checkpoint leaves out."""
        param = self.mapping.param
        return isinstance(param, torch.nn.Parameter) and not (param.requires_grad or self.key.startswith(HEADS))

    def full(self, config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of what it is made of; its memory has been filled."""
        value = self.mapping.value().detach()
        return zip(self.mapping.names, join(self.mapping.sharding, [value], config), strict=True)

    def pieces(self) -> list[Any]:
        """Return the tensors that the checkpoint has of it: one, or several that Megatron joins."""
        return list(nested_values(self.stored.build())) if hasattr(self.stored, "build") else [self.stored]

    def shapes(self, config: TransformerConfig) -> list[TensorShape]:
        """Return name, dtype and shape of its Hugging Face tensors."""
        param = self.mapping.param
        full = join(self.mapping.sharding, [torch.empty(param.shape, dtype=param.dtype, device="meta")], config)
        return [(name, part.dtype, tuple(part.shape)) for name, part in zip(self.mapping.names, full, strict=True)]


def export_checkpoint(path: Path, target: Path, cfg: PolicyConfig) -> None:
    """Write the weights of the checkpoint `path`, with configuration and tokenizer of `cfg`, into `target`.

    Raises `CheckpointError` when the checkpoint is not of the model of `policy.model_name`.
    """
    directory = hf.model_directory(cfg.model_name)
    if problems := base_problems(read_object(path / FORM_FILE), directory, path):
        raise CheckpointError(problems)
    hf_config, family = hf.read_config(directory)
    side_files = hf.side_files(cfg)
    cfg = replace(cfg, megatron_cfg=replace(cfg.megatron_cfg, **_ALONE))
    parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=cfg.megatron_cfg, seed=0, timeout_s=60.0)
    try:
        config = transformer_config(family, hf_config, cfg)
        model = unwrap_model(build_model(family, hf_config, config, cfg))
        own = with_adapters(family.weights(model), model)
        reader = _Reader(path)
        heads = build_heads(family, hf_config, config) if reader.has_heads() else None
        if heads is not None:
            own += family.head_weights(heads)
        added = [mapping for adapter in adapters_of(model) for mapping in adapter.mappings()]
        saved, of_adapters = _saved(own, model, heads), _saved(added, model, None)
        start = hf.WeightReader(directory) if of_adapters else None
        _check_shapes(path, reader, [*of_adapters, *(part for part in saved if start is None or not part.is_frozen)])
        for part in of_adapters:
            reader.fill(part)
        shapes = [shape for part in saved for shape in part.shapes(config)]
        hf.write_weights(shapes, _stream(reader, start, saved, config), target)
        if of_adapters:
            peft = {name: tensor for part in of_adapters for name, tensor in part.full(config)}
            write_peft(peft, cfg.megatron_cfg.peft, cfg.model_name, target)
        hf.write_side_files(side_files, target)
        sync_tree(target)
    finally:
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()


def _saved(own: Sequence[WeightMapping], model: torch.nn.Module, heads: torch.nn.Module | None) -> list[_Saved]:
    """Find each parameter in what Megatron would load; a parameter of two names is listed once."""
    stored = model_state(model, heads)
    modules = [("", model), *([] if heads is None else [(HEADS, heads)])]
    keys = {
        id(value): prefix + name
        for prefix, module in modules
        for name, value in module.state_dict(keep_vars=True).items()
    }
    unique = {mapping.names: mapping for mapping in own}.values()
    return [_Saved(key=keys[id(part.param)], stored=stored[keys[id(part.param)]], mapping=part) for part in unique]


def _check_shapes(path: Path, reader: _Reader, saved: Sequence[_Saved]) -> None:
    """Refuse a checkpoint of another model, before anything is written."""
    wanted = {piece.key: list(piece.global_shape) for part in saved for piece in part.pieces()}
    wrong = [
        f"{key} is {'missing' if reader.size(key) is None else reader.size(key)}, not {size}"
        for key, size in wanted.items()
        if reader.size(key) != size
    ]
    if wrong:
        raise CheckpointError(
            Problem(
                where=str(path),
                wrong=f"{len(wrong)} tensors are not those of policy.model_name, for example: {wrong[0]}",
                fix="give the model directory that the run has started from, or one of the same config.json",
            )
        )


class _Reader:
    """Reads single parameters of a checkpoint; Megatron's own loader wants whole ones of all layers of a kind."""

    def __init__(self, path: Path) -> None:
        self._files = FileSystemReader(path)
        self._metadata = self._files.read_metadata()
        self._files.set_up_storage_reader(self._metadata, is_coordinator=True)

    def size(self, key: str) -> list[int] | None:
        """Return the shape of a tensor of the checkpoint; None when it has none of this name."""
        found = self._metadata.state_dict_metadata.get(key)
        return list(found.size) if isinstance(found, TensorStorageMetadata) else None

    def has_heads(self) -> bool:
        """Return whether the checkpoint has multi-token heads."""
        return any(key.startswith(HEADS) for key in self._metadata.state_dict_metadata)

    def fill(self, part: _Saved) -> None:
        """Read a parameter into its own memory; its pieces are views of it."""
        for piece in part.pieces():
            ones = (1,) * piece.prepend_axis_num
            chunk = ChunkStorageMetadata(
                offsets=torch.Size(piece.global_offset), sizes=torch.Size((*ones, *piece.local_shape))
            )
            stored = self._metadata.state_dict_metadata[piece.key]
            assert isinstance(stored, TensorStorageMetadata), "its size has been compared"
            items = create_read_items_for_chunk_list(piece.key, stored, [chunk])
            assert sum(item.lengths.numel() for item in items) == piece.data.numel(), f"{piece.key} is not all stored"
            self._files.read_data(LoadPlan(items), _Into(piece.data.detach()[(None,) * len(ones)])).wait()


class _Into(DefaultLoadPlanner):
    """Puts everything that is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of the tensor that one stored chunk fills."""
        part: Tensor = narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the chunk has been copied."""


def _stream(
    reader: _Reader, start: hf.WeightReader | None, saved: Sequence[_Saved], config: TransformerConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of one parameter after the other; its memory is given back behind it.

    `start` reads the weights that lie beside adapters; None where the checkpoint has all.
    """
    for part in saved:
        if start is not None and part.is_frozen:
            load([part.mapping], config, start)
        else:
            reader.fill(part)
        yield from part.full(config)
        part.mapping.param.data = part.mapping.param.data.new_empty(0)
