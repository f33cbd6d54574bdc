"""A checkpoint of any layout becomes a Hugging Face directory without a run, in the memory of one weight file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from head_reference import add_heads
from layout_ranks import LayoutCase, LayoutOutcome, outcomes
from policy_case import save_experts, save_hybrid, save_model
from reread_export import MARK
from safetensors.torch import load_file
from speed import patiently
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from recipes.environments.chat.codec import ChatCodec
from recipes.grpo import checkpoint
from tools import export_hf
from tools.tiny.model import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

MEMORY, READERS = (Path(__file__).with_name(f"{name}.py") for name in ("export_memory", "reread_export"))
_TENSOR_EXPERT = {
    "megatron_cfg__tensor_model_parallel_size": 2,
    "megatron_cfg__sequence_parallel": "true",
    "megatron_cfg__expert_model_parallel_size": 2,
}
_LAYOUTS = {
    "hybrid": _TENSOR_EXPERT | {"megatron_cfg__mtp_num_layers": 1},
    "dense": {"megatron_cfg__pipeline_model_parallel_size": 2},
    "experts": {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"},
}
MEGABYTE = 10**6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "hybrid": add_heads(save_hybrid(root / "hybrid")),
        "dense": save_model(root / "dense", tied=True),
        "experts": save_experts(root / "experts"),
    }


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def saved(models: dict[str, Path], job: Path) -> dict[str, LayoutOutcome]:
    """Each model after one step, as its two ranks gather it; the job's directory has checkpoints of that moment."""
    cases = [
        LayoutCase(name=name, model=models[name], num_ranks=2, overrides=overrides, saves=True)
        for name, overrides in _LAYOUTS.items()
    ]
    return outcomes(tuple(cases), job, timeout_s=patiently(140))


def _step_of_a_run(root: Path, policy: Path, model: Path, *, template: Path | None = None) -> Path:
    """Put a checkpoint of the policy where a run would have saved it."""
    tokenizer = {"name": str(model), "chat_template": str(template) if template else None}
    recorded = {"model_name": str(model), "tokenizer": tokenizer, "precision": "float32"}
    root.mkdir()
    (root / "resolved.json").write_text(json.dumps({"config": {"policy": recorded}}), encoding="utf-8")
    temporary = checkpoint.make_directory(root / "checkpoints", 1)
    shutil.copytree(policy, temporary / "policy")
    checkpoint.complete(root / "checkpoints", 1, temporary)
    return checkpoint.step_dir(root / "checkpoints", 1)


@pytest.mark.parametrize("name", _LAYOUTS)
def test_the_export_has_the_weights_that_were_saved(
    models: dict[str, Path], job: Path, saved: dict[str, LayoutOutcome], name: str, tmp_path: Path
) -> None:
    step = _step_of_a_run(tmp_path / "run", job / f"{name}.checkpoint", models[name])
    assert export_hf.main(["--checkpoint", str(step), "--out", str(tmp_path / "out")]) == 0
    exported, expected = load_file(tmp_path / "out" / "model.safetensors"), saved[name].before
    assert exported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in exported.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    on_disk = load_file(models[name] / "model.safetensors")
    assert any(not torch.equal(tensor, on_disk[key]) for key, tensor in exported.items())  # it was trained


def test_the_command_says_what_it_does_and_nothing_else(
    models: dict[str, Path], job: Path, saved: dict[str, LayoutOutcome], tmp_path: Path
) -> None:
    assert saved
    step, out = _step_of_a_run(tmp_path / "run", job / "dense.checkpoint", models["dense"]), tmp_path / "out"
    words = ["-m", "tools.export_hf", "--checkpoint", str(step), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=patiently(100),
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"{step}: comparing the files of policy/ with their checksums",
        f"{out}: exported from {step}",
    ]
    (line,) = done.stderr.splitlines()
    assert line.startswith("writing file 1 of 1: model.safetensors, "), line


def test_a_checkpoint_of_another_model_or_with_damage_is_refused(
    models: dict[str, Path],
    job: Path,
    saved: dict[str, LayoutOutcome],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert saved
    step = _step_of_a_run(tmp_path / "run", job / "dense.checkpoint", models["dense"])
    wider = tmp_path / "wider"
    shutil.copytree(models["dense"], wider)
    config = json.loads((wider / "config.json").read_text(encoding="utf-8"))
    (wider / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}), encoding="utf-8")
    out = tmp_path / "out"
    call = ["--checkpoint", str(step), "--out", str(out)]
    assert export_hf.main([*call, "--model", str(wider)]) == 2
    assert "2 tensors are not those of policy.model_name" in capsys.readouterr().err
    (file,) = (step / "policy").glob("__1_*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert export_hf.main(call) == 2
    assert "differs from its checksum" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))] == []


def test_the_peak_of_memory_is_one_file_and_one_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model, whole, file = tmp_path / "model", 100 * MEGABYTE, 8 * MEGABYTE
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).float().save_pretrained(model)
    assert (model / "model.safetensors").stat().st_size > 0.9 * whole
    _run(MEMORY, "save", str(model), str(tmp_path / "saved"))
    rise = int(
        _run(MEMORY, "export", str(model), str(tmp_path / "saved"), str(tmp_path / "out"), str(file)).split()[-1]
    )
    tensor = 4 * 256 * 2 * 1024
    print(f"memory rose by {rise / MEGABYTE:.1f} MB: {rise / (file + tensor):.2f} of a file and a tensor")
    assert rise < file + tensor < 0.2 * whole
    assert len(list((tmp_path / "out" / "second").glob("*.safetensors"))) > 10


_CHOSEN = """{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>
{% endfor %}{{ tools | default([], true) | tojson }}{% if add_generation_prompt %}[assistant] ü {% endif %}"""
_TOOL = {"name": "look_up", "description": "größe", "parameters": {"type": "object", "properties": {}}}
_QUESTION = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 2 + 3?"}]
_ANSWERED = [{"role": "assistant", "content": "5"}, {"role": "user", "content": " Ann: äöü <think>"}]
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": _QUESTION[1:], "tools": []},
    {"messages": _QUESTION + _ANSWERED, "tools": []},
    {"messages": _QUESTION, "tools": [{"type": "function", "function": _TOOL}]},
]


@pytest.mark.parametrize("chosen", [None, _CHOSEN], ids=["the tokenizer's template", "a chosen template"])
def test_transformers_and_vllm_write_the_prompts_of_the_run(chosen: str | None, tmp_path: Path) -> None:
    tokenizer, model = build_tokenizer(), tmp_path / "model"
    save_model(model, vocab_size=len(tokenizer), head_dim=32, max_position_embeddings=512)
    tokenizer.save_pretrained(model)
    file = tmp_path / "chosen.jinja" if chosen else None
    if file and chosen:
        file.write_text(chosen, encoding="utf-8")
    _run(MEMORY, "save", str(model), str(tmp_path / "saved"))
    step = _step_of_a_run(tmp_path / "run", tmp_path / "saved", model, template=file)
    assert export_hf.main(["--checkpoint", str(step), "--out", str(tmp_path / "out")]) == 0
    codec = ChatCodec(str(model), chat_template=chosen)
    expected = [list(codec.encode_chat(one["messages"], one["tools"], {})) for one in CONVERSATIONS]
    for gone in (model, tmp_path / "run", file):  # an export needs nothing of the run
        if gone:
            gone.rename(gone.with_name(f"moved.{gone.name}"))
    printed = _run(READERS, str(tmp_path / "out"), given=json.dumps({"conversations": CONVERSATIONS}))
    (line,) = [line for line in printed.splitlines() if line.startswith(MARK)]
    found = json.loads(line.removeprefix(MARK))
    assert found == {"transformers": expected, "vllm": expected}


def _run(script: Path, *arguments: str, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        input=given,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(script.parents[2]),
            "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed leaves the process at once
        },
        capture_output=True,
        text=True,
        timeout=patiently(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-9000:]
    return done.stdout
