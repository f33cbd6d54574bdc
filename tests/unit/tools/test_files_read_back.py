"""What a command reads back of a run may be cut, empty or of another kind: one clear line, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import RecipeError
from tools import export_hf
from tools.data.curriculum.profile import RESULT, ProfileLedger
from tools.draft.provenance import changed_keys, read_run_lock
from tools.draft.run_dir import read_holder
from tools.images.lock import launch_digest, read_lock, record_of
from tools.launch.sequence import is_finished
from tools.look import status
from tools.look.report import __main__ as page
from tools.sizing.architecture import read_architecture
from tools.tiny import sft

PULSE: dict[str, Any] = {
    **{"state": "running", "reason": "", "pid": 5, "pid_started": 50, "host": "here", "job_id": ""},
    **{"started": 900.0, "updated": 999.5, "step": 2, "num_steps": 4, "saved_step": 2, "max_age": 1, "in_flight": 0},
    **{"phase": "policy_training", "phase_seconds": 0.5, "prompts_per_step": 2, "ready": {"3": 2}, "waiting_for": ""},
}
FILES = {
    "status.json": PULSE,
    "resolved.json": {"config": {"grpo": {"max_num_steps": 4}, "checkpointing": {"save_period": 2}, "policy": {}}},
    "run.lock.json": {"stage": "stage1.1", "model": {"path": "m"}},
    "metrics.jsonl": {"step": 1, "time": 1.0, "train/reward": 0.5},
    "rollouts/train.jsonl": {"step": 1},
    ".lock": {"pid": 5, "host": "here"},
    "checkpoints/step_000002/ledger.jsonl": {"key": "0:1:p", "reason": "timed_out"},
    "checkpoints/step_000002/COMPLETE": {"policy/x": "0"},
}
JUNK = [b"", b"[]", b"null", b'"x"', b"3", b"{}", b"\0" * 64, b"\xff\xfe", b"[" * 9000, b'{"step": 1e999}']


def other_kinds(value: dict[str, Any]) -> list[bytes]:
    """Return the file cut in half, and once for each of its values with that value of another kind."""
    text = json.dumps(value).encode()
    kinds: list[Any] = [[], "x"]
    return [text[: len(text) // 2], *(json.dumps(value | {key: kind}).encode() for key in value for kind in kinds)]


@pytest.mark.parametrize("name", FILES)
def test_every_command_that_reads_a_run_back_says_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = tmp_path / "run", str(tmp_path / "out")
    for other, content in FILES.items():
        (run_dir / other).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / other).write_text(json.dumps(content) + "\n", encoding="utf-8")
    asked = SimpleNamespace(
        grpo=SimpleNamespace(max_num_steps=4), checkpointing=SimpleNamespace(checkpoint_dir="checkpoints")
    )
    step = run_dir / "checkpoints/step_000002"
    commands: list[Callable[[], object]] = [
        lambda: page.main(["--run-dir", str(run_dir), "--out", str(tmp_path / "page.html")]),
        lambda: status.main(["--results", str(tmp_path), "--exp-name", "run"]),
        lambda: status.main(["--results", str(tmp_path), "--exp-name", "run", "--json"]),
        lambda: export_hf.main(["--checkpoint", str(step), "--out", out]),
        lambda: is_finished(run_dir, SimpleNamespace(config=asked)),  # type: ignore[arg-type]
        lambda: changed_keys(run_dir, {"grpo": {}}),
        lambda: read_run_lock(run_dir),
        lambda: read_holder(run_dir),
    ]
    for junk in (*JUNK, *other_kinds(FILES[name])):
        (run_dir / name).write_bytes(junk + b"\n")
        for command in commands:
            try:
                found = command()
            except RecipeError as error:
                assert len(str(error).splitlines()) == 1, junk
            else:
                said = capsys.readouterr().err
                assert "Traceback" not in said and (found != 2 or len(said.strip().splitlines()) == 1), (junk, said)


def test_other_files_of_ours_are_refused_in_one_line_or_made_again(tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    image.write_bytes(b"image")
    profile = {"line": 1, "pass_rate": 0.5}
    (tmp_path / "profile").mkdir()
    ProfileLedger.open(tmp_path / "profile", {"rows": 1})
    readers: list[tuple[Path, dict[str, Any], Callable[[], object]]] = [
        (tmp_path / "images.json", {"images": {"a": {}}}, lambda: read_lock(tmp_path / "images.json")),
        (record_of(image), {"digest": "sha256:0", "bytes": 5}, lambda: launch_digest(str(image))),
        (tmp_path / sft.METADATA, {"recipe": {"seed": 1}}, lambda: sft._differences(tmp_path, {"seed": 1})),
        (tmp_path / "config.json", {"model_type": "qwen3"}, lambda: read_architecture(tmp_path)),
        (tmp_path / "profile" / RESULT, profile, lambda: ProfileLedger.open(tmp_path / "profile", {"rows": 1})),
    ]
    for path, content, read in readers:
        for junk in (*JUNK, *other_kinds(content)):
            path.write_bytes(junk + b"\n")
            try:
                read()
            except RecipeError as error:
                assert str(path) in str(error) and len(str(error).splitlines()) == 1, junk
