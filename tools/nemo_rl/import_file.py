"""Turn a stage file of NeMo RL into a small overlay of one of our stages, and list what has no counterpart here.

    python -m tools.nemo_rl.import_file --file their.yaml > configs/mine.yaml      over the nearest of our stages
    python -m tools.nemo_rl.import_file --file their.yaml --base stage2.2/small    over this one

The overlay goes to standard output, to be saved under configs/; the list to standard error, one line per key.
Exit status: 0, also when the list is long; 2 when the file cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import load_config, require_valid
from recipes.config.stages import PLATFORMS, SCALES, config_path, find_stage
from recipes.config.text import scalar, yaml_lines
from recipes.config.yaml_files import read_yaml
from recipes.errors import ConfigError, Problem
from tools.command_line import exit_status
from tools.nemo_rl.importing import ImportedOverlay, import_over, read_file


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Print the overlay and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="a configuration of NeMo RL")
    parser.add_argument(
        "--base", metavar="STAGE[/SCALE[/PLATFORM]]", help="write the overlay for this stage, not for the nearest one"
    )
    args = parser.parse_args(argv)
    candidates = [base_path(args.base)] if args.base else overlays()
    theirs = read_file(args.file, is_partial=args.base is not None)
    bases = [load_config(path) for path in candidates]
    for base in bases:
        require_valid(base)
    imported = import_over(theirs, bases)
    text = "\n".join(render(args.file.name, imported)) + "\n"
    print(text, end="")
    for key, advice in imported.lost.items():
        print(f"config-import: not taken: {key}: {advice}", file=sys.stderr)
    for problem in problems_of(text):
        print(f"config-import: to correct: {problem}", file=sys.stderr)
    return 0


def base_path(name: str) -> Path:
    """Return the file that --base names."""
    stage, _, where = name.partition("/")
    scale, _, platform = where.partition("/")
    for value, choices in ((scale, SCALES), (platform, PLATFORMS)):
        if value and value not in choices:
            expected = f"one of {', '.join(choices)}"
            raise ConfigError(
                Problem(where="--base", got=value, expected=expected, fix="write STAGE[/SCALE[/PLATFORM]]")
            )
    return config_path(find_stage(stage, where="BASE"), scale or "prod", platform or "h100")


def overlays() -> list[Path]:
    """Return every file that has a parent; those of configs/ itself come first and win a tie."""
    paths = sorted(CONFIG_DIR.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return [path for path in paths if "defaults" in read_yaml(path, name=path.name).data]


def render(name: str, imported: ImportedOverlay) -> Iterator[str]:
    """Yield the overlay as YAML, each value with that of the base."""
    parent = os.path.relpath(imported.base.path, CONFIG_DIR)
    yield f"# {name} of NeMo RL, to be saved in configs/: what differs from {parent}"
    yield f"defaults: {parent}"
    yield from yaml_lines(imported.overlay, lambda key: f"there {there(imported, key)}")


def there(imported: ImportedOverlay, key: str) -> str:
    """Return what the base has at a key of the overlay."""
    return scalar(lookup(imported.base.tree, key.replace("~", "")))


def problems_of(text: str) -> list[Problem]:
    """Return what is wrong with an overlay that would be saved under configs/."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "imported.yaml"
        name = text.partition("\ndefaults: ")[2].partition("\n")[0]
        path.write_text(text.replace(f"\ndefaults: {name}\n", f"\ndefaults: {CONFIG_DIR / name}\n", 1))
        found = load_config(path).problems
    return [replace(problem, where=problem.where.replace(str(path), path.name)) for problem in found]


if __name__ == "__main__":
    sys.exit(main())
