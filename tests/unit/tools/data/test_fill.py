"""Filling a blend from local data sets, and every wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from recipes.grpo.errors import DataError
from tools.data import fill as fill_module
from tools.data.fill import fill, main
from tools.data.sources import load_sources

PLAIN = b'{"b":1,  "a": "\\u00e9", "note": "no _hf_placeholder here"}\n'
ENTRY = {
    "path": "source",
    "split": "train",
    "style": "skywork",
    "question": ["prompt", 0, "content"],
    "answer": ["reward_model", "ground_truth"],
}


def record(question: str | None, answer: str | None) -> dict[str, Any]:
    return {"prompt": [{"content": question, "role": "user"}], "reward_model": {"ground_truth": answer}}


def placeholder(row: object, dataset: str = "math") -> bytes:
    reference = {"row": row, "question_template": "Solve: {question}"}
    return json.dumps({"dataset": dataset, "uuid": "u", "_hf_placeholder": reference}).encode() + b"\n"


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a source of 3 + 2 rows in two files, and the file that names it."""
    write_parquet(tmp_path / "source/data/train-00000-of-00002.parquet", [record(f"q{n}", str(n)) for n in range(3)])
    write_parquet(tmp_path / "source/data/train-00001-of-00002.parquet", [record("q3", "[3]"), record("q4", None)])
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump({"sources": {"math": ENTRY}}))
    return tmp_path


def run(place: Path, content: bytes) -> bytes:
    (place / "blend.jsonl").write_bytes(content)
    fill(place / "blend.jsonl", place / "out.jsonl", place / "sources.yaml")
    return (place / "out.jsonl").read_bytes()


def test_placeholders_are_filled_and_other_rows_pass_byte_for_byte(place: Path) -> None:
    lines = run(place, PLAIN + placeholder(3) + PLAIN + placeholder(1)).splitlines(keepends=True)
    assert lines[0] == lines[2] == PLAIN
    assert json.loads(lines[1]) == {
        "dataset": "math",
        "uuid": "u",
        "question": "q3",
        "expected_answer": "3",
        "responses_create_params": {"input": [{"role": "user", "content": "Solve: q3"}]},
    }
    assert json.loads(lines[3])["question"] == "q1"


def test_a_last_line_without_newline_passes(place: Path) -> None:
    assert run(place, PLAIN + PLAIN.rstrip(b"\n")) == PLAIN + PLAIN.rstrip(b"\n")


def test_a_jsonl_source_gives_the_same_rows(place: Path) -> None:
    (place / "rows.jsonl").write_text("".join(json.dumps(record(f"q{n}", str(n))) + "\n" for n in range(3)))
    by_parquet = run(place, placeholder(0) + placeholder(2))
    (place / "sources.yaml").write_text(yaml.safe_dump({"sources": {"math": ENTRY | {"path": "rows.jsonl"}}}))
    assert run(place, placeholder(0) + placeholder(2)) == by_parquet


def test_the_manifest_says_what_was_read_and_written(place: Path) -> None:
    run(place, PLAIN + placeholder(3))
    manifest = json.loads((place / "out.jsonl.manifest.json").read_text())
    assert manifest["counts"] == {"rows": 2, "filled": 1}
    assert [entry["file"] for entry in manifest["inputs"]] == [
        "blend.jsonl",
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert str(place) not in json.dumps(manifest)


def test_a_rerun_does_nothing_until_something_changes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(place, placeholder(0))
    before = (place / "out.jsonl").stat().st_mtime_ns
    run(place, placeholder(0))
    assert "up to date" in capsys.readouterr().out
    assert (place / "out.jsonl").stat().st_mtime_ns == before
    run(place, placeholder(1))
    assert "inputs changed" in capsys.readouterr().out
    (place / "out.jsonl").write_bytes(b"edited")
    run(place, placeholder(1))
    assert "out.jsonl was edited" in capsys.readouterr().out
    assert json.loads((place / "out.jsonl").read_bytes())["question"] == "q1"


WRONG_ROWS: list[tuple[bytes, str]] = [
    (PLAIN + placeholder(5), "blend.jsonl:2: got row 5 of math, which is not there"),
    (placeholder(4), "blend.jsonl:1: got row 4 of math"),
    (placeholder(0, "maths"), "blend.jsonl:1: got dataset maths, expected math; add it to --sources"),
    (placeholder("0"), "blend.jsonl:1: got _hf_placeholder {'row': '0'"),
    (placeholder(-1), "blend.jsonl:1: got _hf_placeholder {'row': -1"),
    (placeholder(True), "blend.jsonl:1: got _hf_placeholder {'row': True"),
    (b'{"_hf_placeholder": 3}\n', "blend.jsonl:1: got dataset None"),
    (PLAIN + b'{"_hf_placeholder": \n', "blend.jsonl:2: got no JSON"),
    (PLAIN + b"\n" + PLAIN, "blend.jsonl:2: got an empty line"),
    (placeholder(9) + placeholder(8), "2 rows that cannot be filled (2 x no source row)"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_ROWS, ids=[message[:40] for _, message in WRONG_ROWS])
def test_a_wrong_row_is_named_and_nothing_is_written(
    place: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "blend.jsonl").write_bytes(content)
    arguments = ["--in", str(place / "blend.jsonl"), "--out", str(place / "out.jsonl")]
    assert main([*arguments, "--sources", str(place / "sources.yaml")]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in place.iterdir()) == ["blend.jsonl", "source", "sources.yaml"]


WRONG_SOURCES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda entry: entry | {"style": "other"}, "sources.math.style: got 'other', expected dapo or skywork"),
    (lambda entry: entry | {"dataset": "a/b"}, "sources.math.path: got 'source', expected either"),
    (lambda entry: {**entry, "dataset": "a/b", "path": None}, "sources.math.path"),
    (lambda entry: entry | {"answer": "x"}, "sources.math.answer: got 'x', expected a list"),
    (lambda entry: entry | {"colour": 1}, "sources.math.colour: got 1, expected one of answer"),
    (
        lambda entry: {key: entry[key] for key in entry if key != "path"} | {"dataset": "a/b"},
        "math.revision: got nothing",
    ),
    (lambda entry: "source", "sources.math: got 'source', expected a mapping"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_SOURCES, ids=[message[:40] for _, message in WRONG_SOURCES])
def test_a_wrong_source_is_named(place: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    (place / "sources.yaml").write_text(yaml.safe_dump({"sources": {"math": change(ENTRY)}}))
    with pytest.raises(DataError) as caught:
        load_sources(place / "sources.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["[", "sources: 3", ""])
def test_a_file_that_names_no_sources_is_an_error(place: Path, content: str) -> None:
    (place / "sources.yaml").write_text(content)
    with pytest.raises(DataError, match=r"sources\.yaml"):
        load_sources(place / "sources.yaml")


def test_missing_files_are_named(place: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: got no such file"):
        fill(place / "nowhere.jsonl", place / "out.jsonl", place / "sources.yaml")
    (place / "sources.yaml").write_text(yaml.safe_dump({"sources": {"math": ENTRY | {"path": "gone"}}}))
    with pytest.raises(DataError, match="gone: got nothing there"):
        run(place, placeholder(0))
    (place / "sources.yaml").write_text(yaml.safe_dump({"sources": {"math": ENTRY | {"split": "test"}}}))
    (place / "source" / "data").rename(place / "source" / "other")
    with pytest.raises(DataError, match="parquet files of split test"):
        run(place, placeholder(0))


def test_the_published_sources_are_well_formed() -> None:
    sources = load_sources(fill_module.DEFAULT_SOURCES)
    assert {name: source.style for name, source in sources.items()} == {
        "super_v3_lcsft_step1000_dapo17k": "dapo",
        "super_v3_lcsft_step1000_skyworks": "skywork",
    }
