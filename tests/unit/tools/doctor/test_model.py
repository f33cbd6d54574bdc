"""Start weights: cut files are found by their header, changed ones by their checksum, misfits by config.json."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from recipes.config.fits import engine_problem
from recipes.config.load import load_config
from tools.doctor.model import (
    export_findings,
    fit_findings,
    head_findings,
    missing_files,
    package_findings,
    policy_problems,
    template_findings,
    weight_file_findings,
)

ROOT = Path(__file__).resolve().parents[4]


QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 512,
}


def safetensors(header: dict[str, object], num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def write_export(step: Path, *, heads: int = 4) -> Path:
    """Write step_N/hf with the checksums that the run leaves beside it; returns hf."""
    hf = step / "hf"
    hf.mkdir(parents=True)
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    (hf / "model.safetensors").write_bytes(safetensors({"w": entry}, 12))
    (hf / "config.json").write_text(json.dumps(QWEN3 | {"num_attention_heads": heads}))
    Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>")).save(str(hf / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    digests = {f"hf/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in hf.iterdir()}
    (step / "COMPLETE").write_text(json.dumps(digests | {"state.json": "0" * 64}))
    return hf


def codes(findings: object) -> list[str]:
    return [finding.code for finding in findings]  # type: ignore[attr-defined]


def test_cut_weights_are_found_by_their_header(tmp_path):
    file = tmp_path / "w.safetensors"
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    content = safetensors({"__metadata__": {"format": "pt"}, "w": entry}, 12)
    file.write_bytes(content)
    assert codes(weight_file_findings(file)) == []
    for broken in (content[:-1], content + b"x", b"", content[:5], b"\xff" * 40):
        file.write_bytes(broken)
        assert codes(weight_file_findings(file)) == ["MDL002"], broken


def test_missing_part_of_an_indexed_model_is_named(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "part1.safetensors").write_bytes(safetensors({}, 0))
    index = {"weight_map": {"a": "part1.safetensors", "b": "part2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_files(tmp_path) == ["part2.safetensors"]


def test_an_export_of_ours_is_held_against_its_checksums(tmp_path):
    hf = write_export(tmp_path / "step_000010")
    latest = tmp_path / "latest"
    latest.symlink_to("step_000010")
    assert codes(export_findings(latest / "hf")) == []
    (hf / "config.json").write_text("{}")
    (finding,) = export_findings(latest / "hf")
    assert finding.code == "MDL003"
    assert finding.problem.where.endswith("step_000010/hf/config.json")
    (hf / "config.json").unlink()
    (finding,) = export_findings(latest / "hf")
    assert finding.problem.what == "no such file"
    (hf.parent / "COMPLETE").unlink()
    (finding,) = export_findings(latest / "hf")
    assert (finding.code, finding.problem.what) == ("MDL003", "the checkpoint was not finished: it has no COMPLETE")


def test_weights_from_elsewhere_have_no_checksums(tmp_path):
    assert codes(export_findings(tmp_path)) == []


def test_files_too_large_to_hash_are_said_to_be_so(tmp_path, monkeypatch):
    hf = write_export(tmp_path / "step_000010")
    monkeypatch.setattr("tools.doctor.model.MAX_HASHED_BYTES", 2000)
    (hf / "model.safetensors").write_bytes(bytes(4000))  # differs, and nobody looks
    (finding,) = export_findings(hf)
    assert (finding.code, finding.severity) == ("MDL006", "note")
    assert (
        finding.problem.what == "1 of 4 files were compared by size alone: beyond 1.86265e-06 GiB no checksum is read"
    )


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        ("policy.max_total_sequence_length=512", []),
        ("policy.max_total_sequence_length=1024", ["policy.max_total_sequence_length"]),
        ("policy.generation.vllm_cfg.tensor_parallel_size=3", ["policy.generation.vllm_cfg.tensor_parallel_size"]),
        ("policy.generation.vllm_cfg.expert_parallel_size=2", ["policy.generation.vllm_cfg.expert_parallel_size"]),
        ("policy.megatron_cfg.expert_model_parallel_size=2", ["policy.megatron_cfg.expert_model_parallel_size"]),
        ("policy.megatron_cfg.tensor_model_parallel_size=2", ["policy.megatron_cfg.tensor_model_parallel_size"]),
        ("policy.megatron_cfg.pipeline_model_parallel_size=3", ["policy.megatron_cfg.pipeline_model_parallel_size"]),
    ],
)
def test_model_and_configuration_have_to_fit(tmp_path, override, wrong):
    hf = write_export(tmp_path / "step_000010")
    loaded = load_config(ROOT / "configs/tiny/stage1_rlvr.yaml", [f"policy.model_name={hf}", override])
    assert loaded.repaired is not None
    assert [finding.problem.where for finding in fit_findings(hf, loaded.repaired)] == wrong


def test_heads_are_trained_where_the_model_has_some(tmp_path):
    override = "policy.megatron_cfg.mtp_num_layers=5"
    loaded = load_config(ROOT / "configs/tiny/stage1_rlvr.yaml", [f"policy.model_name={tmp_path}", override])
    assert loaded.repaired is not None
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (finding,) = head_findings(tmp_path, loaded.repaired)
    assert finding.code == "MDL004" and finding.problem.where == "policy.megatron_cfg.mtp_num_layers"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"num_nextn_predict_layers": 1}))
    assert not list(head_findings(tmp_path, loaded.repaired))


def test_a_hybrid_is_divided_by_its_layers_and_mamba_groups(tmp_path):
    hybrid = {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
        **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "head_dim": 16, "conv_kernel": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 8, "ssm_state_size": 16},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    overrides = ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=3", "context_parallel_size=3"]
    wanted = [f"policy.megatron_cfg.{text}" for text in overrides]
    loaded = load_config(ROOT / "configs/tiny/stage1_rlvr.yaml", [f"policy.model_name={tmp_path}", *wanted])
    assert loaded.repaired is not None
    assert [str(problem) for problem in policy_problems(tmp_path, loaded.repaired.policy.megatron_cfg)] == [
        "policy.megatron_cfg.tensor_model_parallel_size: got 2, expected a divisor of 1 Mamba groups; the ranks of a "
        "layer share it evenly; change the size",
        "policy.megatron_cfg.sequence_parallel: got false, expected true; set it: a model with experts divides the "
        "tokens over the tensor-parallel ranks",
        "policy.megatron_cfg.pipeline_model_parallel_size: got 3, expected a number of stages that share the model's 4 "
        "layers evenly, apart from those of given stages; change it, or num_layers_in_first_pipeline_stage and "
        "num_layers_in_last_pipeline_stage",
        "policy.megatron_cfg.context_parallel_size: got 3, expected a size that divides the 4 Mamba heads and 0 Mamba "
        "groups of a tensor-parallel rank, or a multiple of the groups; change it or tensor_model_parallel_size",
    ]


@pytest.mark.parametrize(
    ("tensor", "expert", "expected"),
    [
        (2, 1, None),
        (8, 8, None),
        (1, 3, "expert_parallel_size: got 3, expected a divisor of 8 experts; each GPU has as many; change it and "
         "tensor_parallel_size"),
        (5, 1, "expert_parallel_size: got 1, expected 5 = tensor_parallel_size, or that one a divisor of 48 units of "
         "an expert; change one of them"),
    ],
)  # fmt: skip
def test_an_engine_shares_whole_experts_or_parts_of_each(tensor, expert, expected):
    vllm: Any = SimpleNamespace(tensor_parallel_size=tensor, expert_parallel_size=expert)
    problem = engine_problem({"num_moe_experts": 8, "moe_ffn_hidden_size": 48}, vllm)
    assert (problem and str(problem)) == (expected and f"policy.generation.vllm_cfg.{expected}")


def test_another_template_or_tokenizer_than_the_parents_is_named(tmp_path):
    hf = write_export(tmp_path / "run" / "checkpoints" / "step_000010")

    def found_with(*overrides: str) -> list[tuple[str, str]]:
        loaded = load_config(ROOT / "configs/tiny/stage1_rlvr.yaml", [f"policy.model_name={hf}", *overrides])
        assert loaded.repaired is not None
        return [(finding.code, finding.problem.where) for finding in template_findings(hf, loaded.repaired)]

    assert found_with() == []
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[-1].content }}")
    chosen = f"policy.tokenizer.chat_template={template}"
    assert found_with(chosen) == [("MDL005", "policy.tokenizer.chat_template")]
    # The parent was trained with that same file: then it is the right one, and the weights' own is not.
    resolved = {"config": {"policy": {"tokenizer": {"chat_template": str(template)}}}}
    (tmp_path / "run" / "resolved.json").write_text(json.dumps(resolved))
    assert found_with(chosen) == []
    assert found_with() == [("MDL005", "policy.tokenizer.chat_template")]
    (tmp_path / "run" / "resolved.json").unlink()

    other = write_export(tmp_path / "step_000001")
    Tokenizer(models.WordLevel({"<eos>": 1, "<unk>": 0}, unk_token="<unk>")).save(str(other / "tokenizer.json"))
    assert found_with(f"policy.tokenizer.name={other}") == [("MDL005", "policy.tokenizer.name")]
    (hf / "tokenizer_config.json").write_text("{}")
    assert found_with() == [("MDL007", str(hf))]


def test_packages_are_looked_for_where_the_policy_will_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for overlay, expected in (("stage1_rlvr.yaml", 5), ("tiny/stage1_rlvr.yaml", 0)):
        loaded = load_config(ROOT / "configs" / overlay, [f"policy.model_name={tmp_path}"])
        assert loaded.repaired is not None
        found = list(package_findings(tmp_path, loaded.repaired))
        assert codes(found) == ["ENG006"] * expected
        assert all("transformer_engine is not installed" in str(finding.problem) for finding in found)
