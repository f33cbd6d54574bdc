"""The split, byte for byte what head and tail give; kills; reruns; wrong inputs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from recipes.errors import DataError
from recipes.files import atomic_writer
from tools.data.files import row_blocks
from tools.data.files.row_blocks import NO_AGENT, FileTotals, read_blocks, start_of_last_lines
from tools.data.prepare import main as prepare
from tools.data.split import compare, main, share_out, split
from tools.locks import only_one


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
    (tmp_path / "rows.jsonl.manifest.json").write_text('{"tool": "fill"}', encoding="utf-8")
    split(tmp_path / "rows.jsonl", tmp_path / "out", val_rows=2)
    text = (tmp_path / "out" / "manifest.json").read_text(encoding="utf-8")
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
        "agents": {"train": {"(no agent)": 3}, "validation": {"(no agent)": 2}},
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
        (
            lambda: source.write_bytes(rows(8)),
            f"inputs changed: rows.jsonl.bytes was {len(rows(9))}, is {len(rows(8))})",
        ),
        (lambda: source.write_bytes(rows(8).replace(b"0", b"9")), "(inputs changed: rows.jsonl.sha256 was "),
    ):
        change()
        split(source, tmp_path / "out", val_rows=2)
        said = capsys.readouterr().out
        assert reason in said and "; " not in said
    assert train.read_bytes() == rows(6).replace(b"0", b"9")


def test_every_reason_for_a_new_split_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(rows(9))
    split(source, tmp_path / "out", val_rows=2)
    for name in ("train-split.jsonl", "val-split.jsonl"):
        (tmp_path / "out" / name).unlink()
    split(source, tmp_path / "out", val_rows=2)
    assert "(train-split.jsonl is missing, val-split.jsonl is missing): 7 rows to train on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "val_rows", "message"),
    [
        (rows(3), 3, "rows.jsonl: got 3 rows, expected more than the 3 rows for validation; lower --val-rows\n"),
        (rows(1), 100, "got 1 rows, expected more than the 100"),
        (b"", 1, "got 0 rows"),
        (b"{}\n\n{}\n", 1, "rows.jsonl:2: the line is empty"),
        (b"\n{}\n{}\n", 1, "rows.jsonl:1: the line is empty"),
        (b"{}\n{}\n \t\n", 1, "rows.jsonl:3: the line is empty"),
        (b"{}\n{}\n ", 1, "rows.jsonl:3: the line is empty"),
        (gzip.compress(rows(300)), 1, r"rows.jsonl:1: got a line that begins with b'\x1f\x8b"),
        (b"\xef\xbb\xbf" + rows(3), 1, r"rows.jsonl:1: got a line that begins with b'\xef\xbb\xbf{'"),
        (b"[1]\n[2]\n", 1, "rows.jsonl:1: got a line that begins with b'[1]"),
        (rows(4)[:-1] + b"\0\0\n", 1, "rows.jsonl:4: the line holds a NUL byte"),
        (b'{"a": "\0"}\n' + rows(4), 1, "rows.jsonl:1: the line holds a NUL byte"),
        (rows(2) + '{"a": "\u00e9"}\n'.encode("latin-1") + rows(2), 1, "rows.jsonl:3: the line is invalid UTF-8"),
        (None, 1, "rows.jsonl: there is no such file; give --in the filled blend\n"),
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


def test_text_of_many_bytes_per_character_is_valid_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "".join(f'{{"n": {n}, "text": "{"é水😀" * n}"}}\n' for n in range(60)).encode()
    (tmp_path / "rows.jsonl").write_bytes(content)
    for size in (64, 65, 66, 67):
        monkeypatch.setattr(row_blocks, "BLOCK", size)
        out = tmp_path / f"out{size}"
        split(tmp_path / "rows.jsonl", out, val_rows=7)
        assert (out / "train-split.jsonl").read_bytes() + (out / "val-split.jsonl").read_bytes() == content


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", ""])
def test_a_hold_out_of_no_rows_is_refused_before_anything_is_read(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (main, prepare):
        with pytest.raises(SystemExit, match="2"):
            command([f"--val-rows={value}"])
        assert f"--val-rows: got {value!r}, expected a whole number, 1 or more" in capsys.readouterr().err


def test_a_second_split_at_the_same_time_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_bytes(rows(9))
    arguments = ["--in", str(tmp_path / "rows.jsonl"), "--out-dir", str(tmp_path / "out"), "--val-rows", "2"]
    with only_one(tmp_path / "out" / ".split.lock"):
        assert main(arguments) == 2
        assert ".split.lock: another process holds this lock" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".split.lock"]
    assert not (tmp_path / "out").exists()  # nothing was made in it
    assert main(arguments) == 0


LIMITED = """
import resource, sys
from tools.data.split import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_takes_no_more_leaves_the_old_splits(tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_bytes(rows(9))
    split(source, out, val_rows=2)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    source.write_bytes(rows(2000))
    found = [str(Path(__file__).resolve().parents[4]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
    command = [sys.executable, "-c", LIMITED, "--in", str(source), "--out-dir", str(out), "--val-rows", "2"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "split: File too large; raise the limit of file sizes (ulimit -f), or name another place"
    ]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


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
from recipes.files import atomic_writer
with atomic_writer(Path(sys.argv[1])) as file:
    file.write(b"new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_the_old_file_and_the_next_run_completes(tmp_path: Path) -> None:
    source, train = tmp_path / "rows.jsonl", tmp_path / "out" / "train-split.jsonl"
    source.write_bytes(rows(9))
    split(source, tmp_path / "out", val_rows=2)
    found = [str(Path(__file__).resolve().parents[4]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
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


@pytest.mark.parametrize("block", [2, 7, 64, 1000])
@pytest.mark.parametrize("ending", [b"\n", b""])
def test_blocks_of_any_size_are_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, ending: bytes
) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK", block)
    content = rows(40, ending=ending)
    (tmp_path / "rows").write_bytes(content)
    lines = content.splitlines(keepends=True)
    for count in (1, 5, 39):
        cut = start_of_last_lines(tmp_path / "rows", count)
        assert cut == len(b"".join(lines[:-count]))
        found = read_blocks(tmp_path / "rows", cuts=[cut], num_buffers=1)
        parts = [(bytes(block), num_lines, part) for block, num_lines, part in found]
        assert b"".join(block for block, _, part in parts if part == 0) == content[:cut]
        assert b"".join(part for part, _, _ in parts) == content
        assert all(part.endswith(b"\n") for part, _, _ in parts[:-1])
        assert [num_lines for _, num_lines, _ in parts] == [len(part.splitlines()) for part, _, _ in parts]
    assert start_of_last_lines(tmp_path / "rows", 40) is None
    split(tmp_path / "rows", tmp_path / "out", val_rows=5)
    assert (tmp_path / "out" / "train-split.jsonl").read_bytes() == b"".join(lines[:-5])
    split(tmp_path / "rows", tmp_path / "out", val_rows=5, test_rows=3)
    held_out = {name: (tmp_path / "out" / f"{name}-split.jsonl").read_bytes() for name in ("train", "test", "val")}
    assert held_out == {
        "train": b"".join(lines[:-8]),
        "test": b"".join(lines[-8:-5]),
        "val": b"".join(lines[-5:]),  # the same as without rows to test on
    }
    split(tmp_path / "rows", tmp_path / "out", val_rows=5)
    assert not (tmp_path / "out" / "test-split.jsonl").exists(), "its rows are for training again"


def agent_rows(names: str) -> bytes:
    return b"".join(
        json.dumps({"text": '"agent_ref": {"name": "no"}', "n": n, "agent_ref": {"type": "t", "name": name}}).encode()
        + b"\n"
        for n, name in enumerate(names)
    )


def test_agents_are_counted_without_parsing() -> None:
    content = FileTotals()
    content.count(agent_rows("aabac") + b'{"n": 1}\n{}', 7)
    assert content.rows_by_agent() == {"a": 3, "b": 1, "c": 1, NO_AGENT: 2}
    assert content.rows == 7


def test_a_stratified_split_takes_the_last_rows_of_each_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "b" * 5 + "a" * 15  # sorted, as the blends are: the last rows are all of one agent
    content = agent_rows(names)
    lines = content.splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_bytes(content)
    arguments = ["--in", str(tmp_path / "rows.jsonl"), "--out-dir", str(tmp_path / "out"), "--val-rows", "4"]
    assert main(arguments) == 0
    assert " b 5 31.2% 0 0.0% -31.2 not in validation" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--stratify", "agent"]) == 0
    assert "parameters changed" in capsys.readouterr().out
    held_out = [4, 17, 18, 19]
    assert (tmp_path / "out/val-split.jsonl").read_bytes() == b"".join(lines[n] for n in held_out)
    train = b"".join(line for n, line in enumerate(lines) if n not in held_out)
    assert (tmp_path / "out/train-split.jsonl").read_bytes() == train
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    assert manifest["agents"] == {"train": {"a": 12, "b": 4}, "validation": {"a": 3, "b": 1}}
    assert [output["sha256"] for output in manifest["outputs"]] == [
        sha256(train).hexdigest(),
        sha256(b"".join(lines[n] for n in held_out)).hexdigest(),
    ]
    assert manifest["inputs"][0]["sha256"] == sha256(content).hexdigest()
    assert main([*arguments, "--stratify", "agent"]) == 0
    assert "up to date" in capsys.readouterr().out


def test_a_row_without_agent_cannot_be_stratified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_bytes(agent_rows("ab") + b"{}\n")
    arguments = ["--in", str(tmp_path / "rows.jsonl"), "--out-dir", str(tmp_path / "out"), "--val-rows", "1"]
    assert main([*arguments, "--stratify", "agent"]) == 2
    assert "rows.jsonl:3: the row has no readable agent_ref.name (KeyError: 'agent_ref')" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("total", "counts", "expected"),
    [
        (4, {"a": 15, "b": 5}, {"a": 3, "b": 1}),
        (10, {"a": 500, "b": 300, "c": 200}, {"a": 5, "b": 3, "c": 2}),
        (3, {"a": 10, "b": 10}, {"a": 2, "b": 1}),  # 1.5 each: the name decides
        (3, {"a": 5, "b": 3, "c": 2}, {"a": 1, "b": 1, "c": 1}),  # 1.5, 0.9 and 0.6: the largest remainders first
        (1, {"b": 4, "c": 5, "a": 4}, {"a": 0, "b": 0, "c": 1}),  # the largest remainder is neither first nor last
        (1, {"b": 2, "a": 2}, {"a": 1, "b": 0}),  # equal: the name decides, not the order in the file
        (5, {"a": 6, "b": 13}, {"a": 2, "b": 3}),  # 1.58 and 3.42
        (2, {"b": 3, "a": 1}, {"a": 0, "b": 2}),  # the same, where the name would prefer the only row
        (2, {"a": 3, "b": 1}, {"a": 2, "b": 0}),  # 1.5 and 0.5, but b keeps its only row
        (3, {"a": 2, "b": 2}, {"a": 2, "b": 1}),  # nobody can keep a row for ever
    ],
)
def test_shares_are_proportional(total: int, counts: dict[str, int], expected: dict[str, int]) -> None:
    assert share_out(total, counts) == expected


def test_the_comparison_names_what_is_missing() -> None:
    table = compare({"a": 3, "b": 1}, {"a": 1, "c": 1}).splitlines()
    assert table[0].split() == ["agent", "train", "val", "val", "-", "train"]
    assert len(table[0].partition(" val")[0]) == len(table[1].partition("% ")[0]) + 4
    assert table[1].split() == ["a", "3", "75.0%", "1", "50.0%", "-25.0"]
    assert [line.split()[0] for line in table[1:]] == ["a", "b", "c"]
    assert table[1].endswith("-25.0")
    assert table[2].endswith("-25.0  not in validation")
    assert table[3].endswith("+50.0  not in training")
    assert compare({"a": 1}, {"a": 1}).splitlines()[1].split() == ["a", "1", "100.0%", "1", "100.0%", "+0.0"]


def test_a_stratified_split_holds_out_rows_to_test_of_each_agent_before_those_to_validate(tmp_path: Path) -> None:
    content = agent_rows("aaaaaabbbaaa")
    (tmp_path / "rows").write_bytes(content)
    split(tmp_path / "rows", tmp_path / "plain", val_rows=4, stratify=True)
    manifest = split(tmp_path / "rows", tmp_path / "out", val_rows=4, test_rows=4, stratify=True)
    assert manifest["agents"] == {"train": {"a": 3, "b": 1}, "test": {"a": 3, "b": 1}, "validation": {"a": 3, "b": 1}}
    parts = [(tmp_path / "out" / f"{name}-split.jsonl").read_bytes() for name in ("train", "test", "val")]
    assert parts[2] == (tmp_path / "plain" / "val-split.jsonl").read_bytes()
    assert sorted(b"".join(parts).splitlines()) == sorted(content.splitlines())


@pytest.mark.parametrize("rows_to_test", [2, 3])
def test_rows_to_test_leave_one_to_train_on(
    tmp_path: Path, rows_to_test: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(rows(5))
    words = ["--in", str(tmp_path / "rows.jsonl"), "--out-dir", str(tmp_path / "out"), "--val-rows", "2"]
    assert main([*words, "--test-rows", str(rows_to_test)]) == (0 if rows_to_test == 2 else 2)
    wrong = "expected more than the 5 rows for test and validation; lower --test-rows or --val-rows"
    assert (wrong in capsys.readouterr().err) == (rows_to_test == 3)
