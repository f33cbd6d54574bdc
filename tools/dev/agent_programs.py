"""Install an agent program into an environment of its own: `make swe-agent AGENT=mini-swe-agent`.

    python -m tools.dev.agent_programs NAME

Every package is pinned by its hash. A program that needs another Python than this repository gets that of PATH, as
`python3.12`, or the one that AGENT_PYTHON names. The environment lies in build/agents, or AGENT_PROGRAMS_DIR, which
all nodes must see. Of several calls at once one installs, and the others are refused; what is installed already is left
alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.environments.agents.coding.programs import PROGRAMS, AgentProgram, installations
from recipes.errors import InputError, Problem, suggestion
from tools.command_line import exit_status
from tools.locks import only_one
from tools.packages import OPTIONS, install_once, run_pip

VARIABLE = "AGENT_PYTHON"
PYTHON_SECONDS = 60.0


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
    python = python_of(program)

    def fill(place: Path) -> None:
        run_pip([python, "-m", "venv", str(place)])
        run_pip([str(place / "bin" / "python"), "-m", "pip", "install", *OPTIONS, "-r", str(requirements)])

    install_once(requirements, installations() / program.name, fill)


def python_of(program: AgentProgram) -> str:
    """Return the Python that makes the program's environment; raises `InputError` where there is none."""
    if not program.python_version:
        return sys.executable
    found = os.environ.get(VARIABLE) or shutil.which(f"python{program.python_version}") or ""
    ask = [found, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(
            ask, capture_output=True, encoding="utf-8", errors="replace", timeout=PYTHON_SECONDS, check=False
        )
        version = done.stdout.strip() or " ".join(done.stderr.split())[-200:]
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    if version != program.python_version:
        where = found or f"python{program.python_version} on PATH"
        wrong = f"{program.name} needs Python {program.python_version} with venv; {where} says {version or 'nothing'}"
        fix = f"install it, or name one: `{VARIABLE}=/path/to/python{program.python_version} make swe-agent ...`"
        raise InputError(Problem(where="AGENT", wrong=wrong, fix=fix))
    return found


if __name__ == "__main__":
    sys.exit(main())
