"""Calls of test frameworks in a container, each by `run_tests.py`, with a report that is sealed with a key of its own.

A call's key is written when the commands before it have ended, and read before code under test is loaded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from recipes.environments.swe.calls import FrameworkCall
from recipes.environments.swe.contract import KEPT_CHARACTERS, Container, Shell
from recipes.environments.swe.hidden_tests import ENTER, sealed_report

RUN_TESTS = Path(__file__).with_name("run_tests.py").read_bytes()
MAX_CHARACTERS = 2 * KEPT_CHARACTERS  # of what the tests print
MAX_SHOWN = 300  # characters of an output in a reason


class NotStartedError(Exception):
    """The program that runs the tests could not start: Python of the image lacks what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the calls of one command reported."""

    tests: dict[str, bool] = field(default_factory=dict)  # test -> whether it passed, in every call that ran it
    is_good: bool = True  # whether the last list of the command ended well, and a test of each of its calls passed
    wrong: str = ""  # why not all calls reported
    said: str = ""  # the end of what the last call printed
    is_late: bool = False


async def run_calls(container: Container, calls: Sequence[FrameworkCall], seconds: float) -> Reported:
    """Make calls one after the other, in a shell of their own; `seconds` is the time of all together.

    Raises `ContainerEndedError`, `LongReportError`, `NotStartedError`, `OSError` where the container refuses a file.
    """
    shell = await container.open_shell()
    end = time.monotonic() + seconds
    found = Reported()
    for number, call in enumerate(calls):
        if call.needs_last and not found.is_good:
            continue
        before = f"{{\n{call.before or ':'}\n}} </dev/null 2>&1"
        done = await shell.run(
            f"{{ {ENTER}; }} && {before}" if number == 0 else before,
            seconds=max(end - time.monotonic(), 0.0),
            max_characters=MAX_CHARACTERS,
        )
        if done.status is None:
            return replace(found, is_late=True)
        if done.status != 0:
            wrong = f"the commands before the tests ended with status {done.status}: {shown(done.output)}"
            return replace(found, is_good=False, wrong=wrong)
        reported = await _run(container, shell, call, end)
        tests = {name: passed and found.tests.get(name, True) for name, passed in reported.tests.items()}
        is_good = reported.is_good and (found.is_good or not call.needs_last)
        wrong = found.wrong or reported.wrong
        found = replace(reported, tests={**found.tests, **tests}, is_good=is_good, wrong=wrong)
        if found.is_late:
            break
    return found


async def _run(container: Container, shell: Shell, call: FrameworkCall, end: float) -> Reported:
    place, key = f"/tmp/{secrets.token_hex(8)}", secrets.token_hex(32)
    await container.write_file(f"{place}/run_tests.py", RUN_TESTS)
    await container.write_file(f"{place}/key", key.encode())
    command = f"{call.program} {place}/run_tests.py {place}/key {call.framework} {call.words} </dev/null 2>&1"
    done = await shell.run(command, seconds=max(end - time.monotonic(), 0.0), max_characters=MAX_CHARACTERS)
    if done.status is None:
        return Reported(is_late=True)
    report = sealed_report(key, done.output)
    if report is None:
        await _require_started(container, f"{place}/key", done.output)
        wrong = f"the tests did not come to their end (status {done.status}): {shown(done.output)}"
        return Reported(is_good=False, wrong=wrong)
    said = f"status {done.status}: {shown(report.said)}"
    return Reported(tests=dict(report.tests), is_good=report.is_good, said=said)


async def _require_started(container: Container, key_file: str, output: str) -> None:
    """Raise `NotStartedError` where the key is still there: no code under test had been loaded yet."""
    try:
        await container.read_file(key_file, max_bytes=1)
    except FileNotFoundError:
        return
    raise NotStartedError(f"the program that runs the tests could not start in the image: {shown(output)}")


def shown(output: str) -> str:
    """Return the end of an output on one line."""
    return " ".join(output[-MAX_SHOWN:].split())
