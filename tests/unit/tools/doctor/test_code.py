"""The doctor on the code: a configuration that the job's copy lacks, or has otherwise, is found before submission."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.tools.launch_case import LaunchCase, write_case
from tools.doctor.machine import older_findings, untracked_findings


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "configs").mkdir(parents=True)
    (root / "configs" / "base.yaml").write_text("a: 1\n", encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


def test_configuration_that_git_does_not_track_is_named_with_the_command(checkout, tmp_path):
    mine, elsewhere = checkout / "configs" / "mine.yaml", tmp_path / "elsewhere.yaml"
    for file in (mine, elsewhere):
        file.write_text("a: 2\n", encoding="utf-8")
    (finding,) = untracked_findings(checkout, [checkout / "configs" / "base.yaml", mine, elsewhere])
    assert finding.code == "COD002"
    assert finding.problem.where == str(mine)
    assert finding.problem.fix == "git add configs/mine.yaml"


def test_older_snapshot_must_hold_the_same_configuration(checkout, tmp_path):
    snapshot, base = tmp_path / "snapshot", checkout / "configs" / "base.yaml"
    assert [finding.problem.what for finding in older_findings(checkout, snapshot, [base])] == [
        f"no such file, though there is {base}"
    ]
    (snapshot / "configs").mkdir(parents=True)
    (snapshot / "configs" / "base.yaml").write_text("a: 1\n", encoding="utf-8")
    assert list(older_findings(checkout, snapshot, [base, tmp_path / "elsewhere.yaml"])) == []
    base.write_text("a: 3\n", encoding="utf-8")
    (finding,) = older_findings(checkout, snapshot, [base])
    assert (finding.code, finding.problem.what) == ("COD003", f"differs from {base}")


def test_launch_from_the_checkout_looks_at_no_snapshot(tmp_path):
    case: LaunchCase = write_case(tmp_path)
    assert not [finding for finding in case.examine("") if finding.code.startswith("COD")]
