"""One name, one concept: no two classes of one name in recipes and tools."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for package in ("recipes", "tools") for path in (ROOT / package).rglob("*.py"))
OF_EVERY_VERIFIER = {"Settings", "Task"}  # each verifier's own, in its own file


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    for name in OF_EVERY_VERIFIER & shared.keys():
        shared[name] = [place for place in shared[name] if "/verifiers/" not in place]
    assert {name: found for name, found in shared.items() if found} == {}
