"""The known and expected numbers of a stage before it runs, as `make plan` prints them."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.config.keys.derive import Derived
from recipes.config.stages import Stage
from recipes.config.tree import Config
from tools.sizing.architecture import Architecture
from tools.sizing.memory import EngineMemory, HostMemory, TrainerMemory
from tools.sizing.simulator import Forecast, Loop
from tools.sizing.speed import Assumptions
from tools.sizing.start_volume import StartVolume

BUSY = 0.1  # a trainer that waits for less than this share of the time counts as busy


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A forecast with one number of generation nodes (on one node: of engines) and one limit of the trajectory age."""

    generation_nodes: int
    num_engines: int
    max_age: int
    total_gpus: int
    forecast: Forecast

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of one step."""
        return self.total_gpus * self.forecast.step_seconds / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """All known and expected numbers of a stage."""

    stage: Stage
    scale: str
    platform: str
    config: Config
    sizes: Derived
    model: Architecture
    trainer: TrainerMemory
    host: HostMemory
    engine: EngineMemory
    gpu_bytes: float | None  # of one GPU; None on a CPU
    given: Assumptions
    loop: Loop
    expected: WhatIf  # as configured
    what_if: tuple[WhatIf, ...]  # other numbers of generation nodes, ascending
    other_ages: tuple[WhatIf, ...]  # the configured nodes with other limits of the trajectory age
    checkpoint_bytes: float
    save_seconds: float
    start: tuple[StartVolume, ...]  # what the nodes read before the first step, largest first

    @property
    def enough(self) -> WhatIf | None:
        """The row with the fewest generation nodes that keep the trainer busy; None when no simulated number does."""
        return next((row for row in self.what_if if row.forecast.policy_waits <= BUSY), None)

    @property
    def longest_rollout_seconds(self) -> float:
        """How long the longest possible rollout takes on an engine without other sequences."""
        longest = self.config.policy.max_total_sequence_length - self.given.prompt_tokens
        return longest * self.loop.decode_seconds(1) + self.given.turns * self.given.environment_seconds
