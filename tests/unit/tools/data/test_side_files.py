"""The table of side files: what is committed is what the verifiers' tests read, and wrong entries are named."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.errors import DataError
from tools.data.side_files import SIDE_FILES, load_side_files, main

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ENTRY: dict[str, Any] = {
    "blends": ["rlvr1"],
    "repository": "org/gym",
    "revision": COMMIT,
    "path": "tables",
    "files": {"a.csv": {"bytes": 3, "sha256": "0" * 64}},
}


def test_the_office_tables_are_those_that_rewards_depend_on(gym_examples_dir: Path) -> None:
    side = load_side_files(SIDE_FILES)["workplace_assistant"]
    tables = {path.name: path.read_bytes() for path in (gym_examples_dir / "workplace_assistant").glob("*.csv")}
    assert {Path(file.name).name: (file.size, file.sha256) for file in side.files} == {
        name: (len(content), sha256(content).hexdigest()) for name, content in tables.items()
    }
    assert side.files[0].url == (
        "https://raw.githubusercontent.com/NVIDIA-NeMo/Gym/07d6b0d07b22fcf530b4c211dae2ee23100428e4"
        "/resources_servers/workplace_assistant/csv_data/processed/analytics_data.csv"
    )


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda entry: entry | {"revision": "main"}, "side_files.x.revision: got 'main', expected a commit"),
    (lambda entry: {key: entry[key] for key in entry if key != "path"}, "side_files.x: got blends, files, repository"),
    (lambda entry: entry | {"files": {"a.csv": {"bytes": 3}}}, "side_files.x.files.a.csv: got {'bytes': 3}"),
    (lambda entry: entry | {"files": {"../a.csv": ENTRY["files"]["a.csv"]}}, "x.files: got ../a.csv, expected"),
    (lambda entry: "text", "got 'text', expected blends, files, path, repository, revision"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_a_wrong_entry_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    (tmp_path / "side.yaml").write_text(yaml.safe_dump({"side_files": {"x": change(dict(ENTRY))}}), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_side_files(tmp_path / "side.yaml")
    assert message in str(caught.value)


def test_an_unknown_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--name", "office"]) == 2
    assert "--name: got office, expected one of workplace_assistant" in capsys.readouterr().err
