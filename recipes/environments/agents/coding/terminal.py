"""The terminal of a coding agent: a shell of the container that keeps its directory and variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.environments.swe.contract import Shell

MAX_COMMAND = 200_000  # characters
MIN_SECONDS = 1.0
# Programs that end processes by their name: a pattern that is too wide ends the shell or the tools of the task itself.
KILLS_BY_NAME = re.compile(r"(?<![\w.-])(pkill|killall5?)(?![\w.-])")


@dataclass(slots=True, kw_only=True)
class Terminal:
    """The terminal of one rollout, and what it counts."""

    shell: Shell
    answers: Mapping[str, str]  # the forms of the harness
    max_characters: int  # of one output
    seconds: float  # that one command may take
    num_commands: int = 0
    num_late: int = 0
    num_dropped: int = 0  # characters that were cut out of outputs

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Run one command and return what the model is shown; raises `ValueError` and `ContainerEndedError`."""
        command = checked_command(arguments["command"])
        seconds = min(max(arguments.get("seconds") or self.seconds, MIN_SECONDS), self.seconds)
        if directory := arguments.get("directory"):
            await self._change_directory(directory)
        self.num_commands += 1
        done = await self.shell.run(command, seconds=seconds, max_characters=self.max_characters)
        self.num_dropped += done.num_dropped  # a line of the output says so where they were
        if done.status is None:
            self.num_late += 1
            return self.answers["late"].format(output=done.output, seconds=seconds)
        return self.answers["shell"].format(output=done.output, status=done.status)

    async def _change_directory(self, directory: str) -> None:
        if "\0" in directory:
            raise ValueError("the directory must not hold NUL")
        entering = f"cd -- {shlex.quote(directory)}"
        entered = await self.shell.run(entering, seconds=self.seconds, max_characters=1000)
        if entered.status != 0:
            raise ValueError(f"the directory cannot be entered: {entered.output.strip()}")


def checked_command(given: object) -> str:
    """Return a command as shell text; a list of words is quoted, except for one that hands a script to bash.

    Raises `ValueError` for one that is not run.
    """
    if isinstance(given, list):
        if len(given) == 3 and given[0] in ("bash", "sh", "/bin/bash", "/bin/sh") and given[1] in ("-lc", "-c"):
            given = given[2]
        else:
            given = shlex.join(map(str, given))
    command = str(given)
    if not command.strip():
        raise ValueError("the command is empty")
    if "\0" in command:
        raise ValueError("the command must not hold NUL")
    if len(command) > MAX_COMMAND:
        raise ValueError(f"the command has {len(command)} characters, expected {MAX_COMMAND} at most")
    if found := KILLS_BY_NAME.search(command):
        raise ValueError(
            f"{found[1]} is not allowed: it ends every process with a name. "
            "Note the number of a process that you start ($!), and end that one with kill"
        )
    return command
