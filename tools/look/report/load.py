"""Reads a run directory in any state: a run in progress, one killed in the middle of a line, one with a single step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.errors import InputError, Problem
from recipes.files import read_object, setting_of
from recipes.heartbeat import STATUS_FILE
from tools.look.report.ledger import Unjudged, unjudged

METRICS_FILE = "metrics.jsonl"
PASS_RATES_FILE = "pass_rates.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl."""

    step: int  # steps done; 0 is before training
    time: float  # unix seconds
    values: Mapping[str, float]
    non_finite: Mapping[str, str] = field(default_factory=dict)  # metric -> "nan" | "inf" | "-inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One metric over the steps that have it."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    along: str = "step"  # what `steps` counts

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """All data of one run that the page shows."""

    name: str
    records: tuple[StepRecord, ...]  # one per step, ascending
    rollouts: Mapping[str, Sequence[Mapping[str, Any]]]  # "train" | "val" -> sampled rollouts
    resolved: Mapping[str, Any]  # resolved.json; empty when the file is missing
    lock: Mapping[str, Any]  # run.lock.json; empty when the file is missing
    warnings: tuple[str, ...]
    num_steps: int | None = None  # at which the run ends: fewer than asked for when its rows suffice for no more
    pass_rates: Sequence[Mapping[str, Any]] = ()  # one per trained group: how often its row was solved
    unjudged: tuple[Unjudged, ...] = ()  # prompts without a verdict, up to the newest checkpoint

    def column(self, key: str) -> Column:
        """Return one metric over all steps; empty when no step has it."""
        found = [(record.step, record.values[key]) for record in self.records if key in record.values]
        return Column(steps=tuple(step for step, _ in found), values=tuple(value for _, value in found))

    def agents(self, prefix: str, suffix: str) -> list[str]:
        """Return the sorted names N for which a metric `prefix + N + suffix` exists."""
        keys = {key for record in self.records for key in record.values}
        names = {key[len(prefix) : -len(suffix)] for key in keys if key.startswith(prefix) and key.endswith(suffix)}
        return sorted(name for name in names if name)

    def setting(self, key: str) -> Any:
        """Return one value of the resolved configuration by its dotted key, or None."""
        tree = self.resolved.get("config", self.resolved)
        return setting_of(tree, key)


def load_run(run_dir: Path) -> RunData:
    """Read everything under `run_dir`; raises `InputError` when there is no run or no finished step."""
    if not run_dir.is_dir():
        raise _no_run(run_dir, "there is no such directory")
    metrics_path = run_dir / METRICS_FILE
    if not metrics_path.exists():
        raise _no_run(run_dir, "it holds no metrics.jsonl")
    warnings: list[str] = []
    records = _merge_steps(read_lines(metrics_path, warnings))
    status = read_object(run_dir / STATUS_FILE)
    num_steps, missing = status.get("num_steps"), status.get("missing")
    if isinstance(missing, dict):
        warnings += [f"it ran without {name}: {reason}" for name, reason in missing.items()]
    if not records:
        raise _no_run(metrics_path, "it has no complete line")
    return RunData(
        name=run_dir.resolve().name,
        records=records,
        rollouts={
            kind: read_lines(run_dir / "rollouts" / f"{kind}.jsonl", warnings, missing_is_fine=True)
            for kind in ("train", "val")
        },
        pass_rates=read_lines(run_dir / PASS_RATES_FILE, warnings, missing_is_fine=True),
        resolved=_read_object(run_dir / "resolved.json", warnings),
        lock=_read_object(run_dir / "run.lock.json", warnings),
        warnings=tuple(warnings),
        num_steps=num_steps if isinstance(num_steps, int) else None,
        unjudged=unjudged(run_dir),
    )


def load_steps(metrics_path: Path) -> tuple[StepRecord, ...]:
    """Return the steps logged so far; empty without a file. Lines that cannot be read are left out."""
    return _merge_steps(read_lines(metrics_path, [], missing_is_fine=True))


def _no_run(where: Path, wrong: str) -> InputError:
    fix = "give results/<EXP_NAME> of a run that has done a step; logs/ in it shows what a run does before that"
    return InputError(Problem(where=str(where), wrong=wrong, fix=fix))


def read_lines(path: Path, warnings: list[str], *, missing_is_fine: bool = False) -> list[dict[str, Any]]:
    """Return the JSON objects of a file; an incomplete last line is skipped, a damaged line adds a warning."""
    if missing_is_fine and not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    objects = []
    for number, line in enumerate(lines[:-1], start=1):  # the text after the last newline is an incomplete line
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            warnings.append(f"{path.name}:{number}: skipped a line that is not a JSON object with a step")
            continue
        objects.append(record)
    return objects


def _merge_steps(lines: Sequence[Mapping[str, Any]]) -> tuple[StepRecord, ...]:
    """Return one record per step; a key written twice keeps its last value."""
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        merged.setdefault(line["step"], {}).update(line)
    return tuple(
        StepRecord(
            step=step,
            time=float(line["time"]) if isinstance(line.get("time"), int | float) else 0.0,
            values={
                key: float(value)
                for key, value in line.items()
                if key not in ("step", "time") and isinstance(value, int | float)
            },
            non_finite=line["non_finite"] if isinstance(line.get("non_finite"), dict) else {},
        )
        for step, line in sorted(merged.items())
    )


def _read_object(path: Path, warnings: list[str]) -> dict[str, Any]:
    if not path.exists():
        warnings.append(f"{path.name} is missing: the page cannot say what produced this run")
        return {}
    if not (loaded := read_object(path)):
        warnings.append(f"{path.name} holds no JSON object: the page cannot say what produced this run")
    return loaded
