"""Install an agent program into an environment of its own: `make swe-agent AGENT=mini-swe-agent`.

    python -m tools.setup.agent_programs NAME

Every package is pinned by its hash. The environment lies in build/agents, or AGENT_PROGRAMS_DIR, which all nodes must
see. Of several calls at once one installs, and the others are refused; what is installed already is left alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.environments.agents.coding.programs import PROGRAMS, AgentProgram, installations
from recipes.errors import InputError, Problem, suggestion
from tools.command_line import exit_status
from tools.files.locks import only_one
from tools.files.packages import OPTIONS, install_once, run_pip


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Install one program; return the exit status."""
    parser = argparse.ArgumentParser(prog="agent_programs", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("name", help=f"one of {', '.join(PROGRAMS)}")
    name = parser.parse_args(argv).name
    if name not in PROGRAMS:
        fix = suggestion(name, PROGRAMS)
        raise InputError(Problem(where="AGENT", got=name, expected=" or ".join(PROGRAMS), fix=fix))
    directory = installations()
    directory.mkdir(parents=True, exist_ok=True)
    with only_one(directory / f".{name}.lock"):
        install(PROGRAMS[name])
    print(f"{name}: {PROGRAMS[name].python}")
    return 0


def install(program: AgentProgram) -> None:
    """Make the program's environment, unless it is there with these packages; raises `RunError`."""
    requirements = program.adapter.with_suffix(".txt")

    def fill(place: Path) -> None:
        run_pip([sys.executable, "-m", "venv", str(place)])
        run_pip([str(place / "bin" / "python"), "-m", "pip", "install", *OPTIONS, "-r", str(requirements)])

    install_once(requirements, installations() / program.name, fill)


if __name__ == "__main__":
    sys.exit(main())
