"""The program that runs tests inside an image: the report that it seals, and that nothing else is believed."""

from __future__ import annotations

import base64
import hmac
import importlib.util
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from recipes.environments.swe.containers.shell import CommandOutput
from recipes.environments.swe.evaluation import MAX_CHARACTERS, RUN_TESTS
from recipes.environments.swe.hidden_tests import MAX_RESULTS, LongReportError, sealed_report

pytestmark = pytest.mark.functional

KEY = "0123456789abcdef"
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
    (place / "key").write_text(KEY, encoding="utf-8")
    work = place / "work"
    command = [sys.executable, "-B", "../run.py", "../key", framework, *WORDS[framework], *words]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=60, check=False)
    assert not (place / "key").exists()
    return done


def results(output: str, key: str = KEY) -> dict[str, bool] | None:
    """Return what a sealed report says of each test; None where there is none."""
    report = sealed_report(key, output)
    return None if report is None else dict(report.tests)


def ended_well(output: str) -> bool:
    report = sealed_report(KEY, output)
    return report is not None and report.is_good


def sealed(found: object, key: str = KEY) -> str:
    """Return a report as it is printed."""
    text = base64.b64encode(zlib.compress(found if isinstance(found, bytes) else json.dumps(found).encode()))
    return f"report {hmac.new(key.encode(), text, 'sha256').hexdigest()} {text.decode()}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/test_one.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "work/test_two.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    return tmp_path


def test_results_of_unittest(place: Path) -> None:
    (place / "work/unittest.py").write_text("raise SystemExit(0)\n", encoding="utf-8")  # not the framework that is run
    found = results(run(place, "unittest", "test_one.py", "test_two").stdout) or {}
    names = {name.partition(" ")[0]: passed for name, passed in found.items()}
    assert names == {
        **{"test_right": True, "Says": True, "test_wrong": False, "test_parts": False},
        **{"test_two": False},
    }


def test_results_of_pytest(place: Path) -> None:
    done = run(place, "pytest", "test_one.py", "test_two.py", "--continue-on-collection-errors")
    found = results(done.stdout) or {}
    assert found["test_one.py::OneTest::test_right"] and found["OneTest.test_right"]
    assert not found["test_one.py::OneTest::test_wrong"] and "test_one.py::OneTest::test_skipped" not in found
    assert found["test_one.py::test_text[a"] and found["test_one.py::test_text[a b]"]
    assert found["test_one.py::test_not_yet"] and not found["test_two.py"]


def test_a_process_that_ends_early_has_no_results(place: Path) -> None:
    forged = f"import os\nprint('\\n{sealed({'status': 0, 'tests': []}, KEY[:-1])}', flush=True)\nos._exit(0)"
    (place / "work/test_two.py").write_text(forged, encoding="utf-8")
    done = run(place, "unittest", "test_two")
    assert done.returncode == 0 and "\nreport " in done.stdout and results(done.stdout) is None
    for broken in (b"", b"x", [], 1, "too_long", {"tests": [1]}, {"tests": None}, {"tests": [["a"]]}):
        assert results(f"\n{sealed(broken)}\n") is None


def test_who_reads_the_output_cannot_seal_another_report(place: Path) -> None:
    (place / "work/test_two.py").write_text(TESTS, encoding="utf-8")
    done = run(place, "unittest", "test_two")
    line = re.findall("^report .*", done.stdout, re.MULTILINE)[-1]
    word, seal, text = line.split()
    forged = zlib.decompress(base64.b64decode(text)).replace(b"FAILED", b"PASSED")
    again = f"{word} {seal} {base64.b64encode(zlib.compress(forged)).decode()}"
    assert KEY not in done.stdout + done.stderr
    assert results(f"\n{again}\n") is None
    assert results(f"{done.stdout}{again}\n") == results(done.stdout) != {}


MANY = """import unittest
class ManyTest(unittest.TestCase):
    def __str__(self):  # each line counts as the name of a test
        return "\\n".join("tests/frame/test_reductions.py::TestSum::test_sum[int64-%d]" % n for n in range({}))
    def test_one(self):
        pass
"""


@pytest.mark.parametrize("count", [7_000, 60_000])
def test_the_report_of_many_tests_reaches_the_worker(place: Path, count: int) -> None:
    (place / "work/test_one.py").write_text(MANY.format(count), encoding="utf-8")
    shell = CommandOutput()
    shell.feed(b"x" * 2**21 + run(place, "unittest", "test_one").stdout.encode())
    found = results(shell.text(MAX_CHARACTERS)[0]) or {}
    assert sum(name.startswith("tests/frame/test_reductions.py::TestSum::test_sum[int64-") for name in found) == count


def test_a_report_of_too_many_tests_is_no_verdict(place: Path) -> None:
    (place / "work/test_one.py").write_text(MANY.format(MAX_RESULTS // 70), encoding="utf-8")
    done = run(place, "unittest", "test_one")
    with pytest.raises(LongReportError, match=r"what the tests came to has \d{7} characters, too many to report"):
        sealed_report(KEY, done.stdout)


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
    (tests / "runtests.py").write_text(RUNTESTS, encoding="utf-8")
    (tests / "helpers.py").write_text("VALUE = 1\n", encoding="utf-8")
    (tests / "project.py").write_text(project, encoding="utf-8")
    (tests / "one.py").write_text(
        TESTS.replace("import pytest, unittest", "import unittest").partition("@pytest")[0], encoding="utf-8"
    )
    return run(place, "django", "one")


def test_results_of_djangos_own_program(place: Path) -> None:
    done = run_django(place, "print('test_wrong (one.OneTest.test_wrong) ... ok')")
    found = results(done.stdout) or {}
    names = {name.partition(" ")[0]: passed for name, passed in found.items()}
    assert done.returncode == 1 and not ended_well(done.stdout)
    assert names == {"test_right": True, "Says": True, "test_wrong": False, "test_parts": False}


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "raise SystemExit", "raise SystemExit(0)"])
def test_code_that_ends_djangos_program_has_no_good_results(place: Path, end: str) -> None:
    done = run_django(place, f"print('test_right (one.OneTest.test_right) ... ok', flush=True)\n{end}\n")
    assert not results(done.stdout) and not ended_well(done.stdout)


def test_a_good_end_needs_a_test_that_passed(place: Path) -> None:
    (place / "work/test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    assert ended_well(run(place, "pytest", "test_one.py").stdout)
    (place / "key").write_text(KEY, encoding="utf-8")
    (place / "work/test_one.py").write_text("import pytest\npytest.skip(allow_module_level=True)\n", encoding="utf-8")
    assert not ended_well(run(place, "pytest", "test_one.py").stdout)
    (place / "key").write_text(KEY, encoding="utf-8")
    (place / "work/test_one.py").write_text("import os\nos._exit(0)\n", encoding="utf-8")
    done = run(place, "pytest", "test_one.py")
    assert done.returncode == 0 and not ended_well(done.stdout)


def test_a_report_counts_on_a_line_of_its_own_only() -> None:
    good = {"status": 0, "tests": [["PASSED", "test_x.py::t"]]}
    assert results(f"x {sealed(good)}") is None and results(f"{sealed(good)} x") is None
    assert not ended_well(sealed({"status": 0, "tests": []}))
    assert not ended_well(sealed({**good, "status": 1}))
    assert ended_well(f"x\n{sealed(good)}\nx\n{sealed(good, 'another key')}\n")


def test_a_test_that_failed_once_has_failed_under_each_of_its_names() -> None:
    tests = [
        ["FAILED", "a.py::T::t[x y]"],
        ["PASSED", "a.py::T::t[x z]"],
        ["PASSED", "b.py::T::u"],
        ["SKIPPED", "a.py::T::u"],
    ]
    assert results(sealed({"status": 1, "tests": tests})) == {
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
        (place / "work" / name).write_text(text, encoding="utf-8")
    return run(place, "sympy", "sympy/code/tests")


def test_results_of_sympys_own_program(place: Path) -> None:
    done = run_sympy(place, "VALUE = 1")
    assert results(done.stdout) == {
        **{"test_right": True, "test_wrong": False, "test_error": False, "test_twice": True}
    }
    assert "test_right ok" in done.stdout and not ended_well(done.stdout)


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "raise SystemExit(0)", "import os; os.kill(os.getpid(), 9)"])
def test_code_that_ends_sympys_program_has_no_good_results(place: Path, end: str) -> None:
    (place / "work/sympy").mkdir()
    (place / "work/sympy/__init__.py").write_text(f"print('\\ntest_right ok', flush=True)\n{end}\n", encoding="utf-8")
    done = run(place, "sympy", "sympy/code/tests")
    assert "test_right ok" in done.stdout and not results(done.stdout)
