"""The split, byte for byte what head and tail give; kills; reruns; wrong inputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from recipes.grpo.errors import DataError
from tools.data.files import atomic_writer
from tools.data.split import main, split


def rows(count: int, *, ending: bytes = b"\n") -> bytes:
    return b"\n".join(b'{"n": %d}' % n for n in range(count)) + ending


@pytest.mark.parametrize("ending", [b"\n", b""])
@pytest.mark.parametrize(("count", "val_rows"), [(2, 1), (10, 3), (101, 100), (1000, 100)])
def test_splits_are_what_head_and_tail_give(tmp_path: Path, count: int, val_rows: int, ending: bytes) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(rows(count, ending=ending))
    split(source, tmp_path / "out", val_rows=val_rows)
    for name, command in (("train", ["head", "-n", f"-{val_rows}"]), ("val", ["tail", "-n", str(val_rows)])):
        expected = subprocess.run([*command, str(source)], capture_output=True, check=True).stdout
        assert (tmp_path / "out" / f"{name}-split.jsonl").read_bytes() == expected


def test_the_manifest_counts_and_hashes(tmp_path: Path) -> None:
    content = rows(5)
    (tmp_path / "rows.jsonl").write_bytes(content)
    (tmp_path / "rows.jsonl.manifest.json").write_text('{"tool": "fill"}')
    split(tmp_path / "rows.jsonl", tmp_path / "out", val_rows=2)
    text = (tmp_path / "out" / "manifest.json").read_text()
    lines = content.splitlines(keepends=True)
    train, val = b"".join(lines[:3]), b"".join(lines[3:])
    assert json.loads(text) == {
        "tool": "split",
        "tool_version": "1",
        "inputs": [
            {
                "file": "rows.jsonl",
                "bytes": len(content),
                "sha256": sha256(content).hexdigest(),
                "made_by": {"tool": "fill"},
            }
        ],
        "parameters": {"val_rows": 2, "validation": "last rows"},
        "outputs": [
            {"file": "train-split.jsonl", "bytes": len(train), "sha256": sha256(train).hexdigest(), "rows": 3},
            {"file": "val-split.jsonl", "bytes": len(val), "sha256": sha256(val).hexdigest(), "rows": 2},
        ],
    }
    assert str(tmp_path) not in text


def test_a_rerun_does_nothing_until_something_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, train = tmp_path / "rows.jsonl", tmp_path / "out" / "train-split.jsonl"
    source.write_bytes(rows(9))
    split(source, tmp_path / "out", val_rows=2)
    before = train.stat().st_mtime_ns
    split(source, tmp_path / "out", val_rows=2)
    assert "up to date" in capsys.readouterr().out
    assert train.stat().st_mtime_ns == before
    for change, reason in (
        (lambda: train.unlink(), "train-split.jsonl is missing"),
        (lambda: train.write_bytes(b"x"), "train-split.jsonl was edited"),
        (lambda: (tmp_path / "out" / "manifest.json").unlink(), "no manifest"),
        (lambda: source.write_bytes(rows(8)), "inputs changed"),
    ):
        change()
        split(source, tmp_path / "out", val_rows=2)
        assert reason in capsys.readouterr().out
    assert train.read_bytes() == rows(6)


@pytest.mark.parametrize(
    ("content", "val_rows", "message"),
    [
        (rows(3), 3, "got 3 rows, expected more than the 3"),
        (rows(1), 100, "got 1 rows, expected more than the 100"),
        (b"", 1, "got 0 rows"),
        (rows(3), 0, "--val-rows: got 0, expected 1 or more"),
        (b"{}\n\n{}\n", 1, "rows.jsonl:2: got an empty line"),
        (None, 1, "rows.jsonl: got no such file"),
    ],
)
def test_wrong_inputs_are_named_and_nothing_is_written(
    tmp_path: Path, content: bytes | None, val_rows: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.jsonl"
    if content is not None:
        source.write_bytes(content)
    assert main(["--in", str(source), "--out-dir", str(tmp_path / "out"), "--val-rows", str(val_rows)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(DataError), atomic_writer(target) as file:
        file.write(b"new")
        raise DataError([])
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from tools.data.files import atomic_writer
with atomic_writer(Path(sys.argv[1])) as file:
    file.write(b"new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_the_old_file_and_the_next_run_completes(tmp_path: Path) -> None:
    source, train = tmp_path / "rows.jsonl", tmp_path / "out" / "train-split.jsonl"
    source.write_bytes(rows(9))
    split(source, tmp_path / "out", val_rows=2)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])}
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(train)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert train.read_bytes() == rows(7)
    source.write_bytes(rows(5))
    split(source, tmp_path / "out", val_rows=2)
    assert train.read_bytes() == rows(3)
    assert sorted(path.name for path in train.parent.iterdir()) == [
        "manifest.json",
        "train-split.jsonl",
        "val-split.jsonl",
    ]
