"""How the tests of a SWE task are run, and what their output says: enough of it to tell a solved task from another.

The names of tests are those of the data sets: pytest's ids; `test_x (module.Class)` of Django; bare functions of
SymPy; for R2E-Gym what its own script prints. Training itself scores with the agents' own harness.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.sif.wanted import R2E_GYM, Task

PATCHED_FILE = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED) (\S.*)$", re.MULTILINE)
DJANGO_LINE = re.compile(r"^(.+?) \.\.\. (.*)$", re.MULTILINE)
SYMPY_LINE = re.compile(r"^(test_\w+)\s+(\S+)", re.MULTILINE)
COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONDA = "/opt/miniconda3/bin/activate"  # reads its words with a `.` that, in dash, is given none
ENTER = f"[ ! -f {CONDA} ] || {{ set -- testbed; . {CONDA} testbed; }}; cd /testbed"
R2E_SCRIPT = "for script in run_tests.sh /run_tests.sh; do [ ! -f $script ] || break; done; [ -f $script ]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """One way to run tests."""

    name: str
    present: str  # shell that succeeds when it is there
    command: str  # shell; {files} are the tests' files, {labels} the same as Django writes them


RUNNERS = {
    "django": Runner(
        name="django",
        present="test -f tests/runtests.py",
        command="./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {labels}",
    ),
    "sympy": Runner(name="sympy", present="test -f bin/test", command="bin/test -C --verbose {files}"),
    "pytest": Runner(
        name="pytest",
        present="python -m pytest --version",
        command="python -m pytest -rA --tb=no -p no:cacheprovider {files}",
    ),
    R2E_GYM: Runner(
        name=R2E_GYM,
        present=R2E_SCRIPT,
        command=f"{{{{ [ -e r2e_tests ] || [ ! -e /r2e_tests ] || ln -s /r2e_tests r2e_tests; {R2E_SCRIPT}; }}}}"
        " && bash $script",
    ),
}


def runner_of(task: Task) -> Runner:
    """Return how the tests of a task are run."""
    if task.family == R2E_GYM:
        return RUNNERS[R2E_GYM]
    project = str(task.facts.get("repo") or task.instance.replace("__", "/")).rpartition("/")[2]
    return RUNNERS.get(re.split(r"-\d+$", project)[0], RUNNERS["pytest"])


def expected_tests(task: Task) -> dict[str, bool]:
    """Return which tests pass and which fail once a task is solved; raises `ValueError` when the row says nothing."""
    facts = task.facts
    if task.family == R2E_GYM and facts.get("expected_output_json"):
        expected = _loaded(facts["expected_output_json"])
        tests = {str(name): status == "PASSED" for name, status in expected.items()}
    else:
        names = [*_loaded(facts.get("FAIL_TO_PASS") or "[]"), *_loaded(facts.get("PASS_TO_PASS") or "[]")]
        tests = {str(name): True for name in names}
    if not tests:
        raise ValueError("the row names no tests")
    return tests


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def command_of(task: Task) -> str:
    """Return the shell line that runs a task's tests in its image, with what both patches have changed."""
    files = [file for file in PATCHED_FILE.findall(str(task.facts.get("test_patch") or "")) if file.endswith(".py")]
    named = {name.partition("::")[0] for name in expected_tests(task) if "::" in name}
    files = sorted({*files, *named}) if task.family != R2E_GYM else []
    labels = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in files]
    return runner_of(task).command.format(files=shlex.join(files), labels=shlex.join(labels))


def results(runner: Runner, output: str) -> dict[str, bool]:
    """Return test -> passed of an output."""
    text = COLOR.sub("", output)
    found: dict[str, bool] = {}
    if runner.name == "django":
        return {name.strip(): status.strip().endswith("ok") for name, status in DJANGO_LINE.findall(text)}
    if runner.name == "sympy":
        return {name: status == "ok" for name, status in SYMPY_LINE.findall(text)}
    for status, rest in PYTEST_LINE.findall(text):
        name = rest.split(" - ", 1)[0] if status in ("FAILED", "ERROR") else rest
        passed = status in ("PASSED", "XFAIL")
        # The data sets cut names at the first space; R2E-Gym keeps only class and function.
        for way in (name.split(" ", 1)[0], name, ".".join(name.split("::")[1:])):
            found[way] = passed
    return found


def is_solved(expected: Mapping[str, bool], found: Mapping[str, bool]) -> bool:
    """Return whether each test did what it does in a solved task; one that was not run counts as failed."""
    return all(found.get(name, False) == passed for name, passed in expected.items())


def wrong_tests(expected: Mapping[str, bool], found: Mapping[str, bool]) -> Sequence[str]:
    """Return the tests that did not do what they do in a solved task."""
    return [name for name, passed in expected.items() if found.get(name, False) != passed]
