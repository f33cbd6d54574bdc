"""What the tests of a repository came to, read from what its test command printed.

Printed lines are all that there is to go by, and the code under test can print too. So of a report by pytest only what
follows the last heading of its summary counts, up to the line that ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

PASSED, FAILED, ERROR, SKIPPED = "PASSED", "FAILED", "ERROR", "SKIPPED"
STATUSES = (FAILED, PASSED, SKIPPED, ERROR)
WORST_FIRST = (FAILED, ERROR, SKIPPED, PASSED)
FULL, PARTIAL, NO = "RESOLVED_FULL", "RESOLVED_PARTIAL", "RESOLVED_NO"
COLOR = re.compile(r"\x1b\[[0-9;]*m")
SUMMARY = re.compile(r"=+ short test summary info =+")
END = re.compile(r"=+ .*\bin \d[\d.:hms ()]*=+")
PERCENT = re.compile(r"\[ *\d+ *%\]$")
CONTROL = dict.fromkeys(range(1, 32))
DJANGO = {"ok": PASSED, "OK": PASSED, "ERROR": ERROR, "FAIL": FAILED}
DJANGO_REPORT = re.compile(r"(FAIL|ERROR): (\S+)( \([^)]*\))?")
SYMPY = {"ok": PASSED, "E": ERROR}
SYMPY_LINE = re.compile(r"(test_\w+)\s.*?(\S+)\s*(?:\[(?:OK|FAIL)\])?\s*")


def statuses_in(log: str, repository: str, *, has_summary: bool) -> dict[str, str]:
    """Return test -> status, by the notation of the repository's own test command.

    `has_summary` says that pytest was asked for a summary of all tests: without one it did not come to its end.
    """
    lines = COLOR.sub("", log).split("\n")
    kind = repository.rpartition("/")[2]
    if kind == "django":
        return django_statuses(lines)
    return sympy_statuses(lines) if kind == "sympy" else _pytest(lines, has_summary=has_summary)


def _pytest(lines: list[str], *, has_summary: bool) -> dict[str, str]:
    headings = [number for number, line in enumerate(lines) if SUMMARY.fullmatch(line.strip())]
    lines = lines[headings[-1] + 1 :] if headings else [] if has_summary else lines
    found: dict[str, str] = {}
    for raw in lines:
        line = PERCENT.sub("", raw.rstrip()).rstrip().translate(CONTROL)
        if headings and END.fullmatch(line):
            break
        words = line.split()
        if len(words) < 2:
            continue
        if words[0] in STATUSES:
            _note(found, _names(line[len(words[0]) :].strip(), " - "), words[0])
        elif words[-1] in STATUSES and not headings:
            _note(found, _names(line[: -len(words[-1])].strip()), words[-1])
    return found


def _names(test: str, end: str = "") -> tuple[str, ...]:
    """Return the names that data sets may give a test: they cut it at its first space. `end` begins a message."""
    whole = test.split(end, 1)[0] if end else test
    return (_named(test.split(" ", 1)[0]), _named(whole))


def _note(found: dict[str, str], names: Iterable[str], status: str) -> None:
    """Note a status under some names; of several tests of one name the worst counts, none takes a failure back."""
    for name in names:
        if WORST_FIRST.index(status) <= WORST_FIRST.index(found.get(name, PASSED)):
            found[name] = status


def _named(test: str) -> str:
    """Return a test's name as data sets write it: a parameter that is a path keeps its last part only."""
    name, bracket, option = test.partition("[")
    option = option.rpartition("]")[0] if option.endswith("]") else option
    if not bracket or not option.startswith("/") or option.startswith("//") or "*" in option or "-/" in option:
        return test
    return f"{name}[/{option.rpartition('/')[2]}]"


def django_statuses(lines: Iterable[str]) -> dict[str, str]:
    """Return test -> status of Django's tests and of unittest; a test whose status is never said has failed.

    Where a test prints something, its status is a line of its own.
    """
    found: dict[str, str] = {}
    begun: list[str] = []
    is_said = True  # the status of the last test
    for raw in lines:
        line = raw.strip()
        name, dots, word = f"{line} ".rpartition(" ... ")
        if dots:
            _note(found, [test for test in begun[-1:] if not is_said], FAILED)
            begun.append(name.split(" ... ", 1)[0])
            status = SKIPPED if word.startswith("skipped") else DJANGO.get(word.strip())
            if status or word.strip() in ("expected failure", "unexpected success"):
                _note(found, (name,), status or FAILED)
            is_said = status is not None
        elif line in DJANGO and begun:
            _note(found, begun[-1:], DJANGO[line])
            is_said = True
        elif report := DJANGO_REPORT.match(line):
            _note(found, (report[2], report[2] + (report[3] or "")), DJANGO[report[1]])
    _note(found, [test for test in begun[-1:] if not is_said], FAILED)
    return {**dict.fromkeys(begun, FAILED), **found}


def sympy_statuses(lines: Iterable[str]) -> dict[str, str]:
    """Return test -> status of SymPy's own tests: the last word of a line, before the mark of a whole file."""
    found: dict[str, str] = {}
    for line in lines:
        if match := SYMPY_LINE.fullmatch(line.strip()):
            _note(found, (match[1],), SYMPY.get(match[2], FAILED))
    return found


def resolution(statuses: Mapping[str, str], to_pass: Iterable[str], to_keep: Iterable[str]) -> str:
    """Return whether tests pass: all, all that passed before and some of the others, or less.

    A test without a status, or with an unknown one, has failed. One that was skipped counts neither way, and an empty
    list is passed.
    """
    fixed, kept = (_share_passed(statuses, tests) for tests in (to_pass, to_keep))
    if kept < 1.0 or fixed == 0.0:
        return NO
    return FULL if fixed == 1.0 else PARTIAL


def _share_passed(statuses: Mapping[str, str], tests: Iterable[str]) -> float:
    counted = [status for test in tests if (status := statuses.get(test, FAILED)) != SKIPPED]
    return counted.count(PASSED) / len(counted) if counted else 1.0
