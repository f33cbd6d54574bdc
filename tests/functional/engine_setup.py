"""One real engine, and the weights that the policy would have."""

from __future__ import annotations

from dataclasses import dataclass

import tiny_engine
from transformers import PreTrainedModel

from recipes.generation.generation import Generation


@dataclass
class Setup:
    """One engine, and the weights the policy would have; `model` is what was pushed last."""

    generation: Generation
    model: PreTrainedModel
    weights: tiny_engine.WeightFile
    version: int = 0

    def push(self) -> PreTrainedModel:
        """Change all weights, push them, and return a copy of the old model."""
        old = self.copy()
        self.version += 1
        tiny_engine.perturb(self.model, seed=1000 + self.version, scale=0.05)
        self.weights.write(self.model)
        self.generation.drain()
        self.generation.update_weights(self.version)
        return old

    def copy(self) -> PreTrainedModel:
        """Return the weights pushed last, as a model of their own."""
        model = type(self.model)(self.model.config).eval()
        model.load_state_dict(self.model.state_dict())
        return model
