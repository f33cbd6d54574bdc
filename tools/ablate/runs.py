"""The runs of an ablation: one per variant and seed, named after both, started and resumed by `super_launch.sh`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from recipes.stop import EXIT_RESUME
from tools.ablate.variants import Variant
from tools.doctor.examine import examine
from tools.launch.links import is_finished
from tools.launch.sequence import run_forwarding
from tools.planning.draft import ROOT, Draft, draft_launch
from tools.planning.findings import Finding, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRun:
    """One variant with one seed."""

    variant: Variant
    seed: int
    variables: Mapping[str, str]  # besides the user's
    overrides: tuple[str, ...]
    draft: Draft

    @property
    def run_dir(self) -> Path:
        return self.draft.run_dir or self.draft.root / "results" / self.variables["EXP_NAME"]

    @property
    def is_finished(self) -> bool:
        return is_finished(self.run_dir, self.draft)


def make_runs(
    stage: str, name: str, variants: Sequence[Variant], seeds: Sequence[int], common: Sequence[str]
) -> list[VariantRun]:
    """Return all runs, every variant with the first seed first: what an early stop leaves can be compared."""
    runs = []
    for seed in seeds:
        for variant in variants:
            variables = {"EXP_NAME": f"{name}-{variant.slug}-seed{seed}", "SEED": str(seed)}
            overrides = (*common, *variant.overrides)
            draft = draft_launch(stage, overrides, {**os.environ, **variables}, ROOT)
            runs.append(VariantRun(variant=variant, seed=seed, variables=variables, overrides=overrides, draft=draft))
    return runs


def refusals(runs: Sequence[VariantRun], *, is_only_input: bool = False) -> list[str]:
    """Return what the doctor has against the variants, each finding once with the variants that have it.

    With `is_only_input` the doctor looks at variables and configuration alone: files need not be there yet.
    """
    where: dict[Finding, list[str]] = {}
    for run in runs:
        if run.seed == runs[0].seed and not run.is_finished:
            for finding in run.draft.findings if is_only_input else examine(run.draft):
                where.setdefault(finding, []).append(run.variant.name)
    return [f"{', '.join(where[finding])}: {finding}" for finding in errors(where)]


def start(run: VariantRun, stage: str) -> int:
    """Run it here, or submit it; returns the status of the launcher."""
    words = [str(ROOT / "super_launch.sh"), stage, *run.overrides]
    return run_forwarding(words, {**os.environ, **run.variables})


def should_go_on(status: int) -> bool:
    """Whether the next run may begin: not after a stop, which is meant for all of them."""
    return status != EXIT_RESUME and status < 128


def require_distinct(seeds: Sequence[int]) -> None:
    """Raise `LaunchError` for a seed that is given twice."""
    if len(set(seeds)) < len(seeds):
        given = " ".join(map(str, seeds))
        raise LaunchError(Problem(where="SEEDS", got=given, expected="different numbers", fix="leave one out"))
