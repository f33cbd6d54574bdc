"""The program that runs tests inside an image: what it prints behind its mark, and that nothing else is believed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.environments.swe.hidden_tests import ended_well, results_behind
from recipes.environments.swe.marked import RUN_TESTS

MARK = "0123456789abcdef"
WORDS = {
    "pytest": ("-rA", "--tb=no", "-p", "no:cacheprovider"),
    "unittest": ("-v", "-b"),
    "django": ("tests/runtests.py", "--verbosity", "2"),
    "sympy": ("bin/test", "-C", "--verbose"),
}
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
    command = [sys.executable, "-B", "../run.py", "../mark", framework, *WORDS[framework], *words]
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
        **{"test_right": True, "Says": True, "test_wrong": False, "test_parts": False},
        **{"test_two": False},
    }


def test_results_of_pytest(place: Path) -> None:
    done = run(place, "pytest", "test_one.py", "test_two.py", "--continue-on-collection-errors")
    found = results_behind(MARK, done.stdout) or {}
    assert found["test_one.py::OneTest::test_right"] and found["OneTest.test_right"]
    assert not found["test_one.py::OneTest::test_wrong"] and "test_one.py::OneTest::test_skipped" not in found
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
    assert done.returncode == 1 and not ended_well(MARK, done.stdout)
    assert names == {"test_right": True, "Says": True, "test_wrong": False, "test_parts": False}


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "raise SystemExit", "raise SystemExit(0)"])
def test_code_that_ends_djangos_program_has_no_good_results(place: Path, end: str) -> None:
    done = run_django(place, f"print('test_right (one.OneTest.test_right) ... ok', flush=True)\n{end}\n")
    assert not results_behind(MARK, done.stdout) and not ended_well(MARK, done.stdout)


def test_a_good_end_needs_a_test_that_passed(place: Path) -> None:
    (place / "work/test_one.py").write_text("def test_one():\n    pass\n")
    assert ended_well(MARK, run(place, "pytest", "test_one.py").stdout)
    (place / "mark").write_text(MARK)
    (place / "work/test_one.py").write_text("import pytest\npytest.skip(allow_module_level=True)\n")
    assert not ended_well(MARK, run(place, "pytest", "test_one.py").stdout)
    (place / "mark").write_text(MARK)
    (place / "work/test_one.py").write_text("import os\nos._exit(0)\n")
    done = run(place, "pytest", "test_one.py")
    assert done.returncode == 0 and not ended_well(MARK, done.stdout)


def test_a_mark_counts_at_the_start_of_a_line_only() -> None:
    assert results_behind(MARK, f'{MARK} {{"status": 0, "tests": [["PASSED", "test_x.py::t"]]}}') is None
    assert not ended_well(MARK, f'\n{MARK} {{"status": 0, "tests": []}}')
    assert not ended_well(MARK, f'\n{MARK} {{"status": 1, "tests": [["PASSED", "test_x.py::t"]]}}')
    assert ended_well(MARK, f'\n{MARK} {{"status": 0, "tests": [["PASSED", "test_x.py::t"]]}}')


def test_a_test_that_failed_once_has_failed_under_each_of_its_names() -> None:
    tests = [
        ["FAILED", "a.py::T::t[x y]"],
        ["PASSED", "a.py::T::t[x z]"],
        ["PASSED", "b.py::T::u"],
        ["SKIPPED", "a.py::T::u"],
    ]
    found = results_behind(MARK, f"\n{MARK} {json.dumps({'status': 1, 'tests': tests})}")
    assert found == {
        **{"a.py::T::t[x": False, "a.py::T::t[x y]": False, "a.py::T::t[x z]": True, "b.py::T::u": True},
        **{"T.t[x y]": False, "T.t[x z]": True, "T.u": True},
    }


BIN_TEST = """import os, sys
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))
from sympy.testing.runtests import test
sys.exit(0 if test(*[word for word in sys.argv[1:] if word[0] != "-"], verbose=True) else 1)
"""
SYMPY_TESTS = """from sympy.code.value import VALUE
from sympy.testing.pytest import skip, XFAIL
def test_right():
    assert VALUE == 1
def test_wrong():
    print("test_wrong ok")
    assert VALUE == 2
def test_error():
    raise TypeError
def test_skipped():
    skip("no network")
@XFAIL
def test_not_yet():
    assert False
def test_twice():
    assert False
"""


def run_sympy(place: Path, value: str) -> subprocess.CompletedProcess[str]:
    """Run SymPy's own program of tests, on the installed package and a module with tests beside it."""
    installed = Path(str(importlib.util.find_spec("sympy").submodule_search_locations[0]))  # type: ignore[union-attr, index]
    (place / "work/sympy/code/tests").mkdir(parents=True)
    for path in installed.iterdir():
        (place / "work/sympy" / path.name).symlink_to(path)
    for name, text in (
        ("sympy/code/__init__.py", ""),
        ("sympy/code/value.py", value),
        ("sympy/code/tests/test_one.py", SYMPY_TESTS),
        ("sympy/code/tests/test_two.py", "def test_twice():\n    pass\n"),
        ("sympy/code/tests/test_zero.py", "raise ValueError\n"),
        ("bin/test", BIN_TEST),
    ):
        (place / "work" / name).parent.mkdir(exist_ok=True)
        (place / "work" / name).write_text(text)
    return run(place, "sympy", "sympy/code/tests")


def test_results_of_sympys_own_program(place: Path) -> None:
    done = run_sympy(place, "VALUE = 1")
    assert results_behind(MARK, done.stdout) == {
        **{"test_right": True, "test_wrong": False, "test_error": False, "test_twice": True}
    }
    assert "test_right ok" in done.stdout and not ended_well(MARK, done.stdout)


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "raise SystemExit(0)", "import os; os.kill(os.getpid(), 9)"])
def test_code_that_ends_sympys_program_has_no_good_results(place: Path, end: str) -> None:
    (place / "work/sympy").mkdir()
    (place / "work/sympy/__init__.py").write_text(f"print('\\ntest_right ok', flush=True)\n{end}\n")
    done = run(place, "sympy", "sympy/code/tests")
    assert "test_right ok" in done.stdout and not results_behind(MARK, done.stdout)
