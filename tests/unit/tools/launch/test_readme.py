"""The README of the launcher says what the contract says, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.dev.readme_tables import main, replaced, variables
from tools.draft.contract import OPTIONAL, required

ROOT = Path(__file__).resolve().parents[4]
READMES = [ROOT / "tools" / folder / "README.md" for folder in ("launch", "job", "doctor", "look")]


def test_the_tables_are_those_of_the_contract_and_of_the_ports():
    for path, name in ((READMES[0], "variables"), (READMES[1], "ports")):
        readme = path.read_text(encoding="utf-8")
        assert f"<!-- {name}: end -->" in readme
        assert replaced(readme) == readme, f"run: python -m tools.dev.readme_tables --write {path}"
    for name in (*required("slurm", "pyxis"), *OPTIONAL):
        assert f"| `{name}` |" in variables()


def test_writing_the_tables_changes_nothing_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- variables: begin -->\nold\n<!-- variables: end -->\nafter\n", encoding="utf-8")
    assert main(["--write", str(readme)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text and "`MODEL_PATH`" in text


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_a_readme_is_short_and_what_it_names_exists(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 80
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / link).exists(), link
    for name in re.findall(r"`(tools/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
