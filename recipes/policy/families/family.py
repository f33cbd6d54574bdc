"""What differs between model families: one object per family, and the list of those that the policy builds."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes.policy.families.mapping import WeightMapping
from recipes.policy.families.nemotron_h import NemotronH
from recipes.policy.families.transformer import Llama, Mistral, Qwen2, Qwen3, Qwen3Moe
from recipes.policy.layers.head import OutputConfig
from recipes.policy.layers.token_heads import TokenHeads


class Family(Protocol):
    """One model family. `hf` is the transformers configuration of the checkpoint."""

    architectures: tuple[str, ...]
    """What `architectures` of its config.json files says."""

    def refusals(self, hf: Any) -> list[tuple[str, str, str]]:
        """Return (key of config.json, what it says, what it must say) of everything that the family cannot build."""
        ...

    def config(self, hf: Any) -> dict[str, Any]:
        """Return the arguments of `TransformerConfig` that follow from the model alone."""
        ...

    def build(self, hf: Any, config: TransformerConfig, output: OutputConfig) -> torch.nn.Module:
        """Build this rank's part of the model.

        Its last pipeline stage returns log p(label) [1, T] of a packed row (`layers.head`). Weights are undefined.
        """
        ...

    def weights(self, model: Any) -> list[WeightMapping]:
        """List this rank's parameters in model order with their Hugging Face tensors."""
        ...

    def unread_weights(self, hf: Any) -> set[str]:
        """Name the tensors that a checkpoint may have and that the model does not read."""
        ...

    def build_heads(self, hf: Any, config: TransformerConfig) -> TokenHeads | None:
        """Build the multi-token heads on the last pipeline stage; None where config.json has none.

        Weights are undefined. `build` comes first.
        """
        ...

    def head_weights(self, heads: TokenHeads) -> list[WeightMapping]:
        """List the tensors of the heads with their Hugging Face tensors."""
        ...


FAMILIES: tuple[Family, ...] = (NemotronH(), Llama(), Mistral(), Qwen2(), Qwen3(), Qwen3Moe())


def family_of(architecture: str) -> Family | None:
    """Return the family that builds an architecture; None when there is none."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)
