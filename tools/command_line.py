"""What the command lines share: reading numbers and switches, and one message when a command fails."""

from __future__ import annotations

import argparse
import functools
import inspect
import io
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from recipes.errors import ConfigError, InputError, Problem, RecipeError, resource_problem

INTERRUPTED, READER_GONE = 130, 141  # what a shell makes of SIGINT and SIGPIPE
TRUE, FALSE = (
    ("true", "1", "yes"),
    ("false", "0", "no", ""),
)  # of a variable that is a switch

Arguments = ParamSpec("Arguments")


def positive(text: str) -> int:
    """Read a whole number of 1 or more from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number, 1 or more")
    return int(text)


def amount(text: str) -> float:
    """Read a number above 0 from the command line."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return number


def tcp_port(text: str) -> int:
    """Read a TCP port from the command line; 0 stands for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a TCP port, 0 to 65535")
    return int(text)


def setting(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE, a YAML value, from the command line; raises `ConfigError`."""
    import yaml  # here: some commands run before the environment is installed

    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(Problem(where="--set", got=text, expected="KEY=VALUE", fix="write the setting in that form"))
    return key, yaml.safe_load(value)


def exit_status(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Wrap a command: its errors, those of the machine, and an interrupt become a message and an exit status."""

    @functools.wraps(main)
    def ended(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of another encoding than UTF-8 shows a ? for the rest
            sys.stdout.reconfigure(errors="replace")
        try:
            status = main(*args, **kwargs)
            sys.stdout.flush()
            return status
        except RecipeError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:  # the program that reads the output has ended, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
        except OSError as error:
            print(resource_problem(error, Path(inspect.getfile(main)).stem), file=sys.stderr)
            return InputError.exit_code
        except KeyboardInterrupt:
            print("interrupted; the same command starts again", file=sys.stderr)
            return INTERRUPTED

    return ended
