"""Files of Slurm clusters go to one process, every other file to any."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.conftest import pytest_xdist_make_scheduler
from tests.scheduling import ByFile, starts_slurm

FUNCTIONAL = Path(__file__).resolve().parents[1] / "functional"


def test_files_that_start_slurm_have_one_scope() -> None:
    scopes = cast(Any, ByFile)._split_scope
    of_slurm = [file.name for file in FUNCTIONAL.glob("test_*.py") if starts_slurm(file)]
    assert {"test_slurm_job.py", "test_status.py", "test_doctor.py"} <= set(of_slurm)
    assert not {"test_places.py", "test_smoke.py"} & set(of_slurm)
    for name in of_slurm:
        assert scopes(ByFile.__new__(ByFile), f"tests/functional/{name}::test_one[a]") == "slurm"
    assert scopes(ByFile.__new__(ByFile), "tests/functional/test_smoke.py::test_it") == "tests/functional/test_smoke.py"


def test_only_whole_files_are_given_so() -> None:
    config: Any = SimpleNamespace(getoption=lambda _name: "worksteal")
    assert pytest_xdist_make_scheduler(config, None) is None
