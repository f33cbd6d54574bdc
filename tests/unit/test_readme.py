"""What the README and the folders' READMEs name exists, and a reader can take them in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("recipes/", "tools/", "configs/", "containers/", "tests/", "./", "../")
MAX_LINES = {
    "README.md": 140,
    "configs/README.md": 105,
    "recipes/environments/README.md": 160,
    "tools/environments/check/README.md": 90,
}
MAX_LINES_OF_A_FOLDER = 80


def readmes() -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*README.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in found.stdout.split()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("readme", readmes(), ids=name)
def test_every_path_that_is_named_exists(readme):
    text = readme.read_text(encoding="utf-8")
    named = [path for path in re.findall(r"`([\w./*-]+)`", text) if path.startswith(PLACES) and path[-1] != "."]
    missing = [path for path in named if "*" not in path and "NAME" not in path and not (ROOT / path).exists()]
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in link]
    missing += [link for link in links if not (readme.parent / link).exists()]
    assert not [path for path in missing if not path.startswith("../shared")]


@pytest.mark.parametrize("readme", readmes(), ids=name)
def test_a_readme_is_short(readme):
    assert readme.read_text(encoding="utf-8").count("\n") <= MAX_LINES.get(name(readme), MAX_LINES_OF_A_FOLDER)


def test_the_readme_leads_to_every_other():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name(path) for path in readmes() if path != ROOT / "README.md" and f"]({name(path)})" not in text]
