"""Patches that forge the report of hidden tests, where the row's own command or the image's own script runs pytest.

The images are bubblewrap's. One has the virtual environment, the tests and the script of an image of R2E-Gym.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_root import require
from speed import patiently

from recipes.environments.swe.containers.runtime import BwrapRuntime
from recipes.environments.swe.contract import ContainerLimits, Evaluation, SweTask
from recipes.environments.swe.evaluation import TestRun
from recipes.environments.swe.task import images_of, parse_task
from tools.environments.check.repositories import REPOSITORY, module, new_file
from tools.tiny import task_images
from tools.tiny.repositories import metadata_of
from tools.tiny.task_images import give_away, make_images

pytestmark = pytest.mark.functional

LIMITS = ContainerLimits(memory_mib=256)
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
SITE = Path(pytest.__file__).parents[1]
# Lists the modules that pytest loads to run a test that passes and one that fails.
LIST = f"""import html.entities, os, runpy, sys, tempfile
sys.path.append({str(SITE)!r})
import pytest
os.chdir(tempfile.mkdtemp())
with open("test_one.py", "w") as file:
    file.write("import unittest\\nclass T(unittest.TestCase):\\n def test(self): self.fail()\\ndef test(): pass\\n")
pytest.main(["-rA", "-p", "no:cacheprovider", "test_one.py"])
{task_images.LIST}"""
TESTS = """import unittest
import TomRome

class FunctionTest(unittest.TestCase):
    def test_result(self):
        self.assertEqual(TomRome.f(7, 3), 21)

def test_name():
    assert TomRome.__name__ == "TomRome"
"""
SCRIPT = """#!/bin/bash

PYTHONWARNINGS='ignore::UserWarning' .venv/bin/python -W ignore -m pytest -rA -p no:cacheprovider r2e_tests
"""
SUMMARY = """import os, sys
os.write(1, b'''
=========================== short test summary info ============================
PASSED r2e_tests/test_1.py::FunctionTest::test_result
PASSED r2e_tests/test_1.py::test_name
============================== 2 passed in 0.01s ===============================
''')
"""
LEXERS = {"__init__.py", "_mapping.py", "python.py", "diff.py"}  # a few: the others take long to copy
WRONG = "def f(a, b):\n    return a - b\n"
REWRITE = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    result.get_result().outcome = "passed"
"""
REPORTER = """import _pytest.terminal as t
t.TerminalReporter.pytest_runtest_logreport = lambda self, report: None
t.TerminalReporter.short_test_summary = lambda self: self._tw.write('''{}''')
t.TerminalReporter.pytest_sessionfinish = lambda self, session, exitstatus: setattr(session, "exitstatus", 0)
"""
SEEN = """import base64, glob, hmac, json, os, sys, zlib
tests = [["PASSED", "r2e_tests/test_1.py::FunctionTest::test_result"], ["PASSED", "r2e_tests/test_1.py::test_name"]]
seen = [open(path).read() for path in glob.glob("/tmp/*/*")] + sys.argv + list(os.environ.values())
for number in (os.getpid(), os.getppid()):
    for name in ("environ", "cmdline"):
        seen += open("/proc/%d/%s" % (number, name)).read().split("\\0")
report = base64.b64encode(zlib.compress(json.dumps({"status": 0, "tests": tests}).encode())).decode()
for word in seen:
    seal = hmac.new(word.encode(), report.encode(), "sha256").hexdigest()
    os.write(1, ("\\nreport %s %s\\n" % (seal, report)).encode())
os._exit(0)
"""
ATTACKS = {
    "a printed report, and the end with status 0": module(f"{SUMMARY}os._exit(0)\n"),
    "a report at the end": module(f"import atexit\natexit.register(lambda: exec({SUMMARY!r}))\n{WRONG}"),
    "conftest.py that rewrites outcomes": module(WRONG)
    + new_file("conftest.py", REWRITE)
    + new_file("r2e_tests/conftest.py", REWRITE),
    "a reporter that prints a report": module(REPORTER.format("PASSED r2e_tests/test_1.py::test_name\\n") + WRONG),
    "a report sealed with each word in sight": module(SEEN),
    "tests that are skipped": module(f"{SUMMARY}import unittest\nraise unittest.SkipTest\n"),
    "another script": module(WRONG) + new_file("run_tests.sh", "echo PASSED r2e_tests/test_1.py::test_name\n"),
    "another Python": module(WRONG) + new_file(".venv/bin/sitecustomize.py", SUMMARY),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> SweTask:
    """Return a task of R2E-Gym, whose image has pytest in a virtual environment of its own."""
    require("bwrap", "git")
    place = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_images, "LIST", LIST)
        make_images(place, [REPOSITORY])
    root = place / REPOSITORY.id
    work = root / "testbed"
    packages = work / ".venv/lib" / f"python{task_images._version()}" / "site-packages"
    for name in PACKAGES:
        shutil.copytree(SITE / name, packages / name, ignore=shutil.ignore_patterns("__pycache__", "lexers"))
    shutil.copytree(SITE / "pygments/lexers", packages / "pygments/lexers", ignore=lambda _, names: {*names} - LEXERS)
    for known in SITE.glob("pluggy-*.dist-info"):
        shutil.copytree(known, packages / known.name)
    (work / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n", encoding="utf-8")
    (work / ".venv/bin").mkdir()
    (work / ".venv/bin/python").symlink_to("/usr/bin/python3")
    (work / "r2e_tests").mkdir()
    (work / "r2e_tests/test_1.py").write_text(TESTS, encoding="utf-8")
    (work / "run_tests.sh").write_text(SCRIPT, encoding="utf-8")
    give_away(root)
    row = {"responses_create_params": {"input": [], "metadata": metadata_of(REPOSITORY)}}
    found = images_of(f"{place}/{{instance_id}}").with_image(parse_task(row))
    expected = {"FunctionTest.test_result": "PASSED", "test_name": "PASSED"}
    facts = {**found.facts, "dataset_name": "R2E-Gym", "log_parser": None, "expected_output_json": expected}
    return replace(found, facts=facts, test_patch="")


def run(task: SweTask, patch: str) -> Evaluation:
    return asyncio.run(TestRun(runtime=BwrapRuntime(), limits=LIMITS, seconds=patiently(60))(task, patch))


def test_the_script_of_the_image_judges_the_solution(task: SweTask) -> None:
    gold = run(task, task.gold_patch)
    assert gold.resolved, gold
    wrong = run(task, module(WRONG))
    assert wrong.reason == "1 of 2 tests failed or did not run: FunctionTest.test_result"


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_report_earns_nothing_with_the_script_of_the_image(task: SweTask, attack: str) -> None:
    found = run(task, ATTACKS[attack])
    assert (found.resolved, found.failed) == (False, ""), found


COMMANDS = {
    "pytest": "cd /testbed && A='b c' .venv/bin/python -W ignore -m pytest -rA tests_of_row/*.py 2>&1 | tee /tmp/log",
    "exit_status": "export A=b\n.venv/bin/pytest tests_of_row -k result && .venv/bin/pytest tests_of_row -k name",
}


@pytest.mark.parametrize("parser", COMMANDS)
def test_a_command_of_several_is_judged_by_its_calls(task: SweTask, parser: str) -> None:
    names = ["tests_of_row/test_1.py::FunctionTest::test_result", "tests_of_row/test_1.py::test_name"]
    row = {
        "dataset_name": "SWE-bench",
        "test_cmd": COMMANDS[parser],
        "log_parser": parser,
        "FAIL_TO_PASS": names,
        "PASS_TO_PASS": [],
    }
    own = replace(task, facts={**task.facts, **row}, test_patch=new_file("tests_of_row/test_1.py", TESTS))
    gold, printed = run(own, task.gold_patch), run(own, ATTACKS["a printed report, and the end with status 0"])
    assert gold.resolved, gold
    assert (printed.resolved, printed.failed) == (False, "")


def test_an_image_whose_python_cannot_run_the_tests_gives_no_verdict(task: SweTask) -> None:
    lacking = Path(task.image) / "lacking"
    lacking.mkdir()
    (lacking / "base64.py").write_text("raise ImportError('base64')\n", encoding="utf-8")
    row = {
        "dataset_name": "SWE-bench",
        "test_cmd": "PYTHONPATH=/lacking .venv/bin/python -m pytest r2e_tests",
        "log_parser": "pytest",
        "FAIL_TO_PASS": ["r2e_tests/test_1.py::test_name"],
        "PASS_TO_PASS": [],
    }
    own = replace(task, facts={**task.facts, **row})
    found = run(own, task.gold_patch)
    assert "could not start in the image: " in found.failed and "base64" in found.failed, found


def test_commands_before_the_tests_that_fail_decide(task: SweTask) -> None:
    own = replace(
        task, facts={**task.facts, "test_cmd": "cd /nowhere && .venv/bin/pytest", "log_parser": "exit_status"}
    )
    found = run(own, task.gold_patch)
    assert not found.resolved and "commands before the tests ended with status 1: " in found.reason
