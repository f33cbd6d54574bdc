"""The calls of test frameworks in a shell command: which commands are made of them, and which are left whole."""

from __future__ import annotations

import json
import time

import pytest

from recipes.environments.swe.calls import FrameworkCall, calls_in
from recipes.environments.swe.hidden_tests import deciding_calls

FACTS = {"instance_id": "a__b-1", "dataset_name": "SWE-bench", "FAIL_TO_PASS": json.dumps(["tests/a.py::t"])}
R2E_SCRIPT = """#!/bin/bash

PYTHONWARNINGS='ignore::UserWarning' .venv/bin/python -W ignore -m pytest -rA r2e_tests
"""
# command -> of each of its calls: framework, program, words, what comes before it, whether it needs the last
CALLS: dict[str, list[tuple[str, str, str, str, bool]]] = {
    "pytest": [("pytest", "python", "", "", False)],
    "python -m pytest -rA 'tests/a b.py'": [("pytest", "python", "-rA 'tests/a b.py'", "", False)],
    "venv/bin/py.test tests/*.py $X": [("pytest", "venv/bin/python", "tests/*.py $X", "", False)],
    "python -m unittest -v a.b": [("unittest", "python", "-v a.b", "", False)],
    "A='b c' timeout -k 5 60 python3.9 -Wignore -B -m pytest": [
        ("pytest", "A='b c' timeout -k 5 60 python3.9 -Wignore -B", "", "", False)
    ],
    "poetry run pytest x # all of them": [("pytest", "poetry run python", "x", "", False)],
    'cd x && pytest -k "a > b" 2>&1 | tee log | tail -5': [("pytest", "python", '-k "a > b"', "cd x", False)],
    "pytest x > log 2>&1": [("pytest", "python", "x", "", False)],
    "pytest \\\n  x": [("pytest", "python", "x", "", False)],
    "export A=1; . v/bin/activate\npytest": [("pytest", "python", "", "export A=1; . v/bin/activate\n:", False)],
    "a || b\nserver & pytest": [("pytest", "python", "", "a || b\nserver &\n:", False)],
    "a || b && pytest": [("pytest", "python", "", "a || b", False)],
    "pytest a && cd y && pytest b": [("pytest", "python", "a", "", False), ("pytest", "python", "b", "cd y", True)],
    "pytest a; pytest b": [("pytest", "python", "a", "", False), ("pytest", "python", "b", "", False)],
    "set -eu; pytest a; pytest b": [
        ("pytest", "python", "a", "set -eu\n:", False),
        ("pytest", "python", "b", "", True),
    ],
    "./tests/runtests.py --parallel 1 a.b": [("django", "python", "tests/runtests.py --parallel 1 a.b", "", False)],
    "A=b python bin/test -C x": [("sympy", "A=b python", "bin/test -C x", "", False)],
    R2E_SCRIPT: [
        ("pytest", "PYTHONWARNINGS='ignore::UserWarning' .venv/bin/python -W ignore", "-rA r2e_tests", "", False)
    ],
}
WHOLE = (
    *("", "make test", "pytest-other x", "tox -e pytest", "timeout 60 make pytest", "python -I -m pytest"),
    *("pytest || true", "pytest; true", "pytest && true", "pytest &", "pytest & wait", "pytest a || pytest b"),
    *("pytest | python report.py", "yes | pytest", "pytest < x", "pytest <<< x", "(pytest)", "{ pytest; }", "! pytest"),
    *(
        "for x in a; do pytest $x; done",
        "if true; then pytest; fi",
        "[[ a ]] && pytest",
        "exec pytest",
        "bash -c 'pytest'",
    ),
    *("pytest 'a", 'pytest "a', "pytest `ls`", "pytest $(ls", "&& pytest", "pytest &&", "a ; ; pytest", "a;; pytest"),
    *("pytest a && cd y; pytest b", "cd $(dirname $0) && pytest", "pytest $@", "cat <<X\nX\npytest"),
)


@pytest.mark.parametrize("command", CALLS)
def test_a_command_is_made_of_calls(command: str) -> None:
    assert [
        (call.framework, call.program, call.words, call.before, call.needs_last) for call in calls_in(command)
    ] == CALLS[command]


@pytest.mark.parametrize("command", WHOLE)
def test_another_command_is_left_whole(command: str) -> None:
    assert calls_in(command) == ()


def test_calls_decide_where_the_row_names_their_framework() -> None:
    def frameworks(facts: dict[str, str], script: str = "") -> list[str]:
        return [call.framework for call in deciding_calls({**FACTS, **facts}, script)]

    assert frameworks({}) == ["pytest"]
    assert frameworks({"log_parser": "exit_status", "test_cmd": "cd x && pytest && python -m unittest y"}) == [
        *("pytest", "unittest")
    ]
    assert frameworks({"log_parser": "exit_status", "test_cmd": "bin/test"}) == []  # it ends when its code says so
    assert frameworks({"log_parser": "sympy", "test_cmd": "cd x && bin/test"}) == ["sympy"]
    assert frameworks({"log_parser": "sympy", "test_cmd": "pytest"}) == []
    assert frameworks({"log_parser": "django"}) == ["django"] and frameworks({"log_parser": "sympy"}) == ["sympy"]
    assert frameworks({"test_cmd": "make test"}) == []
    r2e = {"dataset_name": "R2E-Gym", "expected_output_json": '{"T.x": "PASSED"}'}
    assert frameworks(r2e) == [] and frameworks(r2e, "bash other.sh") == []
    assert frameworks(r2e, R2E_SCRIPT) == ["pytest"]


def test_default_commands_name_their_files() -> None:
    (call,) = deciding_calls(FACTS)
    words = "-rA --tb=no -p no:cacheprovider tests/a.py"
    assert call == FrameworkCall(framework="pytest", program="python", words=words)


@pytest.mark.parametrize(
    "command",
    ["A=" + "'a'" * 40_000, "env " + "-x " * 40_000 + "|", "python" + " -W a" * 20_000, "a/" * 50_000, "A=b " * 40_000],
)
def test_a_long_command_takes_no_long_time(command: str) -> None:
    start = time.process_time()
    assert calls_in(command) == ()
    assert time.process_time() - start < 3
