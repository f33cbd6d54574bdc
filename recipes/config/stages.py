"""The stage table configs/stages.yaml as values: which stages there are, in which order, which file each one runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonschema import Draft202012Validator

from recipes.config.keys.schema import CONFIG_DIR, show
from recipes.config.merge import display_name
from recipes.config.yaml_files import read_yaml
from recipes.errors import ConfigError, Problem, nearest

STAGES = CONFIG_DIR / "stages.yaml"
SCALES = ("prod", "small", "tiny")
PLATFORMS = ("h100", "b200")
CPU = "cpu"  # the platform of scale tiny

_NAME = {"type": "string", "minLength": 1}
_ROW_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "name", "experiment", "configs", "blend", "after", "container", "requires"],
    "properties": {
        "id": {"type": "string", "pattern": r"^stage[0-9]+(\.[0-9]+)?$"},
        "name": _NAME,
        "experiment": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"},
        "configs": {
            "type": "object",
            "propertyNames": {"enum": list(SCALES)},
            "additionalProperties": {
                "type": "object",
                "propertyNames": {"enum": [*PLATFORMS, CPU]},
                "additionalProperties": _NAME,
            },
        },
        "blend": _NAME,
        "after": {"type": ["string", "null"]},
        "container": {"enum": ["training", "swe"]},
        "requires": {"type": "array", "items": {"enum": ["sandbox", "judges", "sif"]}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One row of the stage table."""

    id: str
    name: str
    experiment: str
    configs: Mapping[str, Mapping[str, str]]  # scale -> platform -> file under configs/
    blend: str
    after: str | None  # id of the parent stage; None = the SFT checkpoint
    container: str
    requires: tuple[str, ...]


def load_stages(path: Path = STAGES) -> list[Stage]:
    """Return the stages in order; raises `ConfigError` with everything that is wrong with the table."""
    document = read_yaml(path, name=display_name(path))
    problems = list(document.problems)
    rows = document.data.get("stages")
    if not isinstance(rows, list) or not rows:
        what = Problem(where=f"{document.name}: stages", got=show(rows), expected="a list of stages", fix="add rows")
        raise ConfigError([*problems, what])
    for index, row in enumerate(rows):
        where = f"{document.name}: stages[{index}]"
        problems.extend(
            Problem(
                where=".".join([where, *(str(part) for part in error.absolute_path)]),
                wrong=error.message,
                fix="write it as the head of the file says",
            )
            for error in Draft202012Validator(_ROW_SCHEMA).iter_errors(row)
        )
    if problems:
        raise ConfigError(problems)
    stages = [Stage(**{**row, "requires": tuple(row["requires"])}) for row in rows]
    problems.extend(_table_problems(stages, document.name))
    if problems:
        raise ConfigError(problems)
    return stages


def find_stage(name: str, stages: Sequence[Stage] | None = None, *, where: str = "STAGE") -> Stage:
    """Return the stage with this id (`stage1.1`) or name (`rlvr1`); `where` is what the user has set to it."""
    stages = load_stages() if stages is None else stages
    for stage in stages:
        if name in (stage.id, stage.name):
            return stage
    known = [word for stage in stages for word in (stage.id, stage.name)]
    close = nearest(name, known)
    fix = f"did you mean {close}?" if close else "choose from what `make stages` prints"
    expected = f"one of {', '.join(f'{stage.id} ({stage.name})' for stage in stages)}"
    raise ConfigError(Problem(where=where, got=name, expected=expected, fix=fix))


def config_path(stage: Stage, scale: str, platform: str) -> Path:
    """Return the configuration file of a stage; scale tiny runs on a CPU whatever the platform."""
    platform = CPU if scale == "tiny" else platform
    name = stage.configs.get(scale, {}).get(platform)
    where = f"{display_name(STAGES)}: {stage.id}.configs.{scale}.{platform}"
    if name is None:
        there = [f"{s} on {p}" for s, platforms in stage.configs.items() for p in platforms]
        fix = f"choose from: {', '.join(there)}" if there else "choose another stage: this one has no file yet"
        wrong = "the stage has no file for this scale and platform"
        raise ConfigError(Problem(where=where, wrong=wrong, fix=fix))
    path = CONFIG_DIR / name
    if not path.is_file():
        wrong, fix = f"{display_name(path)} does not exist", "add it or correct the stage table"
        raise ConfigError(Problem(where=where, wrong=wrong, fix=fix))
    return path


def _table_problems(stages: Sequence[Stage], name: str) -> list[Problem]:
    """Return a problem for equal ids, names or experiments, and for a parent that does not come earlier."""
    problems = []
    for field in ("id", "name", "experiment"):
        values = [getattr(stage, field) for stage in stages]
        for value in sorted({value for value in values if values.count(value) > 1}):
            problems.append(Problem(where=f"{name}: {field}", wrong=f"{value} stands here twice", fix="rename one"))
    earlier: list[str] = []
    for stage in stages:
        if stage.after is not None and stage.after not in earlier:
            expected = f"null or one of {', '.join(earlier)}" if earlier else "null"
            fix = "name a stage above it, whose weights it starts from"
            problems.append(Problem(where=f"{name}: {stage.id}.after", got=stage.after, expected=expected, fix=fix))
        earlier.append(stage.id)
    return problems
