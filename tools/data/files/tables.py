"""Tables of configs/data: YAML files with one key at the top and below it one entry per name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem


def read_yaml_table(path: Path, key: str, *, like: str) -> dict[str, Any]:
    """Return the entries below `key:` by name; raises `DataError`, which names the file `like` as an example."""
    import yaml

    fix = f"name another file, or write it like {like}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        wrong = f"it cannot be read as YAML: {str(error).splitlines()[0]}"
        raise DataError(Problem(where=str(path), wrong=wrong, fix=fix)) from error
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not entries or not all(isinstance(name, str) for name in entries):
        wrong = f"it has no `{key}:` with one entry per name"
        raise DataError(Problem(where=str(path), wrong=wrong, fix=fix))
    if len(content) > 1:
        others = ", ".join(sorted(str(name) for name in content if name != key))
        raise DataError(Problem(where=str(path), wrong=f"beside `{key}:` it has {others}", fix="remove the other keys"))
    return entries
