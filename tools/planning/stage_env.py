"""Fill the environment contract from the stage table: `make stage1.1 SCALE=tiny` needs no variable set by hand.

A variable that is already set wins. The start weights are the parent stage's last complete export, for the first
stage the SFT checkpoint of the scale, which only scale tiny can make by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recipes.config.stages import PLATFORMS, SCALES, Stage, config_path, find_stage
from recipes.errors import LaunchError, Problem

TINY_MODEL = "models/tiny-sft"
TINY_DATA = "data/tiny"
FILLED = ("EXP_NAME", "CONFIG_PATH", "TRAIN_PATH", "VAL_PATH", "MODEL_PATH")


def scale_of(environ: Mapping[str, str]) -> str:
    """Return the scale that is asked for."""
    return environ.get("SCALE") or "prod"


def platform_of(environ: Mapping[str, str]) -> str:
    """Return the platform that is asked for."""
    return environ.get("PLATFORM") or "h100"


def choice_problems(environ: Mapping[str, str]) -> list[Problem]:
    """Return a problem for a scale or a platform that does not exist."""
    asked = (("SCALE", scale_of(environ), SCALES), ("PLATFORM", platform_of(environ), PLATFORMS))
    return [
        Problem(where=variable, got=value, expected=" or ".join(choices), fix="correct the value")
        for variable, value, choices in asked
        if value not in choices
    ]


def stage_environment(name: str, environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return `environ` with what the stage table knows added to it."""
    if problems := choice_problems(environ):
        raise LaunchError(problems)
    scale, platform = scale_of(environ), platform_of(environ)
    stage = find_stage(name)
    data = root / (TINY_DATA if scale == "tiny" else f"data/{stage.blend}")
    good = data.with_name(f"{data.name}-good")  # the rows whose images `make sif-check` found good
    if "sif" in stage.requires and (good / "manifest.json").is_file():
        data = good
    filled = {
        "EXP_NAME": experiment(stage, scale),
        "TRAIN_PATH": str(data / "train-split.jsonl"),
        "VAL_PATH": str(data / "val-split.jsonl"),
    }
    if not environ.get("CONFIG_PATH"):
        filled["CONFIG_PATH"] = str(config_path(stage, scale, platform))
    if model := start_weights(stage, scale, root / (environ.get("RESULTS_DIR") or "results")):
        filled["MODEL_PATH"] = str(root / model)
    given = {variable: value for variable, value in environ.items() if value}
    if stage.container == "swe" and "SWE_CONTAINER" in given:
        given["CONTAINER"] = given["SWE_CONTAINER"]
    return filled | given | {"STAGE": stage.id}


def experiment(stage: Stage, scale: str) -> str:
    """Return the default name of a stage's run."""
    return stage.experiment if scale == "prod" else f"{stage.experiment}-{scale}"


def start_weights(stage: Stage, scale: str, results: Path) -> Path | None:
    """Return where the stage's start weights are by default; None when only the user knows."""
    if stage.after is not None:
        return results / experiment(find_stage(stage.after), scale) / "checkpoints" / "latest" / "hf"
    return Path(TINY_MODEL) if scale == "tiny" else None
