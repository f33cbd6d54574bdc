"""Print a resolved configuration: every key, the file that set it, and the numbers that follow from them.

    python -m tools.show_config --stage stage1.1 --scale tiny [key=value ...]
    python -m tools.show_config --stage stage2.1 --diff stage1.1            only what differs from another stage
    python -m tools.show_config --stage stage1.1 --diff stage1.1/small      or from another scale, or platform
    python -m tools.show_config --file configs/tiny/stage1_rlvr.yaml grpo.seed=43
    python -m tools.show_config --stage stage2.2 --engine nemo_rl           in the form of NeMo RL's own entrypoint
    python -m tools.show_config --update-golden

Exit status: 0 valid, 2 when something is wrong (every problem is printed). What the native engine does not honour
yet is printed as a comment, and on standard error what the other engine has no key for: it stops a launch, not this.

What differs between two configurations, and the golden files: what each stage's differs from the base by.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.config.keys.derive import RESOURCES, derive, servers
from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import (
    BASE,
    PLATFORMS,
    SCALES,
    LoadedConfig,
    config_path,
    find_stage,
    load_config,
    load_stages,
    refusals,
    require_valid,
    unset,
    with_defaults,
)
from recipes.config.merge import leaves, read_yaml, references, scalar, yaml_lines
from recipes.config.tree import Config
from recipes.errors import ConfigError, Problem
from tools.command_line import exit_status
from tools.draft.contract import OPTIONAL
from tools.draft.nemo_rl.export import export, render_export, rules

GOLDEN = CONFIG_DIR.parent / "tests" / "golden" / "config"
ABSENT = "(absent)"


def render_difference(loaded: LoadedConfig, other: LoadedConfig, name: str) -> Iterator[str]:
    """Yield one line per key that differs: its value here, its value in `other` and the file that set each."""
    yield f"# {loaded.files[-1]}, and after '{name}' what {other.files[-1]} has"
    own, theirs = leaves(loaded.tree), leaves(other.tree)
    if own == theirs:
        yield "# no difference"
        return
    for key in dict.fromkeys([*own, *theirs]):
        if own.get(key, ABSENT) != theirs.get(key, ABSENT):
            here = scalar(own[key]) if key in own else ABSENT
            there = scalar(theirs[key]) if key in theirs else ABSENT
            source = loaded.sources.get(key) or other.sources.get(key, "")
            yield f"{key}: {here}  # {name}: {there}  ({source})"
    yield "# Derived:"
    sizes, others = asdict(derive(require_valid(loaded))), asdict(derive(require_valid(other)))
    yield from (f"#   {key}: {sizes[key]:,}  # {name}: {others[key]:,}" for key in sizes if sizes[key] != others[key])


def golden_files() -> dict[Path, str]:
    """Return the content of every golden file: one per configuration that has a parent, and each stage's export."""
    overlays = [
        path for path in sorted(CONFIG_DIR.rglob("*.yaml")) if "defaults" in read_yaml(path, name=path.name).data
    ]
    base = leaves(load_config(BASE).tree)
    files = {
        GOLDEN / path.relative_to(CONFIG_DIR): _golden(with_defaults(load_config(path)), base) for path in overlays
    }
    stages = {config_path(stage, "prod", "h100") for stage in load_stages() if stage.configs["prod"]}
    return files | {GOLDEN / "nemo_rl" / path.relative_to(CONFIG_DIR): _golden_export(path) for path in sorted(stages)}


def _golden(loaded: LoadedConfig, base: dict[str, Any]) -> str:
    own = leaves(with_defaults(loaded).tree)
    lines = [
        "# What this file resolves to where grpo_base.yaml does not: make config-golden",
        *(f"{key}: {scalar(own[key])}" for key in sorted(own) if own[key] != base.get(key, ABSENT)),
        *(f"{key}: {ABSENT}" for key in sorted(set(base) - set(own))),
        "",
        "derived:",
        *(f"  {key}: {value}" for key, value in asdict(derive(require_valid(loaded))).items()),
    ]
    return "\n".join(lines) + "\n"


def _golden_export(path: Path) -> str:
    """Return a stage in the form of NeMo RL, without the sources of its values, and the keys that are not the same."""
    exported = export(load_config(path))
    notes = [*exported.notes, *exported.problems]
    lines = [
        f"# {path.name} for NeMo RL {rules()['version']}: make config-golden",
        *yaml_lines(exported.tree),
        "",
        *(f"# {note.where.rpartition(': ')[2]}: {note.what.partition('): ')[2] or note.fix}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


def update_golden() -> list[Path]:
    """Write every golden file and delete those of no stage; return the ones that changed."""
    files = golden_files()
    stale = [path for path in sorted(GOLDEN.rglob("*.yaml")) if path not in files]
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    for path in stale:
        path.unlink()
    return changed + stale


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
        yield from render_difference(with_defaults(loaded), with_defaults(other_configuration(args)), args.diff)
    elif args.engine == "native":
        yield from render(with_defaults(loaded))
    else:
        exported = export(loaded, Path(os.environ.get("NEMO_RL_DIR") or OPTIONAL["NEMO_RL_DIR"].default))
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
    config = require_valid(loaded)
    for name, value in asdict(derive(config)).items():
        yield f"#   {name}: {value:,}"
    yield from _read_by_verifiers(config)
    problems = [*unset(loaded), *refusals(loaded)]
    if problems:
        yield "# Before a launch with the native engine:"
        yield from (f"#   {problem}" for problem in problems)


def _read_by_verifiers(config: Config) -> Iterator[str]:
    """Yield, as comments, the texts that verifiers ask their judges with and the files that they read."""
    if not any(True for _ in servers(config, RESOURCES)):
        return
    from recipes.environments.instances import judge_texts_of, named_files_of  # every verifier

    if texts := judge_texts_of(config.env.nemo_gym.instances, config.env.judge_texts):
        yield "# Judges are asked in these words:"
        for text in texts:
            yield f"#   {text.name}: {text.sha256[:12] or text.problem or 'no hash'}  {text.source}"
    if files := named_files_of(config.env.nemo_gym.instances):
        yield "# Verifiers read these files:"
        for file in files:
            yield f"#   {file.name}: {file.sha256[:12] or file.problem or 'not there yet'}  {file.path}"


def _source(loaded: LoadedConfig, key: str) -> str:
    """Return the file that set a key and, for a value made from others, those."""
    made_from = ", ".join(references(key, lookup(loaded.raw, key)))
    return loaded.sources.get(key, "") + (f", from {made_from}" if made_from else "")


if __name__ == "__main__":
    sys.exit(main())
