"""What differs between two configurations, and the golden files: what each stage's differs from the base by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.config.keys.derive import derive
from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.load import BASE, LoadedConfig, load_config, require_valid
from recipes.config.stages import config_path, load_stages
from recipes.config.text import scalar, yaml_lines
from recipes.config.yaml_files import leaves, read_yaml
from tools.nemo_rl.export import export, rules

GOLDEN = CONFIG_DIR.parent / "tests" / "golden" / "config"
ABSENT = "(absent)"


def render_difference(loaded: LoadedConfig, other: LoadedConfig, name: str) -> Iterator[str]:
    """Yield one line per key that differs: its value here, its value in `other` and the file that set each."""
    yield f"# {loaded.files[-1]}, and after '{name}' what {other.files[-1]} has"
    own, theirs = leaves(loaded.tree), leaves(other.tree)
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
    files = {GOLDEN / path.relative_to(CONFIG_DIR): _golden(load_config(path), base) for path in overlays}
    stages = {config_path(stage, "prod", "h100") for stage in load_stages()}
    return files | {GOLDEN / "nemo_rl" / path.relative_to(CONFIG_DIR): _golden_export(path) for path in sorted(stages)}


def _golden(loaded: LoadedConfig, base: dict[str, Any]) -> str:
    own = leaves(loaded.tree)
    lines = [
        "# What this file resolves to where grpo_base.yaml does not: python -m tools.config.show --update-golden",
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
        f"# {path.name} for NeMo RL {rules()['version']}: python -m tools.config.show --update-golden",
        *yaml_lines(exported.tree),
        "",
        *(f"# {note.where.rpartition(': ')[2]}: {note.what.partition('): ')[2] or note.fix}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


def update_golden() -> list[Path]:
    """Write every golden file and delete those of no stage; return the ones that changed."""
    files = golden_files()
    stale = [path for path in sorted(GOLDEN.rglob("*.yaml")) if path not in files]
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path])
    for path in stale:
        path.unlink()
    return changed + stale
