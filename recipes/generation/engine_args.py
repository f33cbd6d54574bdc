"""From the `policy.generation` section to vLLM's engine arguments. Pure; imports no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.errors import ConfigError, Problem
from recipes.weight_files import require_object

if TYPE_CHECKING:
    from recipes.config.tree import GenerationConfig

SERVED_MODEL_NAME = "policy"  # what an HTTP request puts in `model`

NEED_FILES = frozenset({"load_format", "quantization"})
"""Arguments in `vllm_kwargs` with which an engine reads the model's files, also when a push follows."""

OWN_HEADS = ("mtp", "nemotron_h_mtp")
"""Names of speculative decoding with the model's own multi-token heads: a push reaches them, and a CPU has the code."""

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # variable: unset, vLLM takes the second one where that can do what is asked
NOT_IN_SECOND_RUNNER = ("suffix", "medusa", "mlp_speculator", "custom_class")  # methods of speculative decoding

CPU_ENV: Mapping[str, str] = {
    # The memory of packed weights is used again at the next push: fresh memory takes longer than what is written to it.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "OMP_NUM_THREADS": "1",  # unset, OpenMP threads spin against each other: stalls of 4-17 s per batch
    "TORCHDYNAMO_DISABLE": "1",  # a helper is compiled at the first request even with enforce_eager: 2.4 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each worker process needs a NUMA node of its own
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM turns the executor "uni" into "mp", one more process
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about Triton and a reload of layers without weights, at each push
}
ENV: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "lo",  # an engine is on one node; else each of its groups listens on the node's address
    "HF_HUB_OFFLINE": "1",  # the model is a directory
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # unset, vLLM runs the code that any installed package registers with it
}


def engine_args(
    cfg: GenerationConfig, *, model_path: str, seed: int, is_cpu: bool, loads_weights: bool = True
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `AsyncEngineArgs`.

    Without `loads_weights` the model is built with small random weights, and only a push makes it usable: vLLM's
    "dummy" format, which fills parameters and saved buffers and leaves what it computes itself (rotary tables) as it
    is. A push replaces all that a checkpoint holds, multi-token heads included; for the CPU, see `weight_transfer.py`.
    It does not reach a draft model of other files, and vLLM derives the tensors of a quantized model while it reads
    them: in such cases the files are read all the same.

    `logprobs_mode` is "processed": the log-probability of a token under the distribution from which it was sampled. At
    temperature T this is the log-softmax of logits / T, which is what the trainer computes. With top-p or top-k it
    would be that of the filtered distribution, which the trainer does not compute; the configuration refuses both.

    Raises `ConfigError` on a CPU for speculative decoding of another kind than `cpu_hybrid.py` makes right, and on a
    GPU for routes without a prefix cache.
    """
    vllm_cfg = cfg.vllm_cfg
    reports_routes = vllm_cfg.enable_return_routed_experts and has_experts(Path(model_path))
    if is_cpu and (problems := speculation_problems(cfg)):
        raise ConfigError(problems)
    if reports_routes and not is_cpu and (problems := route_problems(cfg, os.environ)):
        raise ConfigError(problems)
    num_ranks = vllm_cfg.tensor_parallel_size * vllm_cfg.pipeline_parallel_size
    args: dict[str, Any] = {
        "model": model_path,
        "seed": seed,
        "served_model_name": [SERVED_MODEL_NAME],
        "dtype": vllm_cfg.precision,
        "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
        "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
        "pipeline_parallel_size": vllm_cfg.pipeline_parallel_size,
        # "uni": the one worker lives in the EngineCore process. "mp": one process per GPU of the actor. Left to itself,
        # vLLM would choose its Ray executor in a placement group, which refuses a bundle of several GPUs.
        "distributed_executor_backend": "uni" if num_ranks == 1 else "mp",
        "enable_expert_parallel": vllm_cfg.expert_parallel_size > 1,
        "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
        "max_model_len": vllm_cfg.max_model_len,
        "enforce_eager": vllm_cfg.enforce_eager,
        "enable_prefix_caching": vllm_cfg.enable_prefix_caching,
        "enable_return_routed_experts": reports_routes,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "recipes.generation.weight_transfer.WorkerExtension",
        "weight_transfer_config": {"backend": "shm" if is_cpu else "nccl"},
        "scheduler_cls": f"recipes.generation.core.Rollout{'' if is_cpu else 'Async'}Scheduler",
        "skip_tokenizer_init": not vllm_cfg.expose_http_server,  # token ids in, token ids out
        "disable_log_stats": True,
        # For HTTP requests that leave these open. Otherwise the model's generation_config.json would decide.
        "override_generation_config": {"temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": 0},  # 0 is off
    }
    reasoning_parser = vllm_cfg.http_server_serving_chat_kwargs.reasoning_parser
    if vllm_cfg.expose_http_server and reasoning_parser is not None:
        args["reasoning_parser"] = reasoning_parser
    if not loads_weights and not _needs_files(cfg.vllm_kwargs):
        args["load_format"] = "dummy"
    return args | dict(cfg.vllm_kwargs)


def _needs_files(vllm_kwargs: Mapping[str, Any]) -> bool:
    speculation = vllm_kwargs.get("speculative_config")
    if speculation and (speculation.get("method") not in OWN_HEADS or {"model", "quantization"} & set(speculation)):
        return True
    return bool(NEED_FILES & set(vllm_kwargs))


def speculation_problems(cfg: GenerationConfig) -> list[Problem]:
    """Return why tokens cannot be guessed ahead as asked on a machine without GPUs."""
    speculation = cfg.vllm_kwargs.get("speculative_config")
    if not speculation:
        return []
    problems = []
    if speculation.get("method") not in OWN_HEADS:
        where = "policy.generation.vllm_kwargs.speculative_config.method"
        wrong = f"got {speculation.get('method')}; on a CPU only the model's own heads sample the right tokens"
        problems.append(Problem(where=where, wrong=wrong, fix=f"write {OWN_HEADS[0]}, or run on a GPU"))
    if cfg.vllm_cfg.enable_prefix_caching:
        where = "policy.generation.vllm_cfg.enable_prefix_caching"
        wrong = "with speculative_config on a CPU, vLLM has no code for the prefix cache"
        problems.append(Problem(where=where, wrong=wrong, fix="write false, or run on a GPU"))
    return problems


def route_problems(cfg: GenerationConfig, environ: Mapping[str, str]) -> list[Problem]:
    """Return why engines on GPUs cannot report routes as asked: vLLM's second model runner alone does."""
    where, problems = "policy.router_replay.enabled", []
    if not cfg.vllm_cfg.enable_prefix_caching:
        wrong = "on a GPU, vLLM keeps no routes without its prefix cache"
        fix = "write false, or policy.generation.vllm_cfg.enable_prefix_caching: true"
        problems.append(Problem(where=where, wrong=wrong, fix=fix))
    if environ.get(MODEL_RUNNER, "").lower() in ("0", "false"):
        wrong = f"{MODEL_RUNNER}={environ[MODEL_RUNNER]}, and only vLLM's second model runner reports routes"
        problems.append(Problem(where=where, wrong=wrong, fix=f"write false, or unset {MODEL_RUNNER}"))
    method = (cfg.vllm_kwargs.get("speculative_config") or {}).get("method")
    if method in NOT_IN_SECOND_RUNNER:
        wrong = f"with speculative_config.method {method}, vLLM takes its first model runner, which reports no routes"
        problems.append(Problem(where=where, wrong=wrong, fix=f"write false, or {OWN_HEADS[0]} as the method"))
    return problems


def has_experts(model_path: Path) -> bool:
    """Whether a model directory says that the model has experts that tokens are routed to."""
    config = _read(model_path / "config.json")
    return any(config.get(key) for key in ("n_routed_experts", "num_experts", "num_local_experts"))


def stop_token_ids(model_path: Path) -> tuple[int, ...]:
    """Return the ids that end an answer: every end-of-sequence id that the model directory names.

    vLLM without a tokenizer would know only those of `generation_config.json`.
    """
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        eos = _read(model_path / file).get("eos_token_id")
        given = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(token_id) is int for token_id in given):
            where, expected = f"{model_path / file}: eos_token_id", "a token id, or a list of them"
            raise ConfigError(Problem(where=where, got=json.dumps(eos), expected=expected, fix="correct it"))
        ids.update(given)
    eos_token = _read(model_path / "tokenizer_config.json").get("eos_token")
    content = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    added = _read(model_path / "tokenizer.json").get("added_tokens") or []
    ids.update(token["id"] for token in added if token["content"] == content)
    return tuple(sorted(ids))


def _read(path: Path) -> dict[str, Any]:
    return require_object(path, fix="copy the model directory again") if path.is_file() else {}
