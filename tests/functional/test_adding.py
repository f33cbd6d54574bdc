"""A verifier is added as README.md says, word by word, to a copy of the repository, which then passes its tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
NAME = "palindrome"
PAGE = ROOT / "recipes" / "environments" / "verifiers" / "README.md"
STAGE = """\
defaults: tiny/stage1_rlvr.yaml
env:
  nemo_gym:
    config_paths: [environments/policy_model.yaml, environments/palindrome.yaml]
"""


def blocks_of(kind: str) -> list[str]:
    """Return the examples of one language on the page."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def add_verifier(root: Path) -> set[str]:
    """Write the two files as the page has them; return what README.md calls them."""
    [code], [instances] = blocks_of("python"), blocks_of("yaml")
    files = {
        root / "recipes" / "environments" / "verifiers" / f"{NAME}.py": code,
        root / "configs" / "environments" / f"{NAME}.yaml": instances,
    }
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return {str(file.relative_to(root)).replace(NAME, "NAME") for file in files}


def rows_file(path: Path) -> Path:
    """Write five rows that the verifier reads."""
    rows = [
        {
            "responses_create_params": {"input": f"Write a word of {letters} letters that reads the same backwards."},
            "agent_ref": {"type": "responses_api_agents", "name": f"{NAME}_simple_agent"},
            "letters": letters,
            "env_check": {"golden": "deed" if letters == 4 else "a" + "b" * (letters - 2) + "a"},
        }
        for letters in range(3, 8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_verifier_is_added_as_the_page_says(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    page = (tmp_path / "README.md").read_text(encoding="utf-8").partition("## Adding")[2].partition("A stage:")[0]
    named = {name for name in re.findall(r"`([\w/.]+)`", page) if "/" in name}
    assert add_verifier(tmp_path) == named
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*words: str, status: int = 0) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout if status == 0 else done.stderr

    make = ("make", "--silent", "-o", ".venv/.synced", f"PYTHON={sys.executable}")
    (tmp_path / "configs" / "mine.yaml").write_text(STAGE, encoding="utf-8")
    assert "run `make config-keys`" in run(*make, "config", "FILE=configs/mine.yaml", status=2)
    run(*make, "config-keys")
    shown = run(*make, "config", "FILE=configs/mine.yaml")
    assert re.search(rf"most_letters: 9 .*# configs/environments/{NAME}.yaml", shown), shown
    instances = tmp_path / "configs" / "environments" / f"{NAME}.yaml"
    instances.write_text(
        instances.read_text(encoding="utf-8").replace("\n      most_letters: 9", " {}"), encoding="utf-8"
    )
    shown = run(*make, "config", "FILE=configs/mine.yaml")
    assert re.search(rf"most_letters: 40 .*# recipes/environments/verifiers/{NAME}.py", shown), shown
    (tmp_path / "configs" / "mine.yaml").unlink()
    said = run(*make, "env-check", f"NAME={NAME}", f"DATA={rows_file(tmp_path / 'rows.jsonl')}")
    assert NAME in said and "0 failed" in said, said
    tests = (
        "config/test_servers.py",
        "config/test_keys.py",
        "config/test_docs.py",
        "environments/verifiers/test_verifier_contract.py",
    )
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/unit/{name}" for name in tests))
