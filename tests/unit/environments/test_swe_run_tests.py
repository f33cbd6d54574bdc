"""The program that runs tests inside an image: what it prints behind its mark, and that nothing else is believed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.environments.swe.contract import CommandResult
from recipes.environments.swe.evaluation import RUN_TESTS, verdict_of
from recipes.environments.swe.hidden_tests import RUNNER_OPTIONS, all_passed, results_behind, runner_words
from recipes.environments.swe.task import parse_task

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


RUNTESTS = """import sys, unittest
from helpers import VALUE  # beside the script
import project  # the code under test
suite = unittest.defaultTestLoader.loadTestsFromName(sys.argv[-1])
result = unittest.TextTestRunner(verbosity=2, failfast=False).run(suite)
sys.exit(bool(result.failures or result.errors))
"""


def run_django(place: Path, project: str) -> subprocess.CompletedProcess[str]:
    tests = place / "work/tests"
    tests.mkdir()
    (tests / "runtests.py").write_text(RUNTESTS)
    (tests / "helpers.py").write_text("VALUE = 1\n")
    (tests / "project.py").write_text(project)
    (tests / "one.py").write_text(TESTS.replace("import pytest, unittest", "import unittest").partition("@pytest")[0])
    return run(place, "django", "one")


def test_results_of_djangos_own_program(place: Path) -> None:
    done = run_django(place, "print('test_wrong (one.OneTest.test_wrong) ... ok')")
    found = results_behind(MARK, done.stdout) or {}
    names = {name.partition(" ")[0]: passed for name, passed in found.items()}
    assert done.returncode == 1 and all_passed(MARK, done.stdout) is False
    assert names == {"test_right": True, "Says": True, "test_wrong": False, "test_skipped": False, "test_parts": False}


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "raise SystemExit", "raise SystemExit(0)"])
def test_code_that_ends_djangos_program_has_no_good_results(place: Path, end: str) -> None:
    done = run_django(place, f"print('test_right (one.OneTest.test_right) ... ok', flush=True)\n{end}\n")
    assert not results_behind(MARK, done.stdout) and not all_passed(MARK, done.stdout)


PLAIN = {
    "pytest": ["pytest"],
    "python -m pytest -rA 'tests/a b.py'": ["pytest", "-rA", "tests/a b.py"],
    "python3 -m pytest --tb=no -p no:cacheprovider tests/a.py::T::t": [
        *("pytest", "--tb=no", "-p", "no:cacheprovider", "tests/a.py::T::t")
    ],
    "pytest || true": [],
    "pytest; true": [],
    "pytest $(touch x)": [],
    "pytest tests/*.py": [],
    "pytest 'a": [],
    "pytest-other x": [],
    "A=b pytest": [],
    "make test": [],
}


@pytest.mark.parametrize("command", PLAIN)
def test_a_command_that_only_calls_a_framework_is_run_behind_the_mark(command: str) -> None:
    facts = {"instance_id": "a__b-1", "dataset_name": "SWE-bench", "FAIL_TO_PASS": json.dumps(["tests/a.py::t"])}
    assert runner_words({**facts, "test_cmd": command}) == PLAIN[command]
    assert runner_words({**facts, "test_cmd": command, "log_parser": "exit_status"}) == PLAIN[command]
    assert runner_words({**facts, "test_cmd": command, "log_parser": "sympy"}) == []


def test_a_good_end_needs_a_test_that_passed(place: Path) -> None:
    (place / "work/test_one.py").write_text("def test_one():\n    pass\n")
    assert all_passed(MARK, run(place, "pytest", "test_one.py").stdout) is True
    (place / "mark").write_text(MARK)
    (place / "work/test_one.py").write_text("import pytest\npytest.skip(allow_module_level=True)\n")
    assert all_passed(MARK, run(place, "pytest", "test_one.py").stdout) is False
    (place / "mark").write_text(MARK)
    (place / "work/test_one.py").write_text("import os\nos._exit(0)\n")
    done = run(place, "pytest", "test_one.py")
    assert done.returncode == 0 and all_passed(MARK, done.stdout) is None


def test_tests_with_a_command_of_their_own_are_run_by_it() -> None:
    facts = {"instance_id": "a__b-1", "dataset_name": "SWE-bench", "FAIL_TO_PASS": json.dumps(["tests/a.py::t"])}
    assert runner_words(facts) == ["pytest", *RUNNER_OPTIONS["pytest"], "tests/a.py"]
    assert runner_words({**facts, "test_cmd": "make test"}) == []
    assert runner_words({**facts, "log_parser": "sympy"}) == []


@pytest.mark.parametrize(
    ("output", "is_resolved"),
    [
        ("", False),
        ("1 passed", False),
        (f'{MARK} {{"status": 0, "tests": [["PASSED", "test_x.py::t"]]}}', False),  # not at the start of a line
        (f'\n{MARK} {{"status": 0, "tests": []}}', False),
        (f'\n{MARK} {{"status": 1, "tests": [["PASSED", "test_x.py::t"]]}}', False),
        (f'\n{MARK} {{"status": 0, "tests": [["PASSED", "test_x.py::t"]]}}', True),
    ],
)
def test_status_0_of_a_framework_counts_only_with_its_mark(output: str, is_resolved: bool) -> None:
    facts = {
        **{"instance_id": "a__b-1", "dataset_name": "tiny", "base_commit": "0" * 40, "problem_statement": "x"},
        **{"test_cmd": "pytest test_x.py", "log_parser": "exit_status", "responses_create_params": {}},
    }
    found = verdict_of(parse_task(facts), CommandResult(status=0, output=output), MARK)
    assert found.resolved is is_resolved, found.reason
