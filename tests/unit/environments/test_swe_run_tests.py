"""The program that runs tests inside an image: what it prints behind its mark, and that nothing else is believed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.environments.swe.evaluation import RUN_TESTS
from recipes.environments.swe.hidden_tests import RUNNER_OPTIONS, results_behind, runner_words

MARK = "0123456789abcdef"
TESTS = """import pytest, unittest

class OneTest(unittest.TestCase):
    def test_right(self):
        "Says what it does."
    def test_wrong(self):
        self.assertEqual(1, 2)
    def test_skipped(self):
        self.skipTest("no network")
    def test_parts(self):
        with self.subTest(1):
            self.fail()

@pytest.mark.parametrize("text", ["a b"])
def test_text(text):
    print("PASSED test_one.py::OneTest::test_wrong")

@pytest.mark.xfail
def test_not_yet():
    assert False
"""


def run(place: Path, framework: str, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "run.py").write_bytes(RUN_TESTS)
    (place / "mark").write_text(MARK)
    work = place / "work"
    command = [sys.executable, "-B", "../run.py", "../mark", framework, *RUNNER_OPTIONS[framework], *words]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=60, check=False)
    assert not (place / "mark").exists()
    return done


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/test_one.py").write_text(TESTS)
    (tmp_path / "work/test_two.py").write_text("import nothing_of_that_name\n")
    return tmp_path


def test_results_of_unittest(place: Path) -> None:
    (place / "work/unittest.py").write_text("raise SystemExit(0)\n")  # not the framework that is run
    found = results_behind(MARK, run(place, "unittest", "test_one.py", "test_two").stdout) or {}
    names = {name.partition(" ")[0]: passed for name, passed in found.items()}
    assert names == {
        **{"test_right": True, "Says": True, "test_wrong": False, "test_skipped": False, "test_parts": False},
        **{"test_two": False},
    }


def test_results_of_pytest(place: Path) -> None:
    done = run(place, "pytest", "test_one.py", "test_two.py", "--continue-on-collection-errors")
    found = results_behind(MARK, done.stdout) or {}
    assert found["test_one.py::OneTest::test_right"] and found["OneTest.test_right"]
    assert not found["test_one.py::OneTest::test_wrong"] and not found["test_one.py::OneTest::test_skipped"]
    assert found["test_one.py::test_text[a"] and found["test_one.py::test_text[a b]"]
    assert found["test_one.py::test_not_yet"] and not found["test_two.py"]


def test_a_process_that_ends_early_has_no_results(place: Path) -> None:
    forged = (
        f"import os, json\nprint('\\n{MARK[:-1]}0', json.dumps({{'status': 0, 'tests': []}}), flush=True)\nos._exit(0)"
    )
    (place / "work/test_two.py").write_text(forged)
    done = run(place, "unittest", "test_two")
    assert done.returncode == 0 and results_behind(MARK, done.stdout) is None
    for broken in ("", "x", "[]", '{"tests": [1]}', '{"tests": null}', '{"tests": [["a"]]}'):
        assert results_behind(MARK, f"\n{MARK} {broken}\n") is None


def test_tests_with_a_command_of_their_own_are_run_by_it() -> None:
    facts = {"instance_id": "a__b-1", "dataset_name": "SWE-bench", "FAIL_TO_PASS": json.dumps(["tests/a.py::t"])}
    assert runner_words(facts) == ["pytest", *RUNNER_OPTIONS["pytest"], "tests/a.py"]
    assert runner_words({**facts, "test_cmd": "make test"}) == []
    assert runner_words({**facts, "log_parser": "sympy"}) == []
