"""Directories and disk, and the table of codes against the code that uses it."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path

import pytest

from recipes.cluster.ports import ephemeral_overlap
from recipes.errors import Problem
from tools.doctor import machine
from tools.doctor.machine import code_of
from tools.draft.findings import CODES

LAUNCH = Path(__file__).resolve().parents[4] / "tools"
GIB = 2**30


@pytest.mark.parametrize(
    ("free", "weights", "kept", "code"),
    [
        (2 * GIB, 0, None, None),
        (GIB - 1, 0, None, "PTH004"),
        (16 * GIB - 1, 2 * GIB, 1, "PTH004"),  # one checkpoint is 8 times the weights
        (32 * GIB, 2 * GIB, 1, None),  # the one that is kept and the one that is written
        (32 * GIB - 1, 2 * GIB, 1, "PTH005"),
        (319 * GIB, 2 * GIB, None, "PTH005"),  # all are kept
        (320 * GIB, 2 * GIB, None, None),
    ],
)
def test_room_for_checkpoints(tmp_path, monkeypatch, free, weights, kept, code):
    usage = namedtuple("usage", "free")(free)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _path: usage)
    findings = list(machine.disk_findings(tmp_path / "results" / "run", weights, kept))
    assert [finding.code for finding in findings] == ([code] if code else [])


def test_a_run_that_starts_over_beside_its_log_is_noted(tmp_path):
    root, log = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    assert list(machine.started_over(tmp_path, root)) == []
    log.write_text('{"step": 0}\n', encoding="utf-8")  # the validation before the first step
    assert list(machine.started_over(tmp_path, root)) == []
    log.write_text('{"step": 0}\n{"step": 7}\n{"st', encoding="utf-8")
    (finding,) = machine.started_over(tmp_path, root)
    assert (finding.code, finding.severity) == ("PTH008", "note") and "up to 7" in finding.problem.what
    (root / "step_000005").mkdir(parents=True)
    assert list(machine.started_over(tmp_path, root)) == []  # an incomplete one is PTH007's
    (root / "step_000005" / "COMPLETE").touch()
    assert list(machine.started_over(tmp_path, root)) == []


def test_a_file_in_the_way_of_a_directory_is_named(tmp_path):
    assert list(machine.writable(tmp_path / "not" / "there" / "yet", "RESULTS_DIR")) == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        (finding,) = machine.writable(path, "RESULTS_DIR")
        assert finding.code == "PTH001"
        assert finding.problem.what == f"{tmp_path / 'file'} is a file, not a directory"


def test_problems_of_ports_have_their_codes():
    (overlap,) = ephemeral_overlap("1024 60999")
    assert code_of(overlap) == "PRT002"
    busy = Problem(where="port 1200 (Ray)", got="in use by pid 1", expected="a free port", fix="end it")
    assert code_of(busy) == "PRT001"
    full = Problem(where="local runs", wrong="10 are in progress", fix="wait")
    assert code_of(full) == "PRT003"


def test_every_code_is_used_and_every_used_code_is_in_the_table():
    sources = [path.read_text(encoding="utf-8") for path in LAUNCH.rglob("*.py") if path.name != "findings.py"]
    used = {code for source in sources for code in re.findall(r'"([A-Z]{3}\d{3})"', source)}
    assert used == set(CODES)
