"""The agent programs of others that can work on a task in a repository, and where they are installed.

A program is a command. It reads a task as one JSON object on its standard input:

    {"problem": "...", "workspace": "/testbed", "max_turns": 200, "command_seconds": 300,
     "model_server": {"base_url": "http://HOST:PORT/r/SECRET/v1", "model": "policy"},
     "container": 3}                         descriptor of a socket to the task's container

It asks the policy by chat completions, and the container by lines of JSON: `{"command": "ls", "seconds": 60}` is
answered by `{"output": "...", "status": 0}`, with status null for a command that ran out of its time, or by
`{"ended": "memory"}` once the container has ended. With `"lasting": true` the command's directory and variables are
those of the next such command, too. Its last line of output is its result, such as
`{"end": "finished"}`, with one of the words of `AgentEnd`. What it changed is read from the container, not from what it
says.

Each has an environment of its own, made by `make swe-agent`. It lies in build/agents, or AGENT_PROGRAMS_DIR.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
DIRECTORY = "AGENT_PROGRAMS_DIR"
ADAPTERS = ROOT / "recipes/environments/agents/programs/adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """A program of somebody else, and the file that starts it as this module says."""

    name: str  # `agent_framework` of the configuration
    adapter: Path  # run by the Python of the program's environment
    environment: Mapping[str, str]
    python_version: str = ""  # that its environment needs; empty: that of this repository

    @property
    def python(self) -> Path:
        """The Python of its environment on this machine."""
        return installations() / self.name / "bin" / "python"

    @property
    def words(self) -> list[str]:
        """Its command line."""
        return [str(self.python), "-I", str(self.adapter)]

    def missing(self) -> str:
        """Return why it cannot be started on this machine, empty where it can."""
        if os.access(self.python, os.X_OK):
            return ""
        return (
            f"the agent program {self.name} is not installed: there is no {self.python}; "
            f"`make swe-agent AGENT={self.name}` installs it"
        )


def installations() -> Path:
    """Return the directory of the programs' environments."""
    return Path(os.environ.get(DIRECTORY) or ROOT / "build" / "agents")


PROGRAMS: Mapping[str, AgentProgram] = {
    "mini-swe-agent": AgentProgram(
        name="mini-swe-agent",
        adapter=ADAPTERS / "mini_swe_agent.py",
        environment={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a price list
            "MSWEA_COST_TRACKING": "ignore_errors",  # the policy has no price
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
    "openhands-ai": AgentProgram(
        name="openhands-ai",
        adapter=ADAPTERS / "openhands_ai.py",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LOG_LEVEL": "ERROR", "LOG_TO_FILE": "False"},
        python_version="3.12",
    ),
}
