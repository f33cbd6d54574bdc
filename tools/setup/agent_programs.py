"""Install an agent program into an environment of its own: `make swe-agent AGENT=mini-swe-agent`.

    python -m tools.setup.agent_programs NAME

Every package is pinned by its hash. The environment lies in build/agents, or AGENT_PROGRAMS_DIR, which all nodes must
see. Of several calls at once one installs, and the others are refused; what is installed already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Sequence

from recipes.environments.agents.coding.programs import PROGRAMS, AgentProgram, installations
from recipes.errors import InputError, Problem, suggestion
from tools.command_line import exit_status
from tools.files.locks import only_one
from tools.files.packages import OPTIONS, STAMP, run_pip


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
    place = installations() / program.name
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = place / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    partial = place.with_name(f".{program.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    python = str(partial / "bin" / "python")
    run_pip([sys.executable, "-m", "venv", str(partial)])
    run_pip([python, "-m", "pip", "install", *OPTIONS, "-r", str(requirements)])
    (partial / STAMP).write_text(wanted, encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)


if __name__ == "__main__":
    sys.exit(main())
