"""Print a resolved configuration: every key, the file that set it, and the numbers that follow from them.

    python -m tools.config.show --stage stage1.1 --scale tiny [key=value ...]
    python -m tools.config.show --stage stage2.1 --diff stage1.1            only what differs from another stage
    python -m tools.config.show --stage stage1.1 --diff stage1.1/small      or from another scale, or platform
    python -m tools.config.show --file configs/tiny/stage1_rlvr.yaml grpo.seed=43
    python -m tools.config.show --stage stage2.2 --engine nemo_rl           in the form of NeMo RL's own entrypoint
    python -m tools.config.show --update-golden

Exit status: 0 valid, 2 when something is wrong (every problem is printed). What the native engine does not honour
yet is printed as a comment, and on standard error what the other engine has no key for: it stops a launch, not this.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from recipes.config.keys.derive import derive
from recipes.config.keys.schema import lookup
from recipes.config.load import LoadedConfig, load_config, refusals, require_valid, unset
from recipes.config.merge import references
from recipes.config.stages import PLATFORMS, SCALES, config_path, find_stage
from recipes.config.text import yaml_lines
from recipes.errors import ConfigError, Problem
from tools.command_line import exit_status
from tools.config.diff import render_difference, update_golden
from tools.nemo_rl.export import export, render_export


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Print and return the exit status."""
    args = parse(argv)
    lines = list(answer(args))
    print("\n".join(lines))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--stage", help="id or name of a stage, e.g. stage1.1 or rlvr1")
    which.add_argument("--file", type=Path, help="a configuration file")
    which.add_argument("--update-golden", action="store_true", help="write tests/golden/config/")
    parser.add_argument("--scale", choices=SCALES, default="prod", help="size of the run (default: prod)")
    parser.add_argument("--platform", choices=PLATFORMS, default="h100", help="GPU type (default: h100)")
    parser.add_argument(
        "--engine", choices=("native", "nemo_rl"), default="native", help="whose form it has (default: native)"
    )
    parser.add_argument(
        "--diff",
        metavar="STAGE[/SCALE[/PLATFORM]]",
        help="print only what differs from it, by default at the same scale",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides: key=value, ++key=value, ~key")
    return parser.parse_intermixed_args(argv)


def answer(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that were asked for."""
    if args.update_golden:
        changed = update_golden()
        yield f"{len(changed)} golden files changed"
        return
    path = args.file or config_path(find_stage(args.stage), args.scale, args.platform)
    loaded = load_config(path, args.overrides)
    require_valid(loaded)
    if args.diff is not None:
        yield from render_difference(loaded, other_configuration(args), args.diff)
    elif args.engine == "native":
        yield from render(loaded)
    else:
        exported = export(loaded)
        for word, problems in (("not the same", exported.notes), ("refused at launch", exported.problems)):
            for problem in problems:
                print(f"config: {word}: {problem}", file=sys.stderr)
        yield from render_export(loaded, exported)


def other_configuration(args: argparse.Namespace) -> LoadedConfig:
    """Return the configuration that --diff names; overrides are those of the first alone."""
    stage, _, where = args.diff.partition("/")
    scale, _, platform = where.partition("/")
    for value, choices in ((scale or args.scale, SCALES), (platform or args.platform, PLATFORMS)):
        if value not in choices:
            expected = f"one of {', '.join(choices)}"
            raise ConfigError(Problem(where="DIFF", got=value, expected=expected, fix="write STAGE[/SCALE[/PLATFORM]]"))
    return load_config(config_path(find_stage(stage, where="DIFF"), scale or args.scale, platform or args.platform))


def render(loaded: LoadedConfig) -> Iterator[str]:
    """Yield the configuration as YAML with the source of each key, then derived numbers and refusals as comments."""
    yield f"# {' <- '.join(loaded.files)}"
    yield from yaml_lines(loaded.tree, lambda key: _source(loaded, key))
    yield ""
    yield "# Derived:"
    for name, value in asdict(derive(require_valid(loaded))).items():
        yield f"#   {name}: {value:,}"
    problems = [*unset(loaded), *refusals(loaded)]
    if problems:
        yield "# Before a launch with the native engine:"
        yield from (f"#   {problem}" for problem in problems)


def _source(loaded: LoadedConfig, key: str) -> str:
    """Return the file that set a key and, for a value made from others, those."""
    made_from = ", ".join(references(key, lookup(loaded.raw, key)))
    return loaded.sources.get(key, "") + (f", from {made_from}" if made_from else "")


if __name__ == "__main__":
    sys.exit(main())
