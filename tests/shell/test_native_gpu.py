"""A person with one GPU node and a dense Qwen3-style model: the doctor lets the run start, and the plan fits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.in_process import in_process
from tests.weight_headers import header_alone, qwen3_shapes
from tools.doctor import machine
from tools.sizing import planner

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = {  # what the config.json of every dense model of that family has
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
SIZES = {  # file -> sizes of the largest model that its header promises
    "native_gpu.yaml": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "native_2gpu.yaml": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 8)
    monkeypatch.setattr(machine, "version", lambda _name: "2.9.1+cu128")


@pytest.mark.parametrize("file", SIZES)
def test_the_doctor_lets_a_dense_model_start_without_force(launch, file):
    (launch.directory / "a-model" / "config.json").write_text(json.dumps(QWEN3 | SIZES[file]), encoding="utf-8")
    weights = header_alone(qwen3_shapes(QWEN3 | SIZES[file]))
    (launch.directory / "a-model" / "model.safetensors").write_bytes(weights)
    settings = {"CONFIG_PATH": f"configs/{file}", "LAUNCHER": "local"}
    started = launch.plan("--stage=stage1.1", "--dry-run", **settings)
    assert started.words[2:4] == ["-m", "tools.job.local"]
    assert "refused" not in started.stderr


@pytest.mark.parametrize(
    ("change", "code"), [({"architectures": ["MambaForCausalLM"]}, "MDL009"), ({"num_attention_heads": 7}, "MDL004")]
)
def test_the_doctor_stops_a_model_that_does_not_fit(launch, change, code):
    config = QWEN3 | SIZES["native_gpu.yaml"] | change
    (launch.directory / "a-model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stopped = launch.plan(
        "--stage=stage1.1", "--dry-run", CONFIG_PATH="configs/native_gpu.yaml", LAUNCHER="local", expect=2
    )
    assert f"would be refused: {code}" in stopped.stderr


@pytest.mark.parametrize(
    ("num_gpus", "torch", "codes"),
    [
        (8, "2.9.1", []),
        (8, "2.9.1+cpu", ["ENG007"]),
        (4, "2.9.1+cu128", ["ALC002"]),
        (0, "2.9.1+cpu", ["ALC003", "ENG007"]),
        (0, "2.9.1+cu128", ["ALC003"]),
    ],
)
def test_the_doctor_stops_a_run_that_this_machine_cannot_do(launch, monkeypatch, num_gpus, torch, codes):
    (launch.directory / "a-model" / "config.json").write_text(
        json.dumps(QWEN3 | SIZES["native_gpu.yaml"]), encoding="utf-8"
    )
    monkeypatch.setattr(machine, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(machine, "version", lambda _name: torch)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _pid: set(range(4)))
    planned = launch.plan("--stage=stage1.1", "--dry-run", CONFIG_PATH="configs/native_gpu.yaml", LAUNCHER="local")
    assert [code for code in ("ALC002", "ALC003", "ENG007") if code in planned.stderr] == codes


@pytest.mark.parametrize("file", SIZES)
def test_the_plan_fits(tmp_path, file):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | SIZES[file]), encoding="utf-8")
    variables = {"CONFIG_PATH": f"configs/{file}", "MODEL_PATH": str(tmp_path)}
    done = in_process(planner.main, ["--stage", "stage1.1"], os.environ | variables, ROOT)
    assert done.status == 0
    of_gpus, _of_hosts = [line for line in done.stdout.splitlines() if line.strip().startswith("total")]
    assert of_gpus.endswith("of 79.6: fits")
