"""A complete launch in a temporary directory: model, data, a recording `sbatch`, and the launcher itself."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer, models

from tests.in_process import in_process
from tests.shell.job_shims import Job
from tests.unit.tools.launch_case import ROW
from tools.launch import command

ENOUGH_ROWS = 512  # for one step of any stage
ROOT = Path(__file__).resolve().parents[2]


def write_model(path: Path) -> None:
    """Write a Hugging Face directory with one tensor of two float32 zeros."""
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}', encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


class Planned(NamedTuple):
    """What super_launch.sh is told to do."""

    words: list[str]
    """`print` or `exec`, then the command; empty when the launch is refused."""
    stderr: str


@dataclass
class Launcher:
    """Runs super_launch.sh with a clean environment."""

    directory: Path
    env: dict[str, str] = field(default_factory=dict)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with these variables on top, empty ones removed."""
        return {name: value for name, value in {**self.env, **variables}.items() if value}

    def __call__(self, *args: str, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run it and check the exit status."""
        result = subprocess.run(
            [str(ROOT / "super_launch.sh"), *args],
            env=self.environment(variables),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == expect, result.stderr + result.stdout
        return result

    def plan(self, *args: str, expect: int = 0, **variables: str) -> Planned:
        """Run the program that tells super_launch.sh what to do; `args` are that program's.

        A dry run may end with 2, with the words of a launch that would be refused: some machines lack something.
        """
        status, stdout, stderr = in_process(command.main, args, self.environment(variables), self.directory)
        is_refused_dry = "--dry-run" in args and status == 2 and bool(stdout) and "would be refused" in stderr
        assert status == expect or (expect == 0 and is_refused_dry), stderr
        return Planned(stdout.split("\0")[:-1], stderr)

    def submitted(self) -> list[str]:
        """Return what sbatch was called with."""
        return (self.directory / "argv").read_text(encoding="utf-8").split("\0")[:-1]


def base_environment(directory: Path) -> Mapping[str, str]:
    """Return the published contract, filled for a small run on a made-up cluster."""
    return {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "HOME": str(directory),
        "EXP_NAME": "exp",
        "CONFIG_PATH": "configs/tiny/stage1_rlvr.yaml",
        "MODEL_PATH": f"{directory}/a-model/",
        "TRAIN_PATH": f"{directory}/train.jsonl",
        "VAL_PATH": f"{directory}/val.jsonl",
        "CONTAINER": "registry.example/training:1",
        "SANDBOX_CONTAINER": "registry.example/sandbox:1",
        "PERSISTENT_CACHE": f"{directory}/cache",
        "SLURM_PARTITION": "batch",
        "SLURM_ACCOUNT": "lab",
        "RESULTS_DIR": f"{directory}/results",
        "CODE_SNAPSHOT_DIRNAME": f"{directory}/snapshots",
    }


@pytest.fixture
def launch(tmp_path: Path) -> Launcher:
    write_model(tmp_path / "a-model")
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text((json.dumps(ROW) + "\n") * ENOUGH_ROWS, encoding="utf-8")
    shim = tmp_path / "bin" / "sbatch"
    shim.parent.mkdir()
    shim.write_text(f"#!/usr/bin/env bash\nprintf '%s\\0' \"$@\" >'{tmp_path}/argv'\n", encoding="utf-8")
    shim.chmod(0o755)
    return Launcher(tmp_path, dict(base_environment(tmp_path)))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.slurmd.close()
