import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import ConfigError
from recipes.generation.engine_args import engine_args, route_problems, stop_token_ids
from tests.configuration import block


def config(*, vllm_kwargs: dict[str, Any] | None = None, **vllm_cfg: Any) -> Any:
    chat = block("policy.generation.vllm_cfg.http_server_serving_chat_kwargs", reasoning_parser="think")
    defaults = {
        "precision": "float32",
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "expert_parallel_size": 1,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 256,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "enable_return_routed_experts": True,
        "expose_http_server": False,
        "http_server_serving_chat_kwargs": chat,
    }
    return block(
        "policy.generation",
        temperature=0.9,
        top_p=0.8,
        top_k=None,
        vllm_cfg=block("policy.generation.vllm_cfg", **defaults | vllm_cfg),
        vllm_kwargs=vllm_kwargs or {},
    )


def args(cfg: Any, *, is_cpu: bool = True) -> dict[str, Any]:
    return engine_args(cfg, model_path="/model", seed=3, is_cpu=is_cpu)


def test_cpu_loads_from_shared_memory_in_one_process() -> None:
    result = args(config())
    assert result["weight_transfer_config"] == {"backend": "shm"}
    assert result["distributed_executor_backend"] == "uni"
    assert result["scheduler_cls"].endswith(".RolloutScheduler")


def test_cuda_receives_over_nccl_with_the_overlapping_scheduler() -> None:
    result = args(config(tensor_parallel_size=8, expert_parallel_size=8), is_cpu=False)
    assert result["weight_transfer_config"] == {"backend": "nccl"}
    assert result["distributed_executor_backend"] == "mp"
    assert result["scheduler_cls"].endswith(".RolloutAsyncScheduler")
    assert result["enable_expert_parallel"] is True


def test_http_requests_that_say_nothing_sample_as_training_does() -> None:
    assert args(config())["override_generation_config"] == {"temperature": 0.9, "top_p": 0.8, "top_k": 0}


def test_tokenizer_and_reasoning_parser_only_with_the_server() -> None:
    without, with_server = args(config()), args(config(expose_http_server=True))
    assert without["skip_tokenizer_init"] is True and "reasoning_parser" not in without
    assert with_server["skip_tokenizer_init"] is False and with_server["reasoning_parser"] == "think"


def test_vllm_kwargs_win_over_the_rest() -> None:
    assert args(config(vllm_kwargs={"max_num_seqs": 7, "seed": 9}))["seed"] == 9


def test_speculative_decoding_on_a_cpu_is_refused_where_it_would_sample_wrong_tokens() -> None:
    with pytest.raises(ConfigError) as refused:
        args(config(vllm_kwargs={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}))
    assert "speculative_config.method: got ngram; on a CPU only the model's own heads" in str(refused.value)
    assert "enable_prefix_caching: with speculative_config on a CPU, vLLM has no code" in str(refused.value)


def test_engines_that_are_pushed_to_first_read_no_weights_unless_a_push_cannot_reach_all() -> None:
    def load_format(*, is_cpu: bool = True, **vllm_kwargs: Any) -> object:
        cfg = config(vllm_kwargs=vllm_kwargs)
        result = engine_args(cfg, model_path="/model", seed=3, is_cpu=is_cpu, loads_weights=False)
        return result.get("load_format")

    assert load_format() == load_format(max_num_seqs=7) == "dummy"
    assert load_format(speculative_config={"method": "mtp"}, is_cpu=False) == "dummy"
    for other in ({"method": "eagle3", "model": "/drafter"}, {"method": "mtp", "model": "/drafter"}):
        assert load_format(speculative_config=other, is_cpu=False) is None
    assert load_format(quantization="fp8") is None
    assert load_format(load_format="runai_streamer") == "runai_streamer"
    assert "load_format" not in args(config()), "an engine that is told to load its weights reads them"


def test_stop_tokens_are_collected_from_every_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
    added = [{"id": 8, "content": "<other>"}, {"id": 9, "content": "<end>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}), encoding="utf-8")
    assert stop_token_ids(tmp_path) == (2, 4, 9)


def test_a_model_without_an_end_has_no_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}), encoding="utf-8")
    assert stop_token_ids(tmp_path) == ()


@pytest.mark.parametrize("wrong", ["7", True, [7, "8"], 1.5])
def test_an_end_token_that_is_no_id_is_named(tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": wrong}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id: got .*, expected a token id"):
        stop_token_ids(tmp_path)


@pytest.mark.parametrize(
    ("config_json", "is_reported"),
    [({"n_routed_experts": 8}, True), ({"num_experts": 4}, True), ({"num_experts": 0}, False), ({}, False)],
)
def test_routes_are_reported_of_models_with_experts(
    tmp_path: Path, config_json: dict[str, int], is_reported: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json), encoding="utf-8")

    def found(**vllm_cfg: Any) -> Any:
        result = engine_args(config(**vllm_cfg), model_path=str(tmp_path), seed=3, is_cpu=True)
        return result["enable_return_routed_experts"]

    assert found() is is_reported and found(enable_return_routed_experts=False) is False


def test_on_a_gpu_routes_need_a_prefix_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_routed_experts": 8}', encoding="utf-8")
    bare = config(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"policy\.router_replay\.enabled: on a GPU, vLLM keeps no routes without"):
        engine_args(bare, model_path=str(tmp_path), seed=3, is_cpu=False)
    assert engine_args(bare, model_path=str(tmp_path), seed=3, is_cpu=True)["enable_return_routed_experts"]


@pytest.mark.parametrize(
    ("kwargs", "environ", "wrong"),
    [
        ({}, {}, None),
        ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, None),
        ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER=0, and only"),
        ({"speculative_config": {"method": "mtp"}}, {}, None),
        ({"speculative_config": {"method": "suffix"}}, {}, "method suffix, vLLM takes its first model runner"),
    ],
)
def test_on_a_gpu_routes_need_the_second_model_runner(
    kwargs: dict[str, Any], environ: dict[str, str], wrong: str | None
) -> None:
    problems = route_problems(replace(config(enable_prefix_caching=True), vllm_kwargs=kwargs), environ)
    assert [problem.where for problem in problems] == (["policy.router_replay.enabled"] if wrong else [])
    assert wrong is None or wrong in str(problems[0])
