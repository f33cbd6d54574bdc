"""A complete launch on disk with nothing wrong in it, and how to break one thing at a time."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models

from recipes.grpo.checkpoint import _write_complete
from tools.doctor.examine import examine
from tools.draft.findings import Finding
from tools.draft.launch import read_launch

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Which is the first letter? A or B"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    "options": [{"A": "this"}, {"B": "that"}],
    "expected_answer": "A",
    "grading_mode": "strict_single_letter_boxed",
}
HELD_OUT_ROW = {
    **ROW,
    "responses_create_params": {"input": [{"role": "user", "content": "Which is the last letter? A or B"}]},
    "expected_answer": "B",
}
PLACEHOLDER_ROW = {
    "_hf_placeholder": {"row": 7, "question_template": "{question}"},
    "agent_ref": {"name": "math_with_judge_simple_agent"},
}
ENOUGH = "grpo.max_num_epochs=1000"  # passes over few rows for some steps
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 262144,
}


@dataclass
class LaunchCase:
    """The files of a launch, and the environment that names them."""

    directory: Path
    env: dict[str, str]

    @property
    def export(self) -> Path:
        """The start weights: the export of a parent's last step."""
        return self.directory / "results" / "parent" / "checkpoints" / "step_000010" / "hf"

    @property
    def sif(self) -> Path:
        """The image of the one instance that `write_task_rows` names."""
        return self.directory / "sif" / "swebench_sweb.eval.x86_64.django_1776_django-11099.sif"

    def write_rows(self, name: str, *rows: Mapping[str, object]) -> None:
        """Replace a data file, with the manifest that its step would leave."""
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (self.directory / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        output = {"file": name, "bytes": len(content), "rows": len(rows), "sha256": digest}
        (self.directory / f"{name}.manifest.json").write_text(json.dumps({"outputs": [output]}), encoding="utf-8")

    def write_task_rows(self) -> None:
        """Replace the data by rows of one SWE task."""
        metadata = {"instance_id": "django__django-11099"}
        for name, prompt in (("train.jsonl", "fix it"), ("val.jsonl", "fix that")):
            self.write_rows(name, {**ROW, "responses_create_params": {"input": prompt, "metadata": metadata}})

    def examine(self, stage: str = "", *overrides: str, **variables: str) -> list[Finding]:
        """Return what the doctor finds; `variables` are set on top of the environment, empty ones removed."""
        env = {name: value for name, value in {**self.env, **variables}.items() if value}
        return examine(read_launch(stage, (ENOUGH, *overrides), env))

    def codes(self, stage: str = "", *overrides: str, **variables: str) -> list[str]:
        """Return the codes found, without that of a Slurm which does not answer."""
        return [finding.code for finding in self.examine(stage, *overrides, **variables) if finding.code != "SLM006"]


def write_case(directory: Path) -> LaunchCase:
    """Write weights, rows, images and return them with the environment of a launch on Slurm."""
    case = LaunchCase(directory, {})
    _write_export(case.export)
    case.write_rows("train.jsonl", ROW)
    case.write_rows("val.jsonl", HELD_OUT_ROW)
    squashfs = b"hsqs" + bytes(36) + struct.pack("<Q", 128) + bytes(80)
    for name in ("training.sqsh", "sandbox.sqsh"):
        (directory / name).write_bytes(squashfs)
    case.sif.parent.mkdir()
    case.sif.write_bytes(sif_file(content=16))
    (directory / "cache").mkdir()
    case.env.update(
        {
            "HOME": str(directory),
            "EXP_NAME": "exp",
            "CONFIG_PATH": "configs/tiny/stage1_rlvr.yaml",
            "MODEL_PATH": str(case.export),
            "TRAIN_PATH": f"{directory}/train.jsonl",
            "VAL_PATH": f"{directory}/val.jsonl",
            "CONTAINER": f"{directory}/training.sqsh",
            "SANDBOX_CONTAINER": f"{directory}/sandbox.sqsh",
            "PERSISTENT_CACHE": f"{directory}/cache",
            "SLURM_PARTITION": "batch",
            "SLURM_ACCOUNT": "lab",
            "SIF_DIR": f"{directory}/sif",
            "RESULTS_DIR": f"{directory}/results",
        }
    )
    return case


def sif_file(*, content: int, cut: int = 0) -> bytes:
    """Return a SIF file with `content` bytes of data, of which the last `cut` are missing."""
    numbers = struct.pack("<8q", 0, 0, 0, 0, 128, 0, 128, content)  # ... where descriptors and data lie
    header = b"#!/usr/bin/env run-singularity\n\0" + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(16) + numbers
    return header + bytes(content - cut)


def _write_export(hf: Path) -> None:
    hf.mkdir(parents=True)
    (hf / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>")).save(str(hf / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (hf / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (hf / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    _write_complete(hf.parent, {})
