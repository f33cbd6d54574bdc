"""How the steps of TRL are read; the comparison itself is `make bench-peer`."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from recipes.errors import RunError
from tools.bench import peer


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(config=Path("stage.yaml"), run_dir=tmp_path, steps=4, overrides=["grpo.seed=1"])


def test_the_first_steps_do_not_count(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        given.append(command)
        (args.run_dir / "trl.json").write_text(json.dumps([50.0, 90.0, 91.0, 93.0, 94.0, 104.0]), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(peer.subprocess, "run", run)
    assert peer.trl_seconds(args, 0.5) == 1.5  # of 1, 2, 1 and 10
    (command,) = given
    assert command[command.index("--steps") + 1] == "6" and command[command.index("--latency") + 1] == "0.5"
    assert command[-1] == "grpo.seed=1"


def test_a_failure_of_trl_is_named_with_the_end_of_its_log(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        options["stdout"].write(b"KeyError: 'x'\n")  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(peer.subprocess, "run", run)
    with pytest.raises(RunError, match=r"TRL ended with status 1; see .*trl\.log:\nKeyError: 'x'"):
        peer.trl_seconds(args, 0.0)
