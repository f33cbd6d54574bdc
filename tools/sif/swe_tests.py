"""How the tests of a SWE instance are run, and which of them passed, by their output.

Tests have the names of the data sets: pytest's ids; `test_x (module.Class)` for Django; bare functions for SymPy; for
R2E-Gym what its own script prints. This decides only which images are good; training scores with the agents' harness.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.sif.instances import R2E_GYM, Instance

PATCHED_FILE = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED) (\S.*)$", re.MULTILINE)
DJANGO_LINE = re.compile(r"^(.+?) \.\.\. (.*)$", re.MULTILINE)
SYMPY_LINE = re.compile(r"^(test_\w+)\s+(\S+)", re.MULTILINE)
COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONDA = "/opt/miniconda3/bin/activate"  # reads its arguments, and dash gives a sourced file none of its own
ENTER = f"[ ! -f {CONDA} ] || {{ set -- testbed; . {CONDA} testbed; }}; cd /testbed"
R2E_SCRIPT = "for script in run_tests.sh /run_tests.sh; do [ ! -f $script ] || break; done; [ -f $script ]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A test framework."""

    name: str
    present: str  # shell command that succeeds where it is installed
    command: str  # shell command; {files}: test files, {labels}: the same as Django labels


FRAMEWORKS = {
    "django": Framework(
        name="django",
        present="test -f tests/runtests.py",
        command="./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {labels}",
    ),
    "sympy": Framework(name="sympy", present="test -f bin/test", command="bin/test -C --verbose {files}"),
    "pytest": Framework(
        name="pytest",
        present="python -m pytest --version",
        command="python -m pytest -rA --tb=no -p no:cacheprovider {files}",
    ),
    R2E_GYM: Framework(
        name=R2E_GYM,
        present=R2E_SCRIPT,
        command=f"{{{{ [ -e r2e_tests ] || [ ! -e /r2e_tests ] || ln -s /r2e_tests r2e_tests; {R2E_SCRIPT}; }}}}"
        " && bash $script",
    ),
}


def framework_of(instance: Instance) -> Framework:
    """Return the framework of an instance's tests."""
    if instance.family == R2E_GYM:
        return FRAMEWORKS[R2E_GYM]
    project = str(instance.facts.get("repo") or instance.id.replace("__", "/")).rpartition("/")[2]
    return FRAMEWORKS.get(re.split(r"-\d+$", project)[0], FRAMEWORKS["pytest"])


def expected_tests(instance: Instance) -> dict[str, bool]:
    """Return test -> whether it passes once the instance is solved; raises `ValueError` for a row without tests."""
    facts = instance.facts
    if instance.family == R2E_GYM and facts.get("expected_output_json"):
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


def command_of(instance: Instance) -> str:
    """Return the shell command that runs the tests of the row and of its test patch."""
    files = [file for file in PATCHED_FILE.findall(str(instance.facts.get("test_patch") or "")) if file.endswith(".py")]
    named = {name.partition("::")[0] for name in expected_tests(instance) if "::" in name}
    files = sorted({*files, *named}) if instance.family != R2E_GYM else []
    labels = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in files]
    return framework_of(instance).command.format(files=shlex.join(files), labels=shlex.join(labels))


def results(framework: Framework, output: str) -> dict[str, bool]:
    """Return test -> whether it passed, from the output."""
    text = COLOR.sub("", output)
    found: dict[str, bool] = {}
    if framework.name == "django":
        return {name.strip(): status.strip().endswith("ok") for name, status in DJANGO_LINE.findall(text)}
    if framework.name == "sympy":
        return {name: status == "ok" for name, status in SYMPY_LINE.findall(text)}
    for status, rest in PYTEST_LINE.findall(text):
        name = rest.split(" - ", 1)[0] if status in ("FAILED", "ERROR") else rest
        passed = status in ("PASSED", "XFAIL")
        # The data sets cut names at the first space; R2E-Gym keeps only class and function.
        for way in (name.split(" ", 1)[0], name, ".".join(name.split("::")[1:])):
            found[way] = passed
    return found


def is_solved(expected: Mapping[str, bool], found: Mapping[str, bool]) -> bool:
    """Whether every test did what it does in a solved instance; a test that was not run counts as failed."""
    return all(found.get(name, False) == passed for name, passed in expected.items())


def wrong_tests(expected: Mapping[str, bool], found: Mapping[str, bool]) -> Sequence[str]:
    """Return the tests that did not do what they do in a solved instance."""
    return [name for name, passed in expected.items() if found.get(name, False) != passed]
