"""Configurations for tests: parts of a shipped stage as the loader reads it, with other values of keys that exist."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.config.load import load_config, require_valid
from recipes.config.tree import Config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


@functools.cache
def stage(file: str = "tiny/stage1_rlvr.yaml") -> Config:
    """Return the configuration of a file under configs/."""
    return require_valid(load_config(CONFIGS / file))


def block(path: str, **values: Any) -> Any:
    """Return one block of the tiny stage, such as `loss_fn` or `grpo.adv_estimator`, with other values.

    A key that the block does not have is a TypeError: a test does not outlive the name of a key.
    """
    found: Any = stage()
    for name in path.split("."):
        found = getattr(found, name)
    return replace(found, **values)


def config(**blocks: Any) -> Config:
    """Return the configuration of the tiny stage with other blocks."""
    return replace(stage(), **blocks)


def environments(**gym: Any) -> Any:
    """Return the block `env` with other values in its `nemo_gym`, such as `instances`."""
    return block("env", nemo_gym=block("env.nemo_gym", **gym))
