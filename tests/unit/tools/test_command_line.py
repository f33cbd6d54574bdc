"""How a command ends: one line for what was wrong, and the status that belongs to it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.errors import DataError, Problem, RunError
from tools.command_line import amount, exit_status, positive, tcp_port

ROOT = Path(__file__).resolve().parents[3]


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return exit_status(main)


WRONG = Problem(where="a", got="b", expected="c", fix="d")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (DataError(WRONG), 2, "a: got b, expected c; d\n"),
        (RunError("it ended"), 1, "it ended\n"),
        (OSError(28, "No space left on device"), 2, "test_command_line: No space left on device; make room"),
        (KeyboardInterrupt(), 130, "interrupted; the same command starts again\n"),
    ],
)
def test_each_error_has_its_line_and_its_status(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(error)() == status
    printed = capsys.readouterr()
    assert printed.err.startswith(said)
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_what_the_machine_refuses_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @exit_status
    def main() -> int:
        return len(tmp_path.read_bytes())

    assert main() == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}: Is a directory; correct the path, ")


TALKATIVE = """
import sys
from tools.command_line import exit_status
@exit_status
def main():
    while True:
        print("x" * 1000)
sys.exit(main())
"""


@pytest.mark.parametrize("program", [TALKATIVE, TALKATIVE.replace("while", "if")], ids=["much", "little"])
def test_a_reader_that_has_gone_ends_it_without_a_word(program: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_terminal_of_another_encoding_shows_a_mark_for_what_it_lacks() -> None:
    program = TALKATIVE.replace("while", "if").replace('"x" * 1000', r'"\u2587 \ud83d x"')
    command, env = [sys.executable, "-c", program], os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == (b"? ? x\n", b"")


def test_a_mistake_of_the_program_keeps_its_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())()


def test_numbers_of_things_and_amounts() -> None:
    assert (positive("12"), amount("0.5"), amount("3"), tcp_port("0"), tcp_port("65535")) == (12, 0.5, 3.0, 0, 65535)
    for read, wrong in (
        (positive, ["0", "-1", "1.5", "x", "", "\u00b2"]),
        (tcp_port, ["-1", "65536", "x", ""]),
        (amount, ["0", "-1", "x", "", "nan", "inf"]),
    ):
        for text in wrong:
            with pytest.raises(argparse.ArgumentTypeError, match="got"):
                read(text)
