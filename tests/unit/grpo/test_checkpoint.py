"""Checkpoints: complete or absent, whatever happens; what is read back equals what was written."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes import files
from recipes.errors import CheckpointError
from recipes.grpo import checkpoint
from recipes.grpo.checkpoint import (
    Reader,
    complete_checkpoints,
    complete_export,
    content_digest,
    is_export,
    latest_checkpoint,
    load_state,
    prune,
    read_here,
    require_whole,
)
from recipes.grpo.metrics import metrics_record
from recipes.grpo.saving import save_checkpoint
from tests.groups import as_lists
from tests.unit.grpo.checkpoint_case import SHARE, Policy, run_state
from tools import verify_checkpoint


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(4, {"train/reward": 0.5}), Policy())
    assert (path / "replay_buffer.safetensors").stat().st_mode == (path / "state.json").stat().st_mode
    got, written = load_state(path), run_state(4, {"train/reward": 0.5})
    tokens, written_tokens = got.collector.finished_tokens, written.collector.finished_tokens
    assert [as_lists(one) for one in tokens] == [as_lists(one) for one in written_tokens]
    assert got == replace(written, collector=replace(written.collector, finished_tokens=tokens))
    assert (tmp_path / "latest").resolve() == path == latest_checkpoint(tmp_path)
    assert (path / "hf" / "config.json").read_text(encoding="utf-8") == "{}"


def test_metrics_that_were_not_finite_can_be_recorded_again(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(4, {"train/reward": 0.5, "train/grad_norm": math.nan}), Policy())
    record = metrics_record(4, 0.0, load_state(path).metrics)
    assert (record["train/reward"], record["train/grad_norm"]) == (0.5, None)
    assert record["non_finite"] == {"train/grad_norm": "nan"}


def test_an_older_form_of_the_buffer_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(4), Policy())
    (path / "replay_buffer.safetensors").rename(path / "replay_buffer.jsonl")
    with pytest.raises(
        CheckpointError,
        match=r"step_000004: it has no replay_buffer\.safetensors: another version.*MODEL_PATH=.*step_000004/hf$",
    ):
        load_state(path)


def test_a_kill_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, run_state(4), Policy())
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, run_state(5), Policy(dies=True))
    assert latest_checkpoint(tmp_path) == first
    (tmp_path / "tmp_pruned_step_000002").mkdir()
    second = save_checkpoint(tmp_path, run_state(6), Policy())  # what was left half-written or half-pruned goes
    assert latest_checkpoint(tmp_path) == second
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000004", "step_000006"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, run_state(4), Policy())
    path = save_checkpoint(tmp_path, run_state(4, {"train/reward": 1.0}), Policy())
    assert load_state(path).metrics == {"train/reward": 1.0}


DAMAGES = {
    "changed": lambda path: (path / "policy" / "weights").write_bytes(b"weightz"),
    "missing": lambda path: (path / "policy" / "weights").unlink(),
    "torn": lambda path: (path / "COMPLETE").write_bytes((path / "COMPLETE").read_bytes()[:40]),
    "without the marker": lambda path: (path / "COMPLETE").unlink(),
    "an array": lambda path: (path / "COMPLETE").write_bytes(b"[]"),
    "null": lambda path: (path / "COMPLETE").write_bytes(b"null"),
    "a text": lambda path: (path / "COMPLETE").write_bytes(b'"policy/weights"'),
    "a number for a checksum": lambda path: (path / "COMPLETE").write_bytes(b'{"state.json": 5}'),
    "a name that is none": lambda path: (path / "COMPLETE").write_bytes(b'{"a\\u0000b": "00"}'),
    "empty": lambda path: (path / "COMPLETE").write_bytes(b""),
}
NAMED = {
    "changed": "policy/weights: the file is missing or differs",
    "missing": "policy/weights: the file is missing or differs",
    "without the marker": ": it has no COMPLETE",
    "a name that is none": "the file is missing or differs",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = save_checkpoint(tmp_path, run_state(4), Policy())
    for step in (6, 8):
        DAMAGES[damage](save_checkpoint(tmp_path, run_state(step), Policy()))
    assert latest_checkpoint(tmp_path) == good == (tmp_path / "latest").resolve()
    named = NAMED.get(damage, "COMPLETE: it cannot be read")
    assert [record.levelname for record in caplog.records if named in record.message] == ["ERROR", "ERROR"]
    assert f"goes on from {good}, the steps after it are trained again" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("damaged_*")) == ["damaged_step_000006", "damaged_step_000008"]
    assert latest_checkpoint(tmp_path) == good
    assert save_checkpoint(tmp_path, run_state(6), Policy()) == latest_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_all_are_damaged_nothing_starts_over_unasked(tmp_path: Path, damage: str) -> None:
    for step in (4, 6):
        DAMAGES[damage](save_checkpoint(tmp_path, run_state(step), Policy()))
    with pytest.raises(CheckpointError, match=NAMED.get(damage, "it cannot be read")) as caught:
        latest_checkpoint(tmp_path)
    assert len(caught.value.problems) == 2
    assert "to start over, take another EXP_NAME" in str(caught.value)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000004", "step_000006"]


def changed(path: Path) -> Path:
    """Change what the file of a rank holds, and not its size."""
    share = path / "policy" / SHARE
    share.write_bytes(b"tensorz")
    return share


def test_the_driver_reads_small_files_alone_and_the_ranks_find_what_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked_at: list[str] = []

    def sha256_of(path: Path) -> str:
        looked_at.append(path.name)
        return files.sha256_of(path)

    for name in ("sha256_of", "readable_sha256"):
        monkeypatch.setattr(checkpoint, name, sha256_of)
    good, newest = (save_checkpoint(tmp_path, run_state(step), Policy()) for step in (4, 6))
    for step in (2, 3):
        shutil.copytree(good, tmp_path / f"step_{step:06d}")
    prune(tmp_path, keep_top_k=2, metric=None, higher_is_better=True, save_period=2)
    assert list(complete_checkpoints(tmp_path)) == [4, 6]
    share = changed(newest)
    assert latest_checkpoint(tmp_path) == newest, "a start has this to go on from"
    assert SHARE not in looked_at and {"weights", "state.json", "replay_buffer.safetensors"} < set(looked_at)

    asked: list[Path] = []

    def read(given: Sequence[Path]) -> list[str | None]:
        asked.extend(given)
        return read_here(given)

    assert latest_checkpoint(tmp_path, read) == good == (tmp_path / "latest").resolve(), "its ranks go on from another"
    assert asked == [share, good / "policy" / SHARE]
    assert f"{share}: the file is missing or differs from its checksum" in caplog.text
    assert [path.name for path in tmp_path.glob("damaged_*")] == ["damaged_step_000006"]
    changed(good)
    with pytest.raises(CheckpointError, match=f"step_000004/policy/{SHARE}: .*; to start over, take another EXP_NAME"):
        latest_checkpoint(tmp_path, read)


@pytest.mark.parametrize("read", [None, read_here], ids=["driver", "ranks"])
def test_a_cut_or_lost_file_of_a_rank_is_noticed_without_reading_it(tmp_path: Path, read: Reader | None) -> None:
    good = save_checkpoint(tmp_path, run_state(2), Policy())
    os.truncate(save_checkpoint(tmp_path, run_state(4), Policy()) / "policy" / SHARE, 3)
    (save_checkpoint(tmp_path, run_state(6), Policy()) / "policy" / SHARE).unlink()
    assert latest_checkpoint(tmp_path, read) == good


def test_a_checkpoint_of_an_earlier_version_has_no_sizes_and_is_compared_as_well(tmp_path: Path) -> None:
    good, newest = (save_checkpoint(tmp_path, run_state(step), Policy()) for step in (4, 6))
    same = content_digest(newest)
    for path in (good, newest):
        sums = json.loads((path / "COMPLETE").read_bytes())
        assert all(one.keys() == {"sha256", "bytes"} for one in sums.values())
        earlier = {name: one["sha256"] for name, one in sums.items()}
        (path / "COMPLETE").write_text(json.dumps(earlier), encoding="utf-8")
    assert content_digest(newest) == same
    assert latest_checkpoint(tmp_path) == newest == latest_checkpoint(tmp_path, read_here)
    changed(newest)
    assert latest_checkpoint(tmp_path, read_here) == good


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_rank_has_written_elsewhere_makes_no_checkpoint(tmp_path: Path, is_there: bool) -> None:
    class OnAnotherDisk(Policy):
        def finish_save(self) -> tuple[float, dict[Path, files.FileSum]]:
            (share,) = self.sums
            if is_there:
                os.truncate(share, 3)
            else:
                share.unlink()
            return 0.5, self.sums

    here = "3" if is_there else "none"
    wrong = rf"{SHARE}: a rank has written 7 bytes of it, and {here} are here; set RESULTS_DIR to a directory that all"
    with pytest.raises(CheckpointError, match=wrong):
        save_checkpoint(tmp_path, run_state(4), OnAnotherDisk())
    assert list(tmp_path.iterdir()) == []


def test_a_whole_check_reads_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_checkpoint(tmp_path, run_state(4), Policy())
    assert verify_checkpoint.main(["--checkpoint", str(tmp_path / "latest")]) == 0
    share = changed(path)
    assert verify_checkpoint.main(["--checkpoint", str(path)]) == 2
    assert verify_checkpoint.main(["--checkpoint", str(tmp_path / "step_7")]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines()[1] == f"{path}: whole"
    assert f"{share}: the file is missing or differs" in said.err and "step_7: there is no such directory" in said.err


def test_checkpoints_that_were_taken_away_leave_a_link_that_refuses(tmp_path: Path) -> None:
    shutil.rmtree(save_checkpoint(tmp_path, run_state(4), Policy()))
    with pytest.raises(CheckpointError, match="latest: it leads to step_000004, and no checkpoint is here any more"):
        latest_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path / "never_saved") is None


STATES: list[Any] = [[], None, 5, "x", {}, {"step": 4}]


@pytest.mark.parametrize("raw", [*STATES, b"", b"\xff", b'{"step'], ids=repr)
@pytest.mark.parametrize("name", ["state.json", "ledger.jsonl", "replay_buffer.safetensors"])
def test_a_state_of_another_kind_is_one_clear_error(tmp_path: Path, name: str, raw: Any) -> None:
    path = save_checkpoint(tmp_path, run_state(4), Policy())
    (path / name).write_bytes(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    if (name, raw) == ("ledger.jsonl", b""):
        return  # no prompt was trained
    with pytest.raises(CheckpointError, match=r"its state cannot be read .*start a new run with MODEL_PATH="):
        load_state(path)


@pytest.mark.parametrize("wrong", [{"step": "4"}, {"position": -1}, {"step": True}, {"metrics": []}, {"data": {}}])
def test_a_state_with_a_field_of_another_kind_is_one_too(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = save_checkpoint(tmp_path, run_state(4), Policy())
    (path / "state.json").write_text(
        json.dumps(json.loads((path / "state.json").read_bytes()) | wrong), encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match="its state cannot be read"):
        load_state(path)
    for step in (5, 6):
        save_checkpoint(tmp_path, run_state(step), Policy())
    prune(tmp_path, keep_top_k=1, metric=None, higher_is_better=True, save_period=1)  # no such file ends a run


class Disk:
    """Remembers what a power cut would leave: each file as it was when it was last flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, bytes] = {}  # inode -> content on the disk
        self.names: dict[int, set[str]] = {}  # inode of a directory -> its names on the disk
        fsync = os.fsync

        def flush(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_dir():
                self.names[path.stat().st_ino] = {entry.name for entry in path.iterdir()}
            else:
                self.files[path.stat().st_ino] = path.read_bytes()

        monkeypatch.setattr(os, "fsync", flush)

    def holds(self, directory: Path) -> list[str]:
        """Return what of a directory is not on the disk."""
        lost = []
        for path in [directory, *directory.rglob("*")]:
            number = path.stat().st_ino
            if path.is_dir() and self.names.get(number) != {entry.name for entry in path.iterdir()}:
                lost.append(f"{path}/")
            if path.is_file() and self.files.get(number) != path.read_bytes():
                lost.append(str(path))
        return lost


def test_everything_is_on_the_disk_before_the_rename_and_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, rename = Disk(monkeypatch), Path.rename
    lost: list[str] = []

    def watch(path: Path, target: Path) -> Path:
        if Path(target).name.startswith("step_"):
            lost.extend(disk.holds(path))
        if Path(target).name.startswith("tmp_pruned"):
            lost.extend(name for name in disk.holds(tmp_path / "step_000006"))
            assert "step_000006" in disk.names[tmp_path.stat().st_ino], "its name is not on the disk"
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watch)
    for step in (4, 6):
        save_checkpoint(tmp_path, run_state(step), Policy())
    prune(tmp_path, keep_top_k=1, metric=None, higher_is_better=True, save_period=2)
    assert list(complete_checkpoints(tmp_path)) == [6]
    assert lost == []


def test_nothing_older_goes_while_the_newest_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4, 6):
        path = save_checkpoint(tmp_path, run_state(step), Policy())
    DAMAGES["changed"](path)
    prune(tmp_path, keep_top_k=1, metric=None, higher_is_better=True, save_period=2)
    assert list(complete_checkpoints(tmp_path)) == [2, 4, 6]
    assert "until then no older one is removed" in caplog.text


def test_what_cannot_be_removed_never_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = os.unlink

    def refuse(path: str, **options: Any) -> None:
        if str(path).startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    for step in (2, 4):
        path = save_checkpoint(tmp_path, run_state(step), Policy())
        (path / "policy" / ".nfs0001").touch()
    for name in ("tmp_step_000006", "tmp_pruned_step_000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".nfs0002").touch()
    newest = save_checkpoint(tmp_path, run_state(6), Policy())
    prune(tmp_path, keep_top_k=1, metric=None, higher_is_better=True, save_period=2)
    assert list(complete_checkpoints(tmp_path)) == [6]
    assert save_checkpoint(tmp_path, run_state(6), Policy()) == newest == latest_checkpoint(tmp_path)
    assert ".nfs0001: [Errno 16]" in caplog.text


def test_one_that_cannot_be_pruned_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step_000002":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return rename(path, target)

    for step in (2, 4, 6):
        save_checkpoint(tmp_path, run_state(step), Policy())
    monkeypatch.setattr(Path, "rename", refuse)
    with caplog.at_level("INFO"):
        prune(tmp_path, keep_top_k=1, metric=None, higher_is_better=True, save_period=2)
    assert list(complete_checkpoints(tmp_path)) == [2, 6]
    stale = f"[Errno 116] Stale file handle: '{tmp_path}/step_000002'"
    assert caplog.messages == [f"checkpoint of step 2 not pruned: {stale}", "pruned checkpoint of step 4"]


def test_names_beside_the_known_ones_are_ignored(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(4), Policy())
    for name in ("step_000001.bak", "step_000009_old", "step_x", "step_"):
        shutil.copytree(path, tmp_path / name)
    assert complete_checkpoints(tmp_path) == {4: path}
    assert latest_checkpoint(tmp_path) == path
    prune(tmp_path, keep_top_k=1, metric=None, higher_is_better=True, save_period=1)
    assert (tmp_path / "step_000001.bak").is_dir()


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    class Full(Policy):
        def is_save_written(self) -> bool:
            raise OSError(errno.ENOSPC, "No space left on device", "weights")

    first = save_checkpoint(tmp_path, run_state(4), Policy())
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, run_state(6), Full())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000004"]
    assert latest_checkpoint(tmp_path) == first


def test_export_is_the_one_latest_points_at_now(tmp_path: Path) -> None:
    given = tmp_path / "latest" / "hf"
    with pytest.raises(CheckpointError, match="latest/hf: there is no checkpoint"):
        complete_export(given)
    save_checkpoint(tmp_path, run_state(2), Policy())
    assert complete_export(given) == tmp_path / "step_000002" / "hf"
    save_checkpoint(tmp_path, run_state(4), Policy())
    assert complete_export(given) == tmp_path / "step_000004" / "hf"
    assert complete_export(tmp_path / "step_000002" / "hf") == tmp_path / "step_000002" / "hf"


def test_damaged_export_is_refused_but_not_for_the_policy_beside_it(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(2), Policy())
    (path / "policy" / "weights").write_bytes(b"Weights")  # the next stage does not read it
    assert complete_export(path / "hf") == path / "hf"
    (path / "hf" / "config.json").write_text("{ }", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"hf/config\.json: the file is missing or differs") as refused:
        complete_export(path / "hf")
    assert str(refused.value).endswith("; restore it, or set MODEL_PATH to the export of another step")
    (path / "COMPLETE").unlink()
    with pytest.raises(CheckpointError) as refused:
        complete_export(path / "hf")
    fix = "let the run that writes it save once, or set MODEL_PATH to other start weights"
    assert str(refused.value) == f"{path}/hf: its checkpoint was not finished; {fix}"


def test_a_damaged_part_is_refused_but_not_for_what_lies_beside_it(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(2), Policy())
    (path / "hf" / "config.json").write_text("{ }", encoding="utf-8")
    require_whole(path, "policy")
    with pytest.raises(CheckpointError, match=r"COMPLETE: it lists no file optimizer/\*; restore it, or take another"):
        require_whole(path, "optimizer")
    (path / "policy" / "weights").unlink()
    with pytest.raises(CheckpointError, match=r"policy/weights: .*; restore it, or take another step$"):
        require_whole(path, "policy")


def test_only_paths_of_checkpoints_count_as_exports() -> None:
    assert is_export(Path("/results/r/checkpoints/latest/hf"))
    assert is_export(Path("step_000010/hf"))
    assert not is_export(Path("/models/sft/hf"))
    assert not is_export(Path("/results/r/checkpoints/latest/policy"))
