"""Tables of READMEs: the variables of a launch from the contract, the ports of a job from the port table.

python -m tools.dev.readme_tables --write tools/launch/README.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.cluster.ports import port_rows
from tools.command_line import exit_status
from tools.draft.contract import OPTIONAL, REQUIRED, REQUIRED_ON_SLURM, REQUIRED_WITH_CONTAINERS


def variables() -> str:
    """Return both tables of variables as Markdown."""
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


def ports() -> str:
    """Return the table of ports as Markdown."""
    lines = ["| ports | program | address in a job | who connects needs |", "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in port_rows()]
    return "\n".join(lines)


TABLES = {"variables": variables, "ports": ports}


def replaced(readme: str) -> str:
    """Return a text with each table between its markers."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in readme:
            before, _, rest = readme.partition(begin)
            _, _, after = rest.partition(end)
            readme = f"{before}{begin}\n{table()}\n{end}{after}"
    return readme


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or put them into a file that has their markers."""
    parser = argparse.ArgumentParser(description="The tables of variables and of ports.")
    parser.add_argument("--write", type=Path, metavar="README", help="put them between the markers of this file")
    readme = parser.parse_args(argv).write
    if readme is None:
        print("\n\n".join(table() for table in TABLES.values()))
    else:
        readme.write_text(replaced(readme.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
