"""Start weights: cut files are found by their header, changed ones by their checksum, misfits by config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from recipes.config.fits import engine_problem, teacher_problems
from recipes.config.load import load_config, require_valid
from recipes.grpo.checkpoint import _write_complete, recorded_sums
from tests.configuration import block
from tests.weight_headers import qwen3_shapes, safetensors
from tools.doctor.model import (
    argument_findings,
    engine_argument_names,
    export_findings,
    fit_findings,
    head_findings,
    image_findings,
    package_findings,
    policy_problems,
    route_findings,
    teacher_findings,
    template_findings,
    weight_findings,
)
from tools.draft.launch import read_launch

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


def write_export(step: Path, *, heads: int = 4) -> Path:
    """Write step_N/hf with the checksums that the run leaves beside it; returns hf."""
    hf = step / "hf"
    hf.mkdir(parents=True)
    (hf / "model.safetensors").write_bytes(safetensors(qwen3_shapes(QWEN3)))
    (hf / "config.json").write_text(json.dumps(QWEN3 | {"num_attention_heads": heads}), encoding="utf-8")
    Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>")).save(str(hf / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (hf / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (step / "state.json").write_text("{}", encoding="utf-8")
    _write_complete(step, {})
    return hf


def codes(findings: object) -> list[str]:
    return [finding.code for finding in findings]  # type: ignore[attr-defined]


def test_weights_that_the_policy_would_not_read_are_found_before_it_does(tmp_path):
    hf = write_export(tmp_path / "step_000010")
    weights = hf / "model.safetensors"
    content = weights.read_bytes()
    assert codes(weight_findings(hf)) == []
    for broken in (content[:-1], content + b"x", b"", content[:5], b"\xff" * 40):
        weights.write_bytes(broken)
        assert codes(weight_findings(hf)) == ["MDL002"], broken
    index = {"weight_map": dict.fromkeys(qwen3_shapes(QWEN3), "part1.safetensors") | {"lm_head.weight": "part2"}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    weights.rename(hf / "part1.safetensors").write_bytes(content)
    (finding,) = weight_findings(hf)
    assert (finding.code, Path(finding.problem.where).name) == ("MDL001", "part2")
    index["weight_map"]["lm_head.weight"] = "part1.safetensors"
    (hf / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    weights.write_bytes(safetensors(dict.fromkeys(qwen3_shapes(QWEN3), (2,))))
    (finding,) = weight_findings(hf)
    assert (finding.code, finding.severity, finding.problem.where) == ("MDL010", "note", str(weights))


COUNTED = r"got [\d,]+ parameters, expected about"
WRONG_WEIGHTS = {
    "one tensor of four numbers": (lambda _: {"w": (2, 2)}, r"got no tensor of layer 0, expected 4 layers, as"),
    "the last layer is lost": (lambda config: qwen3_shapes(config | {"num_hidden_layers": 3}), "no tensor of layer 3"),
    "a layer more": (lambda config: qwen3_shapes(config | {"num_hidden_layers": 5}), "tensors of layer 4"),
    "another vocabulary": (lambda config: qwen3_shapes(config | {"vocab_size": 98}), r"an embedding of \(98, 64\)"),
    "another width": (lambda config: qwen3_shapes(config | {"hidden_size": 32}), r"an embedding of \(99, 32\)"),
    "wider MLPs": (
        lambda config: qwen3_shapes(config | {"intermediate_size": 192}),
        COUNTED,
    ),
    "no MLPs": (
        lambda config: {k: v for k, v in qwen3_shapes(config).items() if "mlp" not in k},
        COUNTED,
    ),
    "no output layer": (lambda config: qwen3_shapes(config | {"tie_word_embeddings": True}), COUNTED),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_of_another_model_than_config_json_describes_are_found(tmp_path, case):
    hf = write_export(tmp_path / "step_000010")
    shapes, message = WRONG_WEIGHTS[case]
    (hf / "model.safetensors").write_bytes(safetensors(shapes(QWEN3)))
    findings = list(weight_findings(hf))
    assert set(codes(findings)) == {"MDL011"}
    assert re.search(message, str(findings[0]))


@pytest.mark.parametrize("has_sizes", [True, False])  # earlier versions noted none
def test_an_export_of_ours_is_held_against_its_checksums(tmp_path, has_sizes):
    hf = write_export(tmp_path / "step_000010")
    if not has_sizes:
        sums = {name: one.sha256 for name, one in recorded_sums(hf.parent).items()}
        (hf.parent / "COMPLETE").write_text(json.dumps(sums), encoding="utf-8")
    latest = tmp_path / "latest"
    latest.symlink_to("step_000010")
    assert codes(export_findings(latest / "hf")) == []
    (hf / "config.json").write_text("{}", encoding="utf-8")
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
    weights = hf / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # differs, and nobody looks
    (finding,) = export_findings(hf)
    assert (finding.code, finding.severity) == ("MDL006", "note")
    assert (
        finding.problem.what == "1 of 4 files were compared by size alone: beyond 1.86265e-06 GiB no checksum is read"
    )
    weights.write_bytes(bytes(4000))
    assert codes(export_findings(hf)) == ["MDL003", "MDL006"]


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
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    (finding,) = head_findings(tmp_path, loaded.repaired)
    assert finding.code == "MDL004" and finding.problem.where == "policy.megatron_cfg.mtp_num_layers"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"num_nextn_predict_layers": 1}), encoding="utf-8")
    assert not list(head_findings(tmp_path, loaded.repaired))


def test_routes_that_a_gpu_cannot_report_are_named_before_the_start(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"n_routed_experts": 8}), encoding="utf-8")
    environ = {"SCALE": "tiny", "LAUNCHER": "local", "MODEL_PATH": str(tmp_path)}

    def wrong(num_gpus: int, *overrides: str) -> list[str]:
        monkeypatch.setattr("tools.doctor.model.count_gpus", lambda: num_gpus)
        found = route_findings(tmp_path, read_launch("stage1.1", overrides, environ))
        return [finding.problem.where for finding in found]

    bare = "policy.generation.vllm_cfg.enable_prefix_caching=false"
    assert wrong(2, bare) == ["policy.router_replay.enabled"]
    assert wrong(2) == wrong(0, bare) == wrong(2, bare, "policy.router_replay.enabled=false") == []
    environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    assert wrong(2) == ["policy.router_replay.enabled"] and wrong(0) == []
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert wrong(2) == []  # no experts


def test_a_hybrid_is_divided_by_its_layers_and_mamba_groups(tmp_path):
    hybrid = {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
        **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "head_dim": 16, "conv_kernel": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 8, "ssm_state_size": 16},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(hybrid), encoding="utf-8")
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
    vllm = block("policy.generation.vllm_cfg", tensor_parallel_size=tensor, expert_parallel_size=expert)
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
    template.write_text("{{ messages[-1].content }}", encoding="utf-8")
    chosen = f"policy.tokenizer.chat_template={template}"
    assert found_with(chosen) == [("MDL005", "policy.tokenizer.chat_template")]
    # The export of a parent that was trained with that same file carries it.
    (hf / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    assert found_with(chosen) == found_with() == []
    (hf / "chat_template.jinja").unlink()

    other = write_export(tmp_path / "step_000001")
    Tokenizer(models.WordLevel({"<eos>": 1, "<unk>": 0}, unk_token="<unk>")).save(str(other / "tokenizer.json"))
    assert found_with(f"policy.tokenizer.name={other}") == [("MDL005", "policy.tokenizer.name")]
    (hf / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert found_with() == [("MDL007", str(hf))]


def test_packages_are_looked_for_where_the_policy_will_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    for overlay, expected in (("stage1_rlvr.yaml", 5), ("tiny/stage1_rlvr.yaml", 0)):
        loaded = load_config(ROOT / "configs" / overlay, [f"policy.model_name={tmp_path}"])
        assert loaded.repaired is not None
        found = list(package_findings(tmp_path, loaded.repaired))
        assert codes(found) == ["ENG006"] * expected
        assert all("transformer_engine is not installed" in str(finding.problem) for finding in found)


def test_a_cluster_has_the_packages_of_the_gpu_image(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    megatron = "policy.megatron_cfg."
    asked = {"attention_backend": "flash", "gradient_accumulation_fusion": "true", "moe_enable_deepep": "true"}
    for keys, expected in ({}, 0), (asked, 3):
        words = [f"{megatron}{key}={value}" for key, value in keys.items()]
        loaded = load_config(ROOT / "configs/stage1_rlvr.yaml", [f"policy.model_name={tmp_path}", *words])
        assert loaded.repaired is not None
        found = list(image_findings(tmp_path, loaded.repaired))
        assert codes(found) == ["ENG011"] * expected
        assert {finding.problem.where for finding in found} == {f"{megatron}{key}" for key in keys}
        assert all("requirements-gpu.lock" in str(finding.problem) for finding in found)


def test_engine_arguments_are_those_of_the_vllm_that_is_here() -> None:
    assert {"model", "max_num_seqs", "enable_log_requests"} <= engine_argument_names()
    for overlay in ("stage1_rlvr.yaml", "stage2_swe2.yaml", "native_gpu.yaml", "tiny/stage1_rlvr.yaml"):
        wrong = {"max_num_seq": "is max_num_seqs meant?", "zzz": "has no such argument;"}
        words = [f"policy.generation.vllm_kwargs.{name}=1" for name in wrong]
        loaded = load_config(ROOT / "configs" / overlay, words)
        assert loaded.repaired is not None
        found = list(argument_findings(loaded.repaired))
        assert codes(found) == ["ENG003"] * len(wrong), overlay
        for finding, (name, why) in zip(found, wrong.items(), strict=True):
            assert f"vllm_kwargs.{name}: the vLLM of this machine" in str(finding.problem)
            assert why in str(finding.problem)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ x }"),
        ("chat_template.jinja", "{% for %}"),
        ("chat_template.jinja", "{{ x | unknown }}"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": [5, {"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": "x", "eos_token": {"content": null}}'),
        ("tokenizer_config.json", '{"chat_template": "x", "eos_token": 5}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "x"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_one_finding(tmp_path, file, content):
    hf = write_export(tmp_path / "run" / "checkpoints" / "step_000010")
    (hf / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    loaded = load_config(ROOT / "configs/tiny/stage1_rlvr.yaml", [f"policy.model_name={hf}"])
    (finding,) = template_findings(hf, loaded.repaired)
    assert finding.code == "MDL007" and str(hf) in finding.problem.where
    assert "\n" not in str(finding.problem)


def test_a_teacher_has_the_vocabulary_of_the_policy(tmp_path: Path) -> None:
    policy, teacher = (write_export(tmp_path / name / "step_000001") for name in ("policy", "teacher"))
    overrides = [
        f"env.nemo_gym.genrm_model.responses_api_models.genrm_model.model={teacher}",
        "grpo.adv_estimator.name=on_policy_distillation",
        "grpo.adv_estimator.teachers={default: genrm_model}",
        "loss_fn.reference_policy_kl_penalty=0",
    ]
    config = require_valid(load_config(ROOT / "configs/tiny/stage3_rlhf.yaml", overrides))
    assert teacher_problems(config, policy) == []
    Tokenizer(models.WordLevel({"<eos>": 1, "<unk>": 0}, unk_token="<unk>")).save(str(teacher / "tokenizer.json"))
    [problem] = teacher_problems(config, policy)
    assert problem.where.endswith("genrm_model.model")
    assert f"another vocabulary: '<eos>' is 1 in {teacher}, 0 in {policy}" in str(problem)
    (teacher / "tokenizer.json").unlink()
    assert teacher_problems(config, policy) == []  # nothing can be compared


@pytest.mark.parametrize(("length", "num"), [(512, 1), (256, 0)])
def test_a_teacher_must_read_the_longest_rollout_and_one_token(length: int, num: int, tmp_path: Path) -> None:
    hf = write_export(tmp_path / "step_000001")
    server = "env.nemo_gym.genrm_model.responses_api_models.genrm_model"
    overrides = [
        f"{server}.model={hf}",
        f"policy.max_total_sequence_length={length}",
        "grpo.adv_estimator.name=on_policy_distillation",
        "grpo.adv_estimator.teachers={default: genrm_model}",
        "loss_fn.reference_policy_kl_penalty=0",
    ]
    kwargs = {"vllm_serve_kwargs": {"~max_model_len": None}}
    instance = {"responses_api_models": {"genrm_model": kwargs}}
    overlay = {"defaults": f"{ROOT}/configs/tiny/stage3_rlhf.yaml", "env": {"nemo_gym": {"genrm_model": instance}}}
    (tmp_path / "taught.yaml").write_text(json.dumps(overlay), encoding="utf-8")
    config = require_valid(load_config(tmp_path / "taught.yaml", overrides))
    found = list(teacher_findings(config))
    assert len(found) == num
    for one in found:
        assert one.problem.where == f"{server}.model" and "config.json with 512 tokens" in str(one.problem)
