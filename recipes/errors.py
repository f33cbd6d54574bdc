"""Every error a user can cause or meet. A message says where, what was got, what was expected, what to do.

`RecipeError` is the base; `exit_code` is what the entrypoints return: 2 for a wrong input, 1 for a failed run.
To add one: inherit from the category it belongs to, and keep the four parts of the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One wrong input, as one line a user can act on."""

    where: str  # file:line, file: key, environment variable, ...
    got: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: got {self.got}, expected {self.expected}; {self.fix}"


class RecipeError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code = 1


class InputError(RecipeError, ValueError):
    """One or more wrong inputs, all found before anything was started."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[list[Problem]]]:
        """Cross a process boundary with the problems, not with their text."""
        return type(self), (self.problems,)


class ConfigError(InputError):
    """A configuration file, an override or a combination of keys is wrong."""


class DataError(InputError):
    """A data file or one of its rows is wrong."""


class CheckpointError(InputError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class LaunchError(InputError):
    """An environment variable, path or resource of a launch is wrong."""


class RunError(RecipeError, RuntimeError):
    """The run failed after it had started."""


class EngineError(RunError):
    """A generation engine died or did not answer in time; the message names it."""


class PolicyError(RunError):
    """A policy worker died or did not answer in time; the message names it."""


class StalledError(RunError):
    """Nothing progressed within its deadline; the message names what was waited for."""
