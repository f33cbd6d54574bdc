import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import ConfigError
from recipes.generation.engine_args import engine_args, stop_token_ids


def config(*, vllm_kwargs: dict[str, Any] | None = None, **vllm_cfg: Any) -> Any:
    chat = SimpleNamespace(reasoning_parser="think")
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
        "expose_http_server": False,
        "http_server_serving_chat_kwargs": chat,
    }
    return SimpleNamespace(
        temperature=0.9,
        top_p=0.8,
        top_k=None,
        vllm_cfg=SimpleNamespace(**defaults | vllm_cfg),
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


def test_vllm_kwargs_may_not_touch_what_the_refit_needs() -> None:
    with pytest.raises(ConfigError, match=r"vllm_kwargs\.scheduler_cls: set, but .*; remove it"):
        args(config(vllm_kwargs={"scheduler_cls": "x"}))


def test_stop_tokens_are_collected_from_every_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    added = [{"id": 8, "content": "<other>"}, {"id": 9, "content": "<end>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert stop_token_ids(tmp_path) == (2, 4, 9)


def test_a_model_without_an_end_has_no_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_token_ids(tmp_path) == ()
