"""Sampling, engine arguments and the ports of the engines."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.cluster.ports import PORT_TABLE
from recipes.config.keys.derive import max_age, started_judges, template_kwargs
from recipes.config.keys.schema import KeyProblem, show
from recipes.config.rules.validation import GENERATION, VLLM
from recipes.config.tree import Config

ENGINE_PORTS = "generation engines: their clients and HTTP servers"  # their row of the port table
TOOL_PARSERS = ("qwen3_coder", "hermes")  # the NOTATIONS of environments/chat/tool_calls.py
REASONING_PARSERS = ("nemotron_v3", "qwen3")  # both read <think> ... </think>
OURS = frozenset({"logprobs_mode", "scheduler_cls", "weight_transfer_config", "worker_extension_cls"})
HAVE_A_KEY = {
    "tensor_parallel_size": f"{VLLM}.tensor_parallel_size",
    "pipeline_parallel_size": f"{VLLM}.pipeline_parallel_size",
    "gpu_memory_utilization": f"{VLLM}.gpu_memory_utilization",
    "max_model_len": f"{VLLM}.max_model_len",
    "enforce_eager": f"{VLLM}.enforce_eager",
    "enable_prefix_caching": f"{VLLM}.enable_prefix_caching",
    "kv_cache_dtype": f"{VLLM}.kv_cache_dtype",
    "dtype": f"{VLLM}.precision",
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "seed": "grpo.seed",
}  # vLLM's engine argument -> the key that sets it


def sampling_is_whole_distribution(config: Config) -> Iterator[KeyProblem]:
    """Refuse top-k: the engine's log-probabilities would not be the trainer's."""
    for name in ("top_k", "val_top_k"):
        value = getattr(config.policy.generation, name)
        if value is not None:
            fix = "NeMo Gym requests carry temperature and top_p only; delete this key"
            also = (f"{GENERATION}.top_k",) if name == "val_top_k" else ()
            yield KeyProblem(key=f"{GENERATION}.{name}", got=str(value), expected="null", fix=fix, also=also)
            return  # val_top_k follows top_k


def requests_share_the_template(config: Config) -> Iterator[KeyProblem]:
    """Require the HTTP server to render requests with the arguments of all other rollouts."""
    vllm = config.policy.generation.vllm_cfg
    served = vllm.http_server_serving_chat_kwargs.default_chat_template_kwargs or {}
    used = template_kwargs(config.policy)
    if vllm.expose_http_server and served != used:
        key = f"{VLLM}.http_server_serving_chat_kwargs.default_chat_template_kwargs"
        also = ("policy.tokenizer.chat_template_kwargs",)
        fix = "requests over HTTP would get other prompts than rollouts; write the same in both keys"
        yield KeyProblem(key=key, got=show(served), expected=f"{also[0]} = {show(used)}", fix=fix, also=also)


def parsers_are_built(config: Config) -> Iterator[KeyProblem]:
    """Refuse parsers of tool calls and of reasoning whose notation rollouts do not read."""
    chat = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        value = getattr(chat, name)
        if value is not None and value not in known:
            key = f"{VLLM}.http_server_serving_chat_kwargs.{name}"
            fix = "rollouts read no other notation; correct the name, or launch with ENGINE=nemo_rl"
            expected = f"{', '.join(known)} or null (native engine)"
            yield KeyProblem(key=key, got=value, expected=expected, fix=fix)


def engine_arguments_are_free(config: Config) -> Iterator[KeyProblem]:
    """Refuse engine arguments on which weight pushes and log-probabilities depend."""
    for name in sorted(OURS & config.policy.generation.vllm_kwargs.keys()):
        wrong = "weight pushes and log-probabilities depend on the value that the native engine sets"
        yield KeyProblem(key=f"{GENERATION}.vllm_kwargs.{name}", wrong=wrong, fix="remove it")


def engine_arguments_have_one_place(config: Config) -> Iterator[KeyProblem]:
    """Refuse engine arguments that have a key of their own."""
    for name in config.policy.generation.vllm_kwargs:
        if name in HAVE_A_KEY:
            wrong, fix = "this engine argument has a key of its own", f"set {HAVE_A_KEY[name]}"
            yield KeyProblem(key=f"{GENERATION}.vllm_kwargs.{name}", wrong=wrong, fix=fix)


def drafts_fit_one_step(config: Config) -> Iterator[KeyProblem]:
    """With speculative decoding, require a step to hold the drafts of every running sequence.

    vLLM's first model runner forgets how many drafts of a sequence were accepted when a step leaves it out, and Mamba
    layers then go on from the state of another token.
    """
    engine = config.policy.generation.vllm_kwargs
    drafts = (engine.get("speculative_config") or {}).get("num_speculative_tokens")
    sequences, tokens = engine.get("max_num_seqs"), engine.get("max_num_batched_tokens")
    if isinstance(drafts, int) and isinstance(sequences, int) and isinstance(tokens, int):
        least = sequences * (1 + drafts)
        if tokens < least:
            also = (f"{GENERATION}.vllm_kwargs.max_num_seqs", f"{GENERATION}.vllm_kwargs.speculative_config")
            fix = f"{sequences} sequences with {drafts} drafts each need so many; raise this, or lower max_num_seqs"
            key = f"{GENERATION}.vllm_kwargs.max_num_batched_tokens"
            yield KeyProblem(key=key, got=show(tokens), expected=f"at least {least}", fix=fix, also=also)


def replayed_routes_are_reported(config: Config) -> Iterator[KeyProblem]:
    """Require engines to report the routes that training replays, and only then."""
    replay, key = config.policy.router_replay.enabled, f"{VLLM}.enable_return_routed_experts"
    if config.policy.generation.vllm_cfg.enable_return_routed_experts != replay:
        also, got = ("policy.router_replay.enabled",), show(not replay)
        fix = "there would be no route to replay" if replay else "nothing would read them"
        expected = f"{also[0]} = {show(replay)}"
        yield KeyProblem(key=key, got=got, expected=expected, fix=f"{fix}; delete this key", also=also)


def equal_bits_have_one_order(config: Config) -> Iterator[KeyProblem]:
    """With `determinism: full`, refuse what lets the time at which an answer ends change a sum.

    Floating-point sums depend on what is computed together: on the other sequences of a batch, and on what a prefix
    cache holds. Which weights sample a token depends on time as soon as generation runs ahead of training.
    """
    if config.policy.determinism != "full":
        return
    own, fix = ("policy.determinism",), "two runs would differ; write this, or policy.determinism=none"
    values = {
        "grpo.async_grpo.max_trajectory_age_steps": (max_age(config.grpo.async_grpo), 0),
        "grpo.batch_multiplier": (config.grpo.batch_multiplier, 1.0),  # else the groups that end first fill a step
        f"{GENERATION}.vllm_kwargs.max_num_seqs": (config.policy.generation.vllm_kwargs.get("max_num_seqs"), 1),
        f"{VLLM}.enable_prefix_caching": (config.policy.generation.vllm_cfg.enable_prefix_caching, False),
    }
    for key, (got, expected) in values.items():
        if got != expected:
            yield KeyProblem(key=key, got=show(got), expected=show(expected), fix=fix, also=own)
    for judge in started_judges(config):
        for name, expected in (("max_num_seqs", 1), ("enable_prefix_caching", False)):
            if (got := judge.engine_arguments.get(name)) != expected:
                key = f"{judge.key}.vllm_serve_kwargs.{name}"
                yield KeyProblem(key=key, got=show(got), expected=show(expected), fix=fix, also=own)


def ports_do_not_collide(config: Config) -> Iterator[KeyProblem]:
    """Require a non-empty range of engine ports that nothing else of the port table uses."""
    low, high = config.policy.generation.port_range_low, config.policy.generation.port_range_high
    key, also = f"{GENERATION}.port_range_high", (f"{GENERATION}.port_range_low",)
    if low >= high:
        expected, fix = f"more than {also[0]} = {low}", "no port would lie in the range; raise it"
        yield KeyProblem(key=key, got=str(high), expected=expected, fix=fix, also=also)
    for other in PORT_TABLE:
        if other.name != ENGINE_PORTS and low < other.high and other.low < high:
            fix = f"those belong to: {other.name}; choose others, see recipes/cluster/ports.py"
            expected = f"a range outside [{other.low}, {other.high})"
            yield KeyProblem(key=key, got=f"[{low}, {high})", expected=expected, fix=fix, also=also)
