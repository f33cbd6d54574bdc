"""The stages of a pipeline: the name and the start weights of each, and whether it has reached its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config.stages import Stage, find_stage
from recipes.grpo.checkpoint import complete_checkpoints
from tools.planning.draft import ROOT, Draft, draft_launch
from tools.planning.stage_env import experiment, is_wide_blend, scale_of

CHECKPOINTS = "checkpoints"  # checkpointing.checkpoint_dir where the configuration cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One stage of the pipeline."""

    stage: Stage
    variables: Mapping[str, str]  # of this stage, besides the user's: EXP_NAME, MODEL_PATH
    draft: Draft  # what is submitted
    checked: Draft  # what the doctor examines: the same, with start weights that exist already
    run_dir: Path
    parent: Link | None  # in this pipeline; None = the start weights exist already
    is_finished: bool

    @property
    def is_pending(self) -> bool:
        """Whether the start weights are still to be written, by a stage of this pipeline."""
        return self.parent is not None and not self.parent.is_finished

    @property
    def has_trained(self) -> bool:
        return bool(complete_checkpoints(checkpoint_dir(self.run_dir, self.draft)))

    @property
    def export(self) -> Path:
        """Where the last complete export is, once there is one."""
        return checkpoint_dir(self.run_dir, self.draft) / "latest" / "hf"


def make_links(
    stages: Sequence[Stage], overrides: Sequence[str], environ: Mapping[str, str], root: Path = ROOT
) -> list[Link]:
    """Draft every stage. EXP_NAME goes before the name of each run, MODEL_PATH belongs to the first stage.

    Each stage starts from the nearest of its parents that the pipeline runs: stages between them are left out.
    """
    results = (root / (environ.get("RESULTS_DIR") or "results")).resolve()
    links: dict[str, Link] = {}
    for stage in stages:
        parent = next((links[name] for name in parents_of(stage) if name in links), None)
        variables = stage_variables(stage, parent, environ if not links else without_model(environ), results)
        draft = checked = draft_launch(stage.id, overrides, {**environ, **variables}, root)
        if parent is not None and not parent.is_finished:
            # The export is still to come. Its tokenizer and its shape are those of the weights that the first
            # unfinished stage starts from.
            there = {**environ, **variables, "MODEL_PATH": parent.checked.contract["MODEL_PATH"]}
            checked = draft_launch(stage.id, overrides, there, root)
        run_dir = draft.run_dir or results / variables["EXP_NAME"]
        links[stage.id] = Link(
            stage=stage,
            variables=variables,
            draft=draft,
            checked=checked,
            run_dir=run_dir,
            parent=parent,
            is_finished=(parent is None or parent.is_finished) and is_finished(run_dir, draft),
        )
    return list(links.values())


def parents_of(stage: Stage) -> Iterator[str]:
    """Yield the ids of a stage's parent, of that one's parent, and so on."""
    while stage.after:
        yield stage.after
        stage = find_stage(stage.after)


def stage_variables(stage: Stage, parent: Link | None, environ: Mapping[str, str], results: Path) -> dict[str, str]:
    """Return the name and the start weights of one stage's run; empty weights are left to the stage table."""
    prefix, scale, is_wide = environ.get("EXP_NAME", ""), scale_of(environ), is_wide_blend(environ)

    def run_name(of: Stage) -> str:
        name = experiment(of, scale, is_wide=is_wide)
        return f"{prefix}-{name}" if prefix else name

    model = environ.get("MODEL_PATH", "")
    if parent is not None:
        model = str(parent.export)
    elif prefix and stage.after and not model:
        model = str(results / run_name(find_stage(stage.after)) / CHECKPOINTS / "latest" / "hf")
    return {"EXP_NAME": run_name(stage), "MODEL_PATH": model}


def without_model(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without MODEL_PATH, which is for the first stage alone."""
    return {name: value for name, value in environ.items() if name != "MODEL_PATH"}


def is_finished(run_dir: Path, draft: Draft) -> bool:
    """Whether a run has reached its end: its driver said so, and it had as many steps to do as are asked for now."""
    if draft.config is None or not complete_checkpoints(checkpoint_dir(run_dir, draft)):
        return False
    trained = _read(run_dir / "resolved.json").get("config", {}).get("grpo", {}).get("max_num_steps")
    return _read(run_dir / "status.json").get("state") == "done" and trained == draft.config.grpo.max_num_steps


def checkpoint_dir(run_dir: Path, draft: Draft) -> Path:
    """Return the directory of a run's checkpoints."""
    return run_dir / (draft.config.checkpointing.checkpoint_dir if draft.config else CHECKPOINTS)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
