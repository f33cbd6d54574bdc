"""Fill the environment contract from the stage table: `make stage1.1 SCALE=tiny` needs no variable set by hand.

A variable that is already set wins. The start weights are the parent stage's last complete export, for the first
stage the SFT checkpoint of the scale, which only scale tiny can make by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from recipes.config.stages import PLATFORMS, SCALES, Stage, config_path, find_stage
from recipes.errors import LaunchError, Problem

TINY_MODEL, WIDE_MODEL = "models/tiny-sft", "models/tiny-wide-sft"
TINY_DATA = "data/tiny"
OWN_TINY_DATA = ("swe1", "swe2", "rlhf")  # blends of the stages whose rows data/tiny does not have
TINY_IMAGES = "images"  # below the rows of a stage whose tasks need images
WIDE = "wide"  # the other blend of stages 1.1 to 1.3 at scale tiny
WIDE_CONFIG = "wide.yaml"  # beside the configuration that the stage table names
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
    problems = [
        Problem(where=variable, got=value, expected=" or ".join(choices), fix="correct the value")
        for variable, value, choices in asked
        if value not in choices
    ]
    if scale_of(environ) == "tiny" and (blend := environ.get("BLEND")) not in (None, "", "tiny", WIDE):
        fix = "leave it out, or set TRAIN_PATH and VAL_PATH"
        problems.append(Problem(where="BLEND", got=str(blend), expected=f"{WIDE} at scale tiny", fix=fix))
    return problems


def stage_environment(name: str, environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return `environ` with what the stage table knows added to it."""
    if problems := choice_problems(environ):
        raise LaunchError(problems)
    scale, platform = scale_of(environ), platform_of(environ)
    stage, is_wide = find_stage(name), is_wide_blend(environ)
    data = root / (tiny_data(stage, is_wide=is_wide) if scale == "tiny" else f"data/{stage.blend}")
    good = data.with_name(f"{data.name}-good")  # the rows whose images `make sif-check` found good
    if "sif" in stage.requires and (good / "manifest.json").is_file():
        data = good
    filled = {
        "EXP_NAME": experiment(stage, scale, is_wide=is_wide),
        "TRAIN_PATH": str(data / "train-split.jsonl"),
        "VAL_PATH": str(data / "val-split.jsonl"),
    }
    if scale == "tiny" and "sif" in stage.requires:
        filled["SIF_DIR"] = str(data / TINY_IMAGES)
    if not environ.get("CONFIG_PATH"):
        path = config_path(stage, scale, platform)
        filled["CONFIG_PATH"] = str(path.with_name(WIDE_CONFIG) if is_wide and stage.blend.startswith("rlvr") else path)
    if model := start_weights(stage, scale, root / (environ.get("RESULTS_DIR") or "results"), is_wide=is_wide):
        filled["MODEL_PATH"] = str(root / model)
    given = {variable: value for variable, value in environ.items() if value}
    if stage.container == "swe" and "SWE_CONTAINER" in given:
        given["CONTAINER"] = given["SWE_CONTAINER"]
    return filled | given | {"STAGE": stage.id}


def is_wide_blend(environ: Mapping[str, str]) -> bool:
    """Whether the wide blend of scale tiny is asked for."""
    return scale_of(environ) == "tiny" and environ.get("BLEND") == WIDE


def tiny_data(stage: Stage, *, is_wide: bool) -> str:
    """Return the directory of a stage's rows at scale tiny."""
    if stage.blend in OWN_TINY_DATA:
        return f"{TINY_DATA}-{stage.blend}"
    return f"{TINY_DATA}-{WIDE}" if is_wide else TINY_DATA


def experiment(stage: Stage, scale: str, *, is_wide: bool = False) -> str:
    """Return the default name of a stage's run."""
    name = stage.experiment if scale == "prod" else f"{stage.experiment}-{scale}"
    return f"{name}-{WIDE}" if is_wide else name


def start_weights(stage: Stage, scale: str, results: Path, *, is_wide: bool = False) -> Path | None:
    """Return where the stage's start weights are by default; None when only the user knows."""
    if stage.after is not None:
        parent = experiment(find_stage(stage.after), scale, is_wide=is_wide)
        return results / parent / "checkpoints" / "latest" / "hf"
    return Path(WIDE_MODEL if is_wide else TINY_MODEL) if scale == "tiny" else None
