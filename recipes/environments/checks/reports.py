"""What the tests of a repository came to, read from what its test command printed.

Printed lines are all that there is to go by, and the code under test can print too. So of a report by pytest only what
follows the last heading of its summary counts, up to the line that ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

PASSED, FAILED, ERROR, SKIPPED = "PASSED", "FAILED", "ERROR", "SKIPPED"
STATUSES = (FAILED, PASSED, SKIPPED, ERROR)
FULL, PARTIAL, NO = "RESOLVED_FULL", "RESOLVED_PARTIAL", "RESOLVED_NO"
COLOR = re.compile(r"\x1b\[[0-9;]*m")
SUMMARY = re.compile(r"=+ short test summary info =+")
END = re.compile(r"=+ .*\bin \d[\d.:hms ()]*=+")
PERCENT = re.compile(r"\[ *\d+ *%\]$")
CONTROL = dict.fromkeys(range(1, 32))
DJANGO = {" ... ok": PASSED, " ... OK": PASSED, " ... FAIL": FAILED, " ... ERROR": ERROR}
SYMPY = {" ok": PASSED, " F": FAILED, " E": ERROR}


def statuses_in(log: str, repository: str, *, has_summary: bool) -> dict[str, str]:
    """Return test -> status, by the notation of the repository's own test command; the last word on a test counts.

    `has_summary` says that pytest was asked for a summary of all tests: without one it did not come to its end.
    """
    lines = COLOR.sub("", log).split("\n")
    kind = repository.rpartition("/")[2]
    if kind == "django":
        return _django(lines)
    return _sympy(lines) if kind == "sympy" else _pytest(lines, has_summary=has_summary)


def _pytest(lines: list[str], *, has_summary: bool) -> dict[str, str]:
    headings = [number for number, line in enumerate(lines) if SUMMARY.fullmatch(line.strip())]
    lines = lines[headings[-1] + 1 :] if headings else [] if has_summary else lines
    found = {}
    for raw in lines:
        line = PERCENT.sub("", raw.rstrip()).rstrip().translate(CONTROL)
        if headings and END.fullmatch(line):
            break
        words = line.split()
        if len(words) < 2:
            continue
        if words[0] in STATUSES:
            found[_named(words[1])] = words[0]
        elif words[-1] in STATUSES and not headings:
            found[_named(words[0])] = words[1]
    return found


def _named(test: str) -> str:
    """Return a test's name as data sets write it: a parameter that is a path keeps its last part only."""
    name, bracket, option = test.partition("[")
    option = option.rpartition("]")[0] if option.endswith("]") else option
    if not bracket or not option.startswith("/") or option.startswith("//") or "*" in option or "-/" in option:
        return test
    return f"{name}[/{option.rpartition('/')[2]}]"


def _django(lines: list[str]) -> dict[str, str]:
    found, last = {}, None
    for raw in lines:
        line = raw.strip()
        if " ... " in line:
            last = line.split(" ... ", 1)[0]
        ending = next((ending for ending in DJANGO if line.endswith(ending)), None)
        if ending is not None:
            found[line.removesuffix(ending)] = DJANGO[ending]
        elif " ... skipped" in line:
            found[line.split(" ... skipped", 1)[0]] = SKIPPED
        elif line.startswith("ok") and last is not None:  # what the test printed stood before it
            found[last] = PASSED
        elif line.startswith(("FAIL:", "ERROR:")) and len(line.split()) > 1:
            found[line.split()[1]] = FAILED if line.startswith("FAIL:") else ERROR
    return found


def _sympy(lines: list[str]) -> dict[str, str]:
    found = {}
    for raw in lines:
        line = raw.replace("[OK]", "").replace("[FAIL]", "").strip()
        ending = next((ending for ending in SYMPY if line.endswith(ending)), None)
        if line.startswith("test_") and ending is not None:
            found[line.split()[0]] = SYMPY[ending]
    return found


def resolution(statuses: Mapping[str, str], to_pass: Iterable[str], to_keep: Iterable[str]) -> str:
    """Return whether tests pass: all, all that passed before and some of the others, or less.

    A test without a status has failed. One that was skipped counts neither way, and an empty list is passed.
    """
    fixed, kept = (_share_passed(statuses, tests) for tests in (to_pass, to_keep))
    if kept < 1.0 or fixed == 0.0:
        return NO
    return FULL if fixed == 1.0 else PARTIAL


def _share_passed(statuses: Mapping[str, str], tests: Iterable[str]) -> float:
    counted = [statuses.get(test, FAILED) for test in tests]
    counted = [status for status in counted if status in (PASSED, FAILED, ERROR)]
    return counted.count(PASSED) / len(counted) if counted else 1.0
