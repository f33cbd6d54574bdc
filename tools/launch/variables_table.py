"""The tables of variables in tools/launch/README.md, from the contract.

python -m tools.launch.variables_table --write tools/launch/README.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.command_line import exit_status
from tools.planning.contract import OPTIONAL, REQUIRED, REQUIRED_ON_SLURM, REQUIRED_WITH_CONTAINERS

BEGIN, END = "<!-- variables: begin -->", "<!-- variables: end -->"


def tables() -> str:
    """Return both tables as Markdown."""
    needed = (
        *((name, "always", meaning) for name, meaning in REQUIRED.items()),
        *((name, "on Slurm", meaning) for name, meaning in REQUIRED_ON_SLURM.items()),
        *((name, "with containers", meaning) for name, meaning in REQUIRED_WITH_CONTAINERS.items()),
    )
    lines = ["| required | when | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {when} | {meaning} |" for name, when, meaning in needed]
    lines += ["", "| optional | default | meaning |", "| --- | --- | --- |"]
    for name, variable in OPTIONAL.items():
        default = f"`{variable.default}`" if variable.default else ""
        lines.append(f"| `{name}` | {default} | {variable.meaning} |")
    return "\n".join(lines)


def replaced(readme: str) -> str:
    """Return a text with the tables between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or put them into a file that has their markers."""
    parser = argparse.ArgumentParser(description="The tables of variables, from tools/planning/contract.py.")
    parser.add_argument("--write", type=Path, metavar="README", help="put them between the markers of this file")
    readme = parser.parse_args(argv).write
    if readme is None:
        print(tables())
    else:
        readme.write_text(replaced(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
