"""What the native engine refuses: each rule's line, what stages need that is still to come, and keys with one value."""

import pytest

from recipes.config.keys.derive import AGENTS, servers
from recipes.config.keys.schema import CONFIG_DIR, declared
from recipes.config.load import config_path, load_config, load_stages, refusals, require_valid
from recipes.config.rules.all import REFUSALS
from recipes.config.tree.servers import AGENT_TYPES
from recipes.environments.instances import ALL_VERIFIERS
from recipes.errors import ConfigError

TINY = CONFIG_DIR / "tiny" / "stage1_rlvr.yaml"
MEGATRON = "policy.megatron_cfg"
TO_COME = "the native engine does not have the "
POLICY_MODEL = "env.nemo_gym.policy_model.responses_api_models.vllm_model"
CHAT = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
NATIVE_CASES = {
    "models_to_come": (
        ["env.nemo_gym.grader={responses_api_models: {vllm_model: {model: m}}}"],
        "env.nemo_gym.grader: this judge has no address; give its base_url, or write its server as local_vllm_model: "
        "then the run starts it on nodes of its own",
    ),
    "engines_fit_a_node": (
        [
            "cluster.num_nodes=3",
            "policy.generation.colocated.resources={num_nodes: 2, gpus_per_node: 2}",
            "policy.generation.vllm_cfg.tensor_parallel_size=4",
        ],
        "policy.generation.vllm_cfg.tensor_parallel_size: got TP * PP = 4, expected TP * PP to be at most "
        "cluster.gpus_per_node = 2; an engine lies within one node (native engine); lower it",
    ),
    "grouped_experts_are_rounded": (
        [f"{MEGATRON}.moe_grouped_gemm=true"],
        f"{MEGATRON}.moe_grouped_gemm: got true, expected false (native engine); policy.precision is float32, which "
        "its kernels round; set this to false",
    ),
    "judges_fit_a_node": (
        [
            "env.nemo_gym.num_gpu_nodes=2",
            "env.nemo_gym.grader={responses_api_models: {local_vllm_model: {model: m, vllm_serve_kwargs: "
            "{tensor_parallel_size: 4}}}}",
        ],
        "env.nemo_gym.grader.responses_api_models.local_vllm_model.vllm_serve_kwargs: got TP * PP = 4, expected "
        "TP * PP to divide cluster.gpus_per_node = 2; an engine of a judge lies within one node (native engine); "
        "change tensor_parallel_size",
    ),
    "engines_of_judges_are_ours": (
        [
            "env.nemo_gym.num_gpu_nodes=1",
            "env.nemo_gym.grader={responses_api_models: {local_vllm_model: {model: m, vllm_serve_kwargs: "
            "{port: 8000}}}}",
        ],
        "env.nemo_gym.grader.responses_api_models.local_vllm_model.vllm_serve_kwargs.port: the run sets this argument "
        "itself; remove it (native engine)",
    ),
    "agents_sample_from_the_policy": (
        [
            "env.nemo_gym.mine={responses_api_agents: {external_agent: {resources_server: {name: mcqa}, "
            "url: host:8000}}}"
        ],
        'env.nemo_gym.mine.responses_api_agents.external_agent.url: got "host:8000", expected http://host:port; give '
        "the address of the agent's server",
    ),
    "requests_share_the_template": (
        [
            "policy.generation.vllm_cfg.expose_http_server=true",
            "policy.tokenizer.chat_template_kwargs={enable_thinking: true}",
            f"{CHAT}.default_chat_template_kwargs={{enable_thinking: false}}",
        ],
        f'{CHAT}.default_chat_template_kwargs: got {{"enable_thinking": false}}, expected '
        "policy.tokenizer.chat_template_kwargs = "
        '{"enable_thinking": true}; requests over HTTP would get other prompts than rollouts; write the same in both '
        "keys",
    ),
    "parsers_are_built": (
        [f"{CHAT}.tool_parser=llama3_json"],
        f"{CHAT}.tool_parser: got llama3_json, expected qwen3_coder, hermes or null (native engine); rollouts read no "
        "other notation; correct the name, or launch with ENGINE=nemo_rl",
    ),
    "engine_arguments_are_free": (
        ["policy.generation.vllm_kwargs={max_num_seqs: 8, logprobs_mode: raw_logprobs}"],
        "policy.generation.vllm_kwargs.logprobs_mode: weight pushes and log-probabilities depend on the value that "
        "the native engine sets; remove it",
    ),
    "offloaded_weights_have_16_bits": (
        [f"{MEGATRON}.optimizer.optimizer_cpu_offload=true", f"{MEGATRON}.optimizer.optimizer_offload_fraction=0.5"],
        f"{MEGATRON}.optimizer.optimizer_cpu_offload: got true, expected false with policy.precision float32; Megatron "
        "offloads only from weights in 16 bits; set it to false, or policy.precision to bfloat16",
    ),
    "metrics_are_measured": (
        ["checkpointing.metric_name=val:total_reward/mean"],
        "checkpointing.metric_name: got val:total_reward/mean, expected one of val:accuracy, val:AGENT/accuracy, "
        "val:pass_k, val:avg_length, val:num_failed (native engine); name accuracy for the mean reward, which is "
        "total_reward/mean in published files",
    ),
}


@pytest.mark.parametrize("name", NATIVE_CASES)
def test_combination_is_refused_natively(name: str) -> None:
    overrides, line = NATIVE_CASES[name]
    loaded = load_config(TINY, overrides)
    assert loaded.problems == ()
    assert [str(problem) for problem in refusals(loaded)] == [f"command line: {line}"]


RANKS, STOPS = "checkpointing.metric_name=val:%s", "grpo.stop_at_validation_metric=%s"
METRICS = {
    "math/accuracy": True,
    "pass_k": True,
    "greedy_accuracy": True,
    "math/greedy_accuracy": True,
    "math/pass_k": False,
    "acuracy": False,
    "val:accuracy": False,
}


@pytest.mark.parametrize("option", [RANKS, STOPS])
@pytest.mark.parametrize("name", METRICS)
def test_only_what_a_validation_measures_ranks_checkpoints_or_ends_a_run(name: str, option: str) -> None:
    options = [option % name, "grpo.val_num_generations_per_prompt=2"]
    if option is STOPS:
        options.append("grpo.stop_at_validation_threshold=0.5")
    sampled, greedy = (load_config(TINY, [*options, f"grpo.val_greedy={is_on}"]) for is_on in ("false", "true"))
    assert not sampled.problems and not greedy.problems
    assert (refusals(greedy) == []) == METRICS[name]
    assert (refusals(sampled) == []) == (METRICS[name] and "greedy" not in name)


OFF = "env.nemo_gym.brief={_copy: policy_model, responses_api_models: {vllm_model: {%s}}}"
MINE = "env.nemo_gym.mine={responses_api_agents: {simple_agent: {model_server: {name: %s}}}}"
VARIANTS = {
    "another template": ([OFF % "chat_template_kwargs: {enable_thinking: false}", MINE % "brief"], None),
    "the published settings": ([OFF % "sequential_reasoning_allowed: false", MINE % "policy_model"], None),
    "processes of its server": ([OFF % "num_workers: 8", MINE % "brief"], None),
    "arguments of the policy itself": ([f"{POLICY_MODEL}.chat_template_kwargs.enable_thinking=false"], None),
    "a setting that is fixed": (
        [OFF % "sequential_reasoning_allowed: true"],
        "env.nemo_gym.brief.responses_api_models.vllm_model.sequential_reasoning_allowed: got true, expected false; "
        "rollouts of every variant work this way (native engine); remove this key",
    ),
    "a setting that nothing reads": (
        [OFF % "model: other"],
        "env.nemo_gym.brief.responses_api_models.vllm_model.model: no code reads this setting of a variant; a variant "
        "of the policy can set chat_template_kwargs (native engine); remove this key",
    ),
    "an agent of a judge": (
        [
            "env.nemo_gym.judge={responses_api_models: {vllm_model: {base_url: 'http://h:1/v1', model: m}}}",
            MINE % "judge",
        ],
        "env.nemo_gym.mine.responses_api_agents.simple_agent.model_server.name: got judge, expected policy_model, or a "
        "model server that copies it; name one: rollouts sample from the policy",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_an_agent_samples_from_the_policy_or_from_a_variant_of_it(name: str) -> None:
    overrides, line = VARIANTS[name]
    loaded = load_config(TINY, overrides)
    assert loaded.problems == ()
    assert [str(problem) for problem in refusals(loaded)] == ([] if line is None else [f"command line: {line}"])


def test_every_native_rule_is_tested() -> None:
    assert set(NATIVE_CASES) == {rule.__name__ for rule in REFUSALS}


# What a stage needs, written down from the published files: environments, agents of its own kind, model servers.
PIVOT = "single_step_tool_use_with_argument_comparison_resources_server"
NEEDS = {
    "stage1_rlvr": {
        "calendar", "code_gen", "equivalence_llm_judge", "genrm_compare_resources_server", "instruction_following",
        "inverse_if", "jailbreak_detection", "lc_judge", "math_formal_lean", "math_with_judge", "mcqa",
        "multichallenge", "ns_tools", "over_refusal_detection", "reasoning_gym", f"search_pivot_{PIVOT}", PIVOT,
        "structured_outputs", "swerl_gen_resources_server", f"toolcall_schema_{PIVOT}", "workplace_assistant",
        "genrm_model", "nl2bash_judge_model", "safety_judge_model", "policy_model", "policy_model_reasoning_off",
    },
    "stage2_swe1": {f"swe_pivot_{PIVOT}", "policy_model"},
    "stage2_swe2": {"swe_agents_train", "swe_agents_val", "policy_model"},
    "stage3_rlhf": {
        PIVOT, "genrm_compare_resources_server", "genrm_model", "policy_model", "policy_model_reasoning_off",
    },
}  # fmt: skip


@pytest.mark.parametrize("stage", NEEDS)
@pytest.mark.parametrize("directory", ["", "b200/"])
def test_stage_has_exactly_the_published_servers(stage: str, directory: str) -> None:
    config = require_valid(load_config(CONFIG_DIR / f"{directory}{stage}.yaml"))
    instances = config.env.nemo_gym.instances
    single = {name for name, block in instances.items() if "simple_agent" not in (block.get(AGENTS) or {})}
    further = {"math_formal_lean_refinement_agent"} | {f"{name.removesuffix('_resources_server')}_agent" for name in
                                                       NEEDS[stage] if name.endswith(PIVOT)}  # fmt: skip
    only_b200 = {"terminal_pivot"} if (directory, stage) == ("b200/", "stage1_rlvr") else set()
    assert single - further == NEEDS[stage] | only_b200
    named = {settings["resources_server"]["name"] for name, _, settings in servers(config, AGENTS)
             if "resources_server" in settings}  # fmt: skip
    assert named == {name for name, _, _ in servers(config, "resources_servers")}  # each has an agent


@pytest.mark.parametrize("stage", NEEDS)
@pytest.mark.parametrize("directory", ["", "tiny/"])
def test_stage_names_everything_that_is_still_to_come(stage: str, directory: str) -> None:
    """One line each, and none for what is there: a name leaves the list when its environment is built."""
    loaded = load_config(CONFIG_DIR / f"{directory}{stage}.yaml")
    config = require_valid(loaded)
    expected = {name for name, server, _ in servers(config, "resources_servers") if server not in ALL_VERIFIERS}
    expected |= {name for name, server, settings in servers(config, AGENTS) if server not in AGENT_TYPES
                 and settings.get("resources_server", {}).get("name") not in expected}  # fmt: skip
    named = [problem for problem in refusals(loaded) if problem.wrong.startswith(TO_COME)]
    assert len(named) == len(expected)
    assert {problem.where.rpartition("env.nemo_gym.")[2] for problem in named} == expected
    assert all(f" {problem.where.rpartition('.')[2]} yet" in problem.wrong for problem in named)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"{MEGATRON}.pipeline_model_parallel_size=1", None),
        (f"{MEGATRON}.moe_token_dispatcher_type=allgather", None),
        (f"{MEGATRON}.mtp_detach_heads=false", "the heads of the native policy are always detached"),
        (f"{MEGATRON}.mtp_use_repeated_layer=false", "published models have one layer for all heads"),
        (f"{MEGATRON}.optimizer.params_dtype=bfloat16", "master weights are always float32"),
        (
            f"{MEGATRON}.fp8_cfg.enabled=true",
            "it needs Transformer Engine's linear layers, and the native policy has Megatron's own",
        ),
        (
            "policy.generation.top_p=0.9",
            "the trainer does not filter as the engine would: every importance weight would be biased",
        ),
        (
            "policy.hf_config_overrides.rope_theta=1",
            "the trainer alone would follow them, not the engines and the export",
        ),
        ("loss_fn.reference_policy_kl_penalty=1e-4", None),
        ("grpo.use_dynamic_sampling=true", None),
    ],
)
def test_value_that_would_be_ignored_is_refused(override: str, reason: str | None) -> None:
    loaded = load_config(TINY, [override])
    assert loaded.problems == ()
    assert [problem.fix for problem in refusals(loaded)] == (
        [f"{reason}; change it, or launch with ENGINE=nemo_rl"] if reason else []
    )


ALGORITHM = ("grpo.", "loss_fn.", "checkpointing.", "env.nemo_gym.effort_levels.")


def test_no_key_of_the_algorithm_is_held_to_one_value() -> None:
    held = {key for key, node in declared().items() if "honours" in node.get("x-native", {})}
    assert not {key for key in held if key.startswith(ALGORITHM)}


@pytest.mark.parametrize("directory", ["", "b200/", "small_scale/", "tiny/"])
def test_no_published_stage_is_refused_for_its_algorithm(directory: str) -> None:
    paths = sorted((CONFIG_DIR / directory).glob("stage[123]*.yaml"))
    assert len(paths) == 4
    for path in paths:
        refused = {problem.where.split(": ")[-1] for problem in refusals(load_config(path))}
        assert not {key for key in refused if key.startswith(ALGORITHM)}, path


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ("url: 'http://h:1', resources_server: {name: mcqa}", []),
        ("url: 'h:1', resources_server: {name: mcqa}", ["url"]),
        ("timeout_seconds: 5", ["url", "resources_server"]),
    ],
)
def test_an_agent_elsewhere_needs_an_address_and_a_verifier(settings: str, keys: list[str]) -> None:
    loaded = load_config(TINY, [f"env.nemo_gym.mine={{responses_api_agents: {{external_agent: {{{settings}}}}}}}"])
    assert [problem.where.rpartition(".mine.responses_api_agents.")[2] for problem in refusals(loaded)] == [
        f"external_agent.{key}" for key in keys
    ]


@pytest.mark.parametrize("platform", ["h100", "b200"])
def test_no_published_stage_trains_in_fp8(platform):
    for stage in (stage for stage in load_stages() if platform in stage.configs["prod"]):
        config = require_valid(load_config(config_path(stage, "prod", platform), []))
        assert not config.policy.megatron_cfg.fp8_cfg.enabled


def test_an_interleaved_pipeline_cannot_be_asked_for():
    """With two stages and batched sends Megatron trains on wrong data in such a schedule, without any error."""
    for key in ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"):
        with pytest.raises(ConfigError, match=f"{MEGATRON}.{key}: there is no such key"):
            require_valid(load_config(TINY, [f"{MEGATRON}.{key}=2"]))
