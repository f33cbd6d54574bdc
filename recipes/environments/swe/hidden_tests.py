"""How the hidden tests of an instance are run, and what each came to, by their output.

Tests have the names of the data sets: pytest's ids; `test_x (module.Class)` for Django and for unittest; bare functions
for SymPy; for R2E-Gym what its own script prints. An instance may say itself how its tests are run, as those of
SWE-rebench do: `test_cmd` is a shell command, and `log_parser` one of the frameworks below; with `exit_status` the
instance is solved when that command ends with status 0.

The code under test can print, too. So where a command is made of calls of pytest, unittest, Django's or SymPy's tests
(`calls.py`), also in R2E-Gym's script, `run_tests.py` makes these calls, takes the results from the framework and
seals what it prints of them. What other commands print and how they end is believed as it is, but of pytest's output
only what follows the last heading of its summary.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.environments.contract.rows import one_of, wrong
from recipes.environments.swe.calls import FrameworkCall, calls_in
from recipes.environments.verifiers.checks.reports import COLOR, END, PASSED, SUMMARY, django_statuses, sympy_statuses

SWE_BENCH, SWE_GYM, R2E_GYM = "swebench", "swegym", "r2egym"  # families of data sets, as the images' names begin
PATCHED_FILE = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED) (\S.*)$")
CONDA = "/opt/miniconda3/bin/activate"  # reads its arguments, and dash gives a sourced file none of its own
WORKSPACE = "/testbed"  # in all three families
ENTER = f"[ ! -f {CONDA} ] || {{ set -- testbed; . {CONDA} testbed; }}; cd {WORKSPACE}"
R2E_SCRIPT = "for script in run_tests.sh /run_tests.sh; do [ ! -f $script ] || break; done; [ -f $script ]"
R2E_LINK = "[ -e r2e_tests ] || [ ! -e /r2e_tests ] || ln -s /r2e_tests r2e_tests"
EXIT_STATUS = "exit_status"
REPORT = re.compile(r"^report ([0-9a-f]{64}) ([0-9A-Za-z+/]+=*)$", re.MULTILINE)  # as `run_tests.py` prints it
MAX_RESULTS = 8_000_000  # characters of a report, once it is unpacked
# Frameworks of rows -> those whose calls decide. A script that code under test ends early may end with status 0.
DECIDING: Mapping[str, tuple[str, ...]] = {EXIT_STATUS: ("pytest", "unittest"), R2E_GYM: ("pytest",)}


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
    "unittest": Framework(name="unittest", present="python -V", command="python -m unittest -v -b {files}"),
    R2E_GYM: Framework(
        name=R2E_GYM,
        present=R2E_SCRIPT,
        command=f"{{{{ {R2E_LINK}; {R2E_SCRIPT}; }}}} && bash $script",
    ),
    EXIT_STATUS: Framework(name=EXIT_STATUS, present="true", command="false"),  # it is used with a command of its own
}


def family_of(dataset: str) -> str:
    """Return the family of a data set; raises `ValueError` for an unknown one."""
    for part, family in (("R2E-Gym", R2E_GYM), ("SWE-Gym", SWE_GYM), ("SWE-bench", SWE_BENCH)):
        if part.lower() in dataset.lower():
            return family
    raise ValueError(f"the family of dataset_name {dataset!r} is unknown (R2E-Gym, SWE-Gym or SWE-bench)")


def is_r2e(facts: Mapping[str, Any]) -> bool:
    """Whether an instance is one of R2E-Gym, whose image has its own hidden tests."""
    return "r2e-gym" in str(facts.get("dataset_name")).lower()


def framework_of(facts: Mapping[str, Any]) -> Framework:
    """Return the framework of an instance's tests; raises `ValueError` where it names an unknown one."""
    if facts.get("log_parser") is not None:
        return FRAMEWORKS[one_of("log_parser", facts["log_parser"], FRAMEWORKS)]
    if is_r2e(facts):
        return FRAMEWORKS[R2E_GYM]
    name = facts.get("repo") or str(facts.get("instance_id")).replace("__", "/")
    project = str(name).rpartition("/")[2]
    return FRAMEWORKS.get(re.split(r"-\d+$", project)[0], FRAMEWORKS["pytest"])


def expected_tests(facts: Mapping[str, Any]) -> dict[str, bool]:
    """Return test -> whether it passes once the instance is solved; raises `ValueError` for a row without tests."""
    if framework_of(facts).name == EXIT_STATUS:
        return {command_of(facts): True}
    if is_r2e(facts) and facts.get("expected_output_json"):
        expected = _loaded(facts["expected_output_json"])
        if not isinstance(expected, Mapping):
            raise wrong("expected_output_json", facts["expected_output_json"], "JSON text of an object of statuses")
        tests = {str(name): status == PASSED for name, status in expected.items()}
    else:
        tests = {name: True for field in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in names_of_tests(facts, field)}
    if not tests:
        raise ValueError("the row names no tests")
    return tests


def names_of_tests(facts: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the tests that a field lists, by itself or as JSON text; raises `ValueError` for anything else."""
    value = _loaded(facts.get(field) or [])
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise wrong(field, facts[field], "a list of strings, or JSON text of one")
    return tuple(value)


def _loaded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def command_of(facts: Mapping[str, Any]) -> str:
    """Return the shell command that runs the tests of the row and of its test patch."""
    framework = framework_of(facts)
    command = facts.get("test_cmd")
    if command is not None and not isinstance(command, str):
        raise wrong("test_cmd", command, "a shell command")
    if framework.name == EXIT_STATUS and not command:
        raise wrong("test_cmd", command, "a shell command, because log_parser is exit_status")
    if command:
        return command
    files = files_of_tests(facts) if framework.name != R2E_GYM else []
    return framework.command.format(files=shlex.join(files), labels=shlex.join(_labels(files)))


def _labels(files: Sequence[str]) -> list[str]:
    """Return how Django names files of tests."""
    return [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in files]


def deciding_calls(facts: Mapping[str, Any], script: str = "") -> tuple[FrameworkCall, ...]:
    """Return the calls whose reports are sealed; none for tests that only a command of their own can run.

    `script` is R2E-Gym's own, of the image.
    """
    name = framework_of(facts).name
    has_script = name == R2E_GYM and not facts.get("test_cmd")
    calls = calls_in(f"{R2E_LINK}\n{script}" if has_script else command_of(facts))
    return calls if all(call.framework in DECIDING.get(name, (name,)) for call in calls) else ()


def files_of_tests(facts: Mapping[str, Any]) -> list[str]:
    """Return the files of Python tests that the test patch writes or that tests are named after."""
    files = [file for file in PATCHED_FILE.findall(str(facts.get("test_patch") or "")) if file.endswith(".py")]
    named = {name.partition("::")[0] for name in expected_tests(facts) if "::" in name}
    return sorted({*files, *named})


def results(framework: Framework, output: str) -> dict[str, bool]:
    """Return test -> whether it passed, from the output. One that was skipped has not: code under test can skip it."""
    text = COLOR.sub("", output)
    if framework.name in ("django", "unittest"):
        return {name: status == PASSED for name, status in django_statuses(text.split("\n")).items()}
    if framework.name == "sympy":
        return {name: status == PASSED for name, status in sympy_statuses(text.split("\n")).items()}
    return _of_pytest(text.split("\n"))


class LongReportError(Exception):
    """There are too many tests to report what they came to."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `run_tests.py` printed of one call."""

    tests: Mapping[str, bool]  # test -> whether it passed
    is_good: bool  # whether the framework ended well and a test passed
    said: str  # what was printed before it


def sealed_report(key: str, output: str) -> Report | None:
    """Return the last report in an output that is sealed with a key; None where the tests did not come to their end.

    Raises `LongReportError`.
    """
    for found in reversed(list(REPORT.finditer(output))):
        seal = hmac.new(key.encode(), found[2].encode(), "sha256").hexdigest()
        if hmac.compare_digest(seal, found[1]):
            return _unpacked(found[2], output[: found.start()])
    return None


def _unpacked(text: str, said: str) -> Report | None:
    """Return a report; None for one that is none, of code under test that found the key in its own process."""
    try:
        report = json.loads(zlib.decompressobj().decompress(base64.b64decode(text), MAX_RESULTS))
        if "too_long" in report:
            raise LongReportError(f"what the tests came to has {report['too_long']} characters, too many to report")
        pairs = [(str(outcome), str(name)) for outcome, name in report["tests"]]
    except (ValueError, TypeError, KeyError, RecursionError, zlib.error):
        return None
    lines = ((way, outcome) for outcome, name in pairs if outcome != "SKIPPED" for way in _ways(name))
    tests = _of_lines((name, outcome in ("PASSED", "XFAIL")) for name, outcome in lines)
    is_good = report.get("status") == 0 and any(outcome == "PASSED" for outcome, _ in pairs)
    return Report(tests, is_good, said)


def _ways(name: str) -> tuple[str, ...]:
    """Return how data sets may write a test. They cut pytest's names at the first space; R2E-Gym drops the file."""
    return (name.split(" ", 1)[0], name, ".".join(name.split("::")[1:])) if "::" in name else (name,)


def _of_lines(lines: Iterable[tuple[str, bool]]) -> dict[str, bool]:
    """Return test -> whether every line on it says that it passed: one that code under test prints takes none back."""
    found: dict[str, bool] = {}
    for name, passed in lines:
        found[name] = passed and found.get(name, True)
    return found


def _of_pytest(lines: Sequence[str]) -> dict[str, bool]:
    lines_of_tests: list[tuple[str, bool]] = []
    headings = [number for number, line in enumerate(lines) if SUMMARY.fullmatch(line.strip())]
    for line in lines[headings[-1] + 1 :] if headings else ():
        if END.fullmatch(line.strip()):
            break
        match = PYTEST_LINE.match(line)
        if match is None:
            continue
        status, rest = match.groups()
        name = rest if status == "PASSED" else rest.split(" - ", 1)[0]
        lines_of_tests += [(way, status in ("PASSED", "XFAIL")) for way in dict.fromkeys(_ways(name))]
    return _of_lines(lines_of_tests)  # several tests have one name where it was cut


def wrong_tests(expected: Mapping[str, bool], found: Mapping[str, bool]) -> list[str]:
    """Return the tests that did not do what they do in a solved instance; one that was not run has failed."""
    return [name for name, passed in expected.items() if found.get(name, False) != passed]
