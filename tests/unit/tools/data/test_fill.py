"""Filling a blend from local data sets, and every wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from recipes.errors import DataError
from tools.data import fill as fill_module
from tools.data.files import parallel
from tools.data.fill import fill, main
from tools.data.sources import load_sources
from tools.locks import only_one

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
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump({"sources": {"math": ENTRY}}), encoding="utf-8")
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
    (place / "rows.jsonl").write_text(
        "".join(json.dumps(record(f"q{n}", str(n))) + "\n" for n in range(3)), encoding="utf-8"
    )
    by_parquet = run(place, placeholder(0) + placeholder(2))
    (place / "sources.yaml").write_text(
        yaml.safe_dump({"sources": {"math": ENTRY | {"path": "rows.jsonl"}}}), encoding="utf-8"
    )
    assert run(place, placeholder(0) + placeholder(2)) == by_parquet


def test_the_manifest_says_what_was_read_and_written(place: Path) -> None:
    run(place, PLAIN + placeholder(3))
    manifest = json.loads((place / "out.jsonl.manifest.json").read_text(encoding="utf-8"))
    assert manifest["counts"] == {"rows": 2, "filled": 1, "rejected": {}}
    assert manifest["questions"] == {"math": {"3": sha256(b"q3").hexdigest()}}
    written = (place / "out.jsonl").read_bytes()
    assert manifest["outputs"] == [
        {"file": "out.jsonl", "sha256": sha256(written).hexdigest(), "bytes": len(written), "rows": 2}
    ]
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
    assert "inputs changed: blend.jsonl.sha256 was " in capsys.readouterr().out
    (place / "out.jsonl").write_bytes(b"edited")
    run(place, placeholder(1))
    assert "out.jsonl was edited" in capsys.readouterr().out
    assert json.loads((place / "out.jsonl").read_bytes())["question"] == "q1"


WRONG_ROWS: list[tuple[bytes, str]] = [
    (PLAIN + placeholder(5), "blend.jsonl:2: got row 5 of math, which is absent"),
    (placeholder(4), "blend.jsonl:1: got row 4 of math"),
    (placeholder(0, "maths"), "blend.jsonl:1: got dataset maths, expected math; add it to --sources"),
    (placeholder("0"), "blend.jsonl:1: got _hf_placeholder {'row': '0'"),
    (placeholder(-1), "blend.jsonl:1: got _hf_placeholder {'row': -1"),
    (placeholder(10**30), "blend.jsonl:1: got _hf_placeholder {'row': 1000"),
    (b'{"_hf_placeholder": ' + b"[" * 100_000 + b"\n", "blend.jsonl:1: got no JSON"),
    (placeholder(True), "blend.jsonl:1: got _hf_placeholder {'row': True"),
    (b'{"_hf_placeholder": 3}\n', "blend.jsonl:1: got dataset None"),
    (PLAIN + b'{"_hf_placeholder": \n', "blend.jsonl:2: got no JSON"),
    (PLAIN + b"\n" + PLAIN, "blend.jsonl:2: the line is empty"),
    (placeholder(9) + placeholder(8), "2 rows cannot be filled (2 x no source row)"),
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


def test_unfilled_rows_are_left_out_on_request_with_their_cause(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [placeholder(9), b'{"_hf_placeholder": \n', placeholder(0, "maths"), placeholder(4)]
    (place / "blend.jsonl").write_bytes(PLAIN + wrong[0] + placeholder(1) + b"".join(wrong[1:]))
    arguments = ["--in", str(place / "blend.jsonl"), "--out", str(place / "out.jsonl")]
    arguments += ["--sources", str(place / "sources.yaml"), "--allow-unfilled"]
    assert main(arguments) == 0
    summary = "4 rows cannot be filled (1 x no JSON, 2 x no source row, 1 x unknown data set)"
    assert summary in capsys.readouterr().out
    kept = (place / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert kept[0] == PLAIN
    assert json.loads(kept[1])["question"] == "q1"
    assert len(kept) == 2
    rejected = [json.loads(line) for line in (place / "out.rejected.jsonl").read_bytes().splitlines()]
    assert [(entry["line"], entry["cause"]) for entry in rejected] == [
        (2, "no source row"),
        (4, "no JSON"),
        (5, "unknown data set"),
        (6, "no source row"),
    ]
    assert [entry["row"].encode() for entry in rejected] == wrong
    manifest = json.loads((place / "out.jsonl.manifest.json").read_text(encoding="utf-8"))
    causes = {"no JSON": 1, "no source row": 2, "unknown data set": 1}
    assert manifest["counts"] == {"rows": 6, "filled": 1, "rejected": causes}
    assert [(output["file"], output["rows"]) for output in manifest["outputs"]] == [
        ("out.jsonl", 2),
        ("out.rejected.jsonl", 4),
    ]
    assert main(arguments) == 0
    assert "up to date" in capsys.readouterr().out
    assert main(arguments[:-1]) == 2  # without the option the same blend is refused, and the old outputs stay
    assert "leave them out with --allow-unfilled" in capsys.readouterr().err
    assert (place / "out.jsonl").read_bytes().splitlines(keepends=True) == kept
    (place / "blend.jsonl").write_bytes(PLAIN)
    assert main(arguments) == 0
    assert not (place / "out.rejected.jsonl").exists()


@pytest.mark.parametrize(("block", "workers"), [(1, "1"), (60, "1"), (300, "1"), (300, "2")])
@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_blocks_of_any_size_give_the_same_result(
    place: Path, monkeypatch: pytest.MonkeyPatch, block: int, workers: str, ending: bytes
) -> None:
    content = b"".join(PLAIN + placeholder(n % 4) + placeholder(7) for n in range(20)) + PLAIN.rstrip() + ending
    (place / "blend.jsonl").write_bytes(content)

    def result(name: str) -> list[bytes]:
        fill(place / "blend.jsonl", place / name / "f.jsonl", place / "sources.yaml", allow_unfilled=True)
        names = ("f.jsonl", "f.rejected.jsonl", "f.jsonl.manifest.json")
        assert sorted(path.name for path in (place / name).iterdir()) == sorted(names)
        return [(place / name / file).read_bytes() for file in names]

    whole = result("whole")
    monkeypatch.setattr(parallel, "BLOCK", block)
    monkeypatch.setenv("DATA_WORKERS", workers)
    assert result("blocks") == whole


def test_a_second_fill_at_the_same_time_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "blend.jsonl").write_bytes(placeholder(1))
    arguments = ["--in", str(place / "blend.jsonl"), "--out", str(place / "out.jsonl")]
    with only_one(place / ".out.jsonl.lock"):
        assert main([*arguments, "--sources", str(place / "sources.yaml")]) == 2
    assert ".out.jsonl.lock: another process holds this lock" in capsys.readouterr().err
    assert not (place / "out.jsonl").exists()


WRONG_SOURCES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda entry: entry | {"style": "other"}, "sources.math.style: got 'other', expected dapo or skywork"),
    (lambda entry: entry | {"dataset": "a/b"}, "sources.math.path: got 'source', expected either"),
    (lambda entry: {**entry, "dataset": "a/b", "path": None}, "sources.math.path"),
    (lambda entry: entry | {"answer": "x"}, "sources.math.answer: got 'x', expected a list"),
    (lambda entry: entry | {"colour": 1}, "sources.math.colour: got 1, expected one of answer"),
    (
        lambda entry: {key: entry[key] for key in entry if key != "path"} | {"dataset": "a/b"},
        "math.revision: this key is missing",
    ),
    (lambda entry: "source", "sources.math: got 'source', expected a mapping"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_SOURCES, ids=[message[:40] for _, message in WRONG_SOURCES])
def test_a_wrong_source_is_named(place: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    (place / "sources.yaml").write_text(yaml.safe_dump({"sources": {"math": change(ENTRY)}}), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_sources(place / "sources.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["[", "sources: 3", ""])
def test_a_file_that_names_no_sources_is_an_error(place: Path, content: str) -> None:
    (place / "sources.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"sources\.yaml"):
        load_sources(place / "sources.yaml")


def test_missing_files_are_named(place: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: there is no such file"):
        fill(place / "nowhere.jsonl", place / "out.jsonl", place / "sources.yaml")
    (place / "sources.yaml").write_text(
        yaml.safe_dump({"sources": {"math": ENTRY | {"path": "gone"}}}), encoding="utf-8"
    )
    with pytest.raises(DataError, match="gone: there is no such file or directory"):
        run(place, placeholder(0))
    (place / "sources.yaml").write_text(
        yaml.safe_dump({"sources": {"math": ENTRY | {"split": "test"}}}), encoding="utf-8"
    )
    (place / "source" / "data").rename(place / "source" / "other")
    with pytest.raises(DataError, match="parquet files of split test"):
        run(place, placeholder(0))


def test_the_published_sources_are_well_formed() -> None:
    sources = load_sources(fill_module.DEFAULT_SOURCES)
    assert {name: source.style for name, source in sources.items()} == {
        "super_v3_lcsft_step1000_dapo17k": "dapo",
        "super_v3_lcsft_step1000_skyworks": "skywork",
    }
