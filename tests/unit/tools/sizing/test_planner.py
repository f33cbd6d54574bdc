"""The plan of a stage: sizes of models against their published numbers, memory by hand, and what is printed."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from functools import partial
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from recipes.config.keys.derive import derive, started_judges
from recipes.config.load import config_path, find_stage, load_config, require_valid
from recipes.errors import InputError
from tools.job.compile_cache import seed_path
from tools.sizing import planner
from tools.sizing.architecture import SUPER, Architecture, published, read_architecture
from tools.sizing.memory import GIB, engine_memory, host_memory, layer_activations, trainer_memory
from tools.sizing.speed import GPUS, Assumptions, loop, roofline, teachers

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
NANO_30B_A3B = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "vocab_size": 131072,
}
DENSE = Architecture(
    name="dense",
    hidden=8,
    vocab=100,
    is_tied=False,
    attention_layers=2,
    query_heads=4,
    kv_heads=2,
    head_size=2,
    mlp_layers=2,
    mlp_size=16,
    is_gated=True,
)


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def production() -> Any:
    return require_valid(load_config(config_path(find_stage("stage1.1"), "prod", "h100"), []))


def test_super_has_its_published_size():
    assert SUPER.parameters == pytest.approx(120.6e9, rel=0.002)
    assert SUPER.active_parameters == pytest.approx(12e9, rel=0.03)
    assert SUPER.num_layers == 88


@pytest.mark.parametrize(
    ("config", "parameters", "active"), [(QWEN3_30B_A3B, 30.5e9, 3.3e9), (NANO_30B_A3B, 31.6e9, 3.2e9)]
)
def test_published_models_have_their_published_sizes(tmp_path, config, parameters, active):
    model = read_architecture(write_config(tmp_path, config))
    assert model.parameters == pytest.approx(parameters, rel=0.01)
    assert model.active_parameters == pytest.approx(active, rel=0.08)  # whether embeddings count differs between cards


def test_nano_has_the_sizes_of_its_published_configuration(tmp_path):
    found = read_architecture(write_config(tmp_path, NANO_30B_A3B))
    assert replace(published("nano-rl"), name=found.name) == found


def test_a_dense_model_counts_as_its_weight_file_does(tmp_path):
    from tools.tiny.model import build_model, build_tokenizer

    model = build_model(build_tokenizer(), seed=0)
    model.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    stored = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if "." in name)
    assert read_architecture(tmp_path).parameters * 4 == pytest.approx(stored, rel=0.003)  # the norms are left out


def test_an_unknown_kind_of_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="got mamba, expected nemotron_h"):
        read_architecture(write_config(tmp_path, {"model_type": "mamba"}))
    with pytest.raises(InputError, match="needs the key 'hidden_size'"):
        read_architecture(write_config(tmp_path, {"model_type": "qwen3"}))
    with pytest.raises(InputError, match=r"config\.json"):
        read_architecture(tmp_path / "nowhere")


def test_experts_have_two_names_in_configurations(tmp_path):
    old = read_architecture(write_config(tmp_path, QWEN3_30B_A3B))
    assert old.experts == QWEN3_30B_A3B["num_experts"]
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_30B_A3B.items()}
    assert read_architecture(write_config(tmp_path, renamed)) == old  # as transformers 5 writes it


def test_parameters_of_a_dense_model_by_hand():
    # embedding and output 2 * 800, attention 2 * (8*8 + 2 * 8*4 + 8*8), MLP 2 * 3 * 8 * 16
    assert DENSE.parameters == 1600 + 2 * 192 + 2 * 384
    assert DENSE.active_parameters == DENSE.parameters - 800


def test_trainer_memory_of_super_on_256_gpus(production):
    found = trainer_memory(SUPER, production, derive(production), other=6 * GIB)
    # TP 4, EP 16, one more layer of attention and experts for MTP: dense / 4, experts / 16; 2 bytes each. Routers,
    # latent projections and what joins the head's two inputs are whole on each rank.
    whole = 41 * (4096 * 512 + 2 * 4096 * 1024) + 2 * 4096**2
    split = SUPER.dense_parameters + SUPER.attention_parameters + SUPER.moe_shared_parameters + 2 * 4096**2 - whole
    experts = 41 * 512 * 2 * 1024 * 2688
    dense = 4 * whole + split  # of four ranks
    local = dense / 4 + experts / 16
    assert found.weights == pytest.approx(2 * local)
    assert found.gradients == pytest.approx(2 * local)
    assert found.optimizer == pytest.approx(12 * (dense / 4 / 64 + experts / 16 / 16))  # copies: 256/4, 256/16
    # 65,536 tokens over CP 8; their stream of 88 layers in 2 bytes, split by TP, two for each of 5 heads and their
    # ends; and the largest layer, or a head
    tokens = 65536 / 8
    layers = layer_activations(SUPER, production.policy.megatron_cfg, tokens, 2)
    stream = tokens * 4096 * 2 / 4
    assert found.activations == pytest.approx((88 + 2 * 6) * stream)
    # 2,048 rows of logits over TP 4: 2 bytes each, and twice 4 of float32
    logits = 2048 * 131072 / 4 * 10
    largest = max(layers[kind].kept + layers[kind].working for kind in ("attention", "mamba", "moe"))
    head = 7 * stream + layers["attention"].kept + layers["moe"].kept + layers["moe"].working
    assert found.backward == pytest.approx(max(logits, largest, head))
    assert found.total < 79.6 * GIB


def test_an_all_gather_holds_the_tokens_of_all_ranks_that_share_the_experts(production):
    megatron = production.policy.megatron_cfg
    gathering = replace(megatron, moe_token_dispatcher_type="allgather")
    own, gathered = (layer_activations(SUPER, cfg, 8192, 2)["moe"].working for cfg in (megatron, gathering))
    # 8,192 tokens over TP 4, of EP 16 ranks, in the latent size; outputs in 2 and 4 bytes, inputs in 2
    assert gathered - own == pytest.approx(8192 / 4 * 16 * SUPER.expert_hidden * 8)


def _untrained(config: Any) -> Any:
    return replace(config.policy, megatron_cfg=replace(config.policy.megatron_cfg, mtp_num_layers=0))


def test_memory_falls_with_parallelism_and_rises_without_recomputation(production):
    sizes = derive(production)
    megatron = production.policy.megatron_cfg
    base = trainer_memory(SUPER, production, sizes, other=0.0)

    def changed(**values: Any) -> Any:
        policy = replace(production.policy, megatron_cfg=replace(megatron, **values))
        return trainer_memory(SUPER, replace(production, policy=policy), sizes, other=0.0)

    assert changed(expert_model_parallel_size=32).weights < base.weights
    assert changed(context_parallel_size=16).activations == pytest.approx(base.activations / 2)
    assert changed(activation_checkpointing=False).activations > 3 * base.activations
    carried = changed(mtp_num_layers=0)  # heads that are not trained have weights, and nothing else
    assert carried.weights == base.weights
    assert carried.gradients < base.gradients and carried.optimizer < base.optimizer
    healing = changed(freeze_trunk=True)  # gradients and moments of the heads alone
    assert healing.weights == base.weights
    assert healing.gradients == pytest.approx(base.gradients - carried.gradients)
    assert healing.optimizer == pytest.approx(base.optimizer - carried.optimizer)
    assert healing.activations == pytest.approx(base.activations - carried.activations)  # and their activations
    plain = {"activation_checkpointing": False}
    whole, alone, heads = changed(**plain), changed(**plain, mtp_num_layers=0), changed(**plain, freeze_trunk=True)
    assert heads.activations == pytest.approx(whole.activations - alone.activations)
    without = trainer_memory(
        replace(SUPER, has_heads=False), replace(production, policy=_untrained(production)), sizes, other=0.0
    )
    assert without.weights < carried.weights
    adapters = changed(mtp_num_layers=0, peft=replace(megatron.peft, enabled=True))  # gradients and moments of few
    assert carried.weights < adapters.weights < 1.01 * carried.weights
    assert adapters.gradients < 0.01 * carried.gradients and adapters.optimizer < 0.02 * carried.optimizer
    in_fp32 = replace(megatron.distributed_data_parallel_config, grad_reduce_in_fp32=True)
    assert changed(distributed_data_parallel_config=in_fp32).gradients == pytest.approx(2 * base.weights)


def test_sgd_has_one_number_per_parameter_beside_the_weights(production):
    sizes, megatron = derive(production), production.policy.megatron_cfg
    optimizer = replace(megatron.optimizer, optimizer="sgd", use_distributed_optimizer=False)
    policy = replace(production.policy, megatron_cfg=replace(megatron, optimizer=optimizer))
    plain = replace(production, policy=policy)
    trainer = trainer_memory(SUPER, plain, sizes, other=0.0)
    assert trainer.optimizer == pytest.approx(4 * trainer.weights)  # momentum and master weights, which no rank shares
    adam, sgd = (host_memory(SUPER, config, sizes) for config in (production, plain))
    assert sgd.save == pytest.approx(adam.save * 10 / 14)


def test_what_is_offloaded_goes_from_the_gpu_to_the_host(production):
    sizes, megatron = derive(production), production.policy.megatron_cfg
    optimizer = replace(megatron.optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75)
    policy = replace(production.policy, megatron_cfg=replace(megatron, optimizer=optimizer))
    offloaded = replace(production, policy=policy)
    before, after = (trainer_memory(SUPER, config, sizes, other=0.0) for config in (production, offloaded))
    assert after.optimizer == pytest.approx(before.optimizer / 4)
    host, more = (host_memory(SUPER, config, sizes) for config in (production, offloaded))
    assert host.offloaded == 0.0
    assert more.offloaded == pytest.approx(8 * 0.75 * before.optimizer * 16 / 12)  # gradients, too, of eight workers
    assert more.total == host.total + more.offloaded
    aside = replace(offloaded, policy=replace(policy, offload_optimizer_for_logprob=True))
    assert host_memory(SUPER, aside, sizes).aside == pytest.approx(8 * after.optimizer)
    assert more.aside == 0.0


def by_pairs(config: Any) -> Any:
    return replace(config.grpo, adv_estimator=replace(config.grpo.adv_estimator, name="dpo"))


def test_host_memory_of_a_reference_policy_and_of_a_save(production):
    sizes = derive(production)
    trainer, host = (of(SUPER, production, sizes) for of in (partial(trainer_memory, other=0.0), host_memory))
    assert sizes.train_workers_per_node == 8
    assert host.reference == host.reference_pass == 0.0  # this stage has no penalty
    assert host.export == 2 * SUPER.parameters
    # Each tensor is copied once, by one of the ranks that hold it, and the optimizer's state where it lies.
    copied_once = (2 + 12) / 12 * trainer.optimizer
    assert host.save == pytest.approx(8 * copied_once)
    assert host.total == host.save + host.export

    def changed(**blocks: Any) -> Any:
        return host_memory(SUPER, replace(production, **blocks), sizes)

    penalised = changed(loss_fn=replace(production.loss_fn, reference_policy_kl_penalty=1e-4))
    assert penalised.reference == penalised.reference_pass == pytest.approx(8 * trainer.weights)
    assert penalised.total == host.total + 16 * trainer.weights
    assert changed(grpo=by_pairs(production)) == penalised
    weights_only = changed(checkpointing=replace(production.checkpointing, save_optimizer=False))
    assert weights_only.save == pytest.approx(host.save * 2 / 14)
    assert changed(checkpointing=replace(production.checkpointing, enabled=False)).total == 0.0


def test_engine_memory_of_super(production):
    found = engine_memory(SUPER, production, gpu=80 * GIB, other=5 * GIB)
    whole = 40 * (4096 * 512 + 2 * 4096 * 1024)  # routers and latent projections
    assert found.weights == 2 * ((SUPER.parameters - whole) / 8 + whole)
    assert found.cache == pytest.approx(0.8 * 80 * GIB - found.weights - 5 * GIB)
    assert found.cache_per_token == 2 * 8 * 128 * 2  # 2 KV heads on 8 GPUs: each holds a copy of one
    # 40 layers: 128 heads x 64 x 128 float32 and three columns of the convolution, over 8 GPUs
    assert found.state_per_sequence == 40 * (128 * 64 * 128 * 4 + (8192 + 2 * 8 * 128) * 3 * 2) / 8
    each = 4096 * 13000 + found.state_per_sequence
    assert found.sequences(13000) == int(found.cache / each)


def test_more_sequences_share_what_one_iteration_reads(production):
    engine = engine_memory(SUPER, production, gpu=80 * GIB, other=5 * GIB)
    speeds = roofline(SUPER, production, derive(production), GPUS["h100"], engine, Assumptions())
    one, many = speeds.decode_seconds(1), speeds.decode_seconds(64)
    assert one < many < 10 * one
    # One token goes through 22 of 512 experts: about the active parameters are read, in 2 bytes, by 8 GPUs
    read = (one - 0.010) * 0.5 * 3.35e12 * 8
    assert read == pytest.approx(2 * SUPER.active_parameters, rel=0.15)
    assert speeds.train_seconds(2e6) > speeds.train_seconds(1e6) > 0


def test_a_frozen_policy_runs_once_and_its_heads_train(production):
    engine = engine_memory(SUPER, production, gpu=80 * GIB, other=5 * GIB)

    def seconds(config: Any, **values: Any) -> float:
        megatron = replace(config.policy.megatron_cfg, **values)
        changed = replace(config, policy=replace(config.policy, megatron_cfg=megatron))
        return roofline(SUPER, changed, derive(config), GPUS["h100"], engine, Assumptions()).train_seconds(1e6)

    base, trunk = seconds(production), seconds(production, mtp_num_layers=0)
    heads = base - trunk
    assert trunk == pytest.approx(
        4 * (seconds(production, freeze_trunk=True) - heads)
    )  # forward, twice back, and again
    with_adapters = replace(production.policy.megatron_cfg.peft, enabled=True)
    assert trunk == pytest.approx(seconds(production, mtp_num_layers=0, peft=with_adapters) * 4 / 3)
    assert heads / trunk == pytest.approx(5 * SUPER.active_head_parameters / SUPER.active_parameters, rel=0.15)
    taught = replace(production.grpo.adv_estimator, name="on_policy_distillation")
    by_token = seconds(replace(production, grpo=replace(production.grpo, adv_estimator=taught)), mtp_num_layers=0)
    assert by_token == pytest.approx(trunk * 5 / 4)  # the log-probabilities before the step


def test_a_teacher_reads_each_rollout_once(production):
    judge = next(one for one in started_judges(production) if one.name == "nl2bash_judge_model")
    taught = replace(production.grpo.adv_estimator, name="on_policy_distillation", teachers={"default": judge.name})
    config = replace(production, grpo=replace(production.grpo, adv_estimator=taught))
    sizes, given = derive(config), Assumptions()
    assert teachers(SUPER, production, sizes, GPUS["h100"], given) == ()
    (one,) = teachers(SUPER, config, sizes, GPUS["h100"], given)
    length = given.rollout_tokens(65536)
    assert one.rollout_seconds == pytest.approx(2 * SUPER.active_parameters * length / (8 * 989e12 * 0.4))
    assert one.step_seconds == pytest.approx(one.rollout_seconds * 4096 / 2)  # two copies of 8 GPUs
    assert one.weights == 2 * SUPER.parameters / 8
    engine = engine_memory(SUPER, config, gpu=80 * GIB, other=5 * GIB)
    speeds = roofline(SUPER, config, sizes, GPUS["h100"], engine, given)
    random = loop(config, sizes, engine, speeds, replace(given, environment_seconds=0.0)).draw_environment_seconds
    assert random(Random(0)) == pytest.approx(one.rollout_seconds)


def test_lengths_have_the_assumed_mean_and_never_exceed_the_context(production):
    from random import Random

    engine = engine_memory(SUPER, production, gpu=80 * GIB, other=5 * GIB)
    sizes = derive(production)
    given = Assumptions(generated_tokens=8000.0)
    speeds = roofline(SUPER, production, sizes, GPUS["h100"], engine, given)
    drawn = loop(production, sizes, engine, speeds, given)
    random = Random(0)
    lengths = [drawn.draw_tokens(random) for _ in range(5000)]
    assert sum(lengths) / len(lengths) == pytest.approx(8000, rel=0.05)
    assert max(lengths) <= 65536 - 1000
    assert drawn.max_num_seqs == min(1024, engine.sequences(given.rollout_tokens(65536)))


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(planner, "_SIMULATED_STEPS", 2)
    monkeypatch.setattr(planner, "_SHARES", (0.125, 1.0, 2.0))


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert planner.main(words) == 0
    return capsys.readouterr().out


def test_the_plan_of_the_largest_stage(capsys):
    found = json.loads(plan(capsys, "--stage", "stage1.1", "--json"))
    assert found["sizes"]["total_gpus"] == 1464
    expected = found["expected"]
    assert expected["gpu_hours_per_step"] == pytest.approx(1464 * expected["forecast"]["step_seconds"] / 3600)
    assert found["gpu_hours_per_save"] == pytest.approx(10 * expected["gpu_hours_per_step"])
    seconds = [row["forecast"]["step_seconds"] for row in found["what_if"]]
    assert seconds[0] > expected["forecast"]["step_seconds"] > seconds[-1]  # an eighth of the nodes, and twice as many
    synchronous = next(row for row in found["other_ages"] if row["max_age"] == 0)
    assert synchronous["forecast"]["step_seconds"] > expected["forecast"]["step_seconds"]


def test_what_all_nodes_read_at_the_start_is_listed_with_its_volume(capsys, tmp_path, monkeypatch):
    (tmp_path / "image.sqsh").write_bytes(b"x" * 1000)
    monkeypatch.setattr(planner, "_SIMULATED_STEPS", 1)  # of no interest here
    monkeypatch.setenv("CONTAINER", str(tmp_path / "image.sqsh"))
    monkeypatch.setenv("PERSISTENT_CACHE", str(tmp_path))
    seed = seed_path(tmp_path)
    seed.parent.mkdir()
    seed.write_bytes(b"x" * 500)
    found = {one["what"]: one for one in json.loads(plan(capsys, "--stage", "stage1.1", "--json"))["read_at_start"]}
    assert next(iter(found)) == "start weights", "the largest comes first"
    assert found["start weights"]["total_bytes"] == 32 * 2 * SUPER.parameters, "the engines get theirs from the policy"
    assert found["container image"]["total_bytes"] == 183 * 1000
    assert found["compiled kernels"]["total_bytes"] == 183 * 500
    assert found["code"]["node_bytes"] > 1e6
    assert "  start weights           241" in plan(capsys, "--stage", "stage1.1")


@pytest.fixture
def tiny_model(tmp_path, monkeypatch):
    config = {**QWEN3_30B_A3B, "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 384}
    monkeypatch.setenv("MODEL_PATH", str(write_config(tmp_path, config)))


@pytest.mark.usefixtures("tiny_model")
def test_the_printed_plan(capsys):
    text = plan(capsys, "--stage", "rlvr1", "--scale", "tiny", "--environment-seconds", "0.5")
    assert "1 node, 1 of its 2 workers train, 1 generate" in text
    assert "16 prompts x 8 = 128 rollouts" in text
    assert "GPU-hours" not in text  # there is no GPU
    assert "host memory of a node's policy workers, MiB\n  reference policy           0.0" in text
    assert "--environment-seconds        0.5  seconds of environment" in text
    slow, fast = (json.loads(plan(capsys, "--stage", "rlvr1", "--scale", "tiny", "--json", *words)) for words in _SLOW)
    assert slow["expected"]["forecast"]["step_seconds"] > fast["expected"]["forecast"]["step_seconds"]


_SLOW = (["--environment-seconds", "2"], ["--environment-seconds", "0"])


@pytest.mark.usefixtures("tiny_model")
def test_lengths_of_a_real_run_replace_the_assumed_ones(capsys, tmp_path):
    record = {
        "step": 1,
        "train/gen_tokens_per_sample/mean": 50.0,
        "train/total_tokens_per_sample/mean": 80.0,
        "train/turns_per_sample/mean": 2.0,
        "train/env_duration_s": 3.0,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    words = ["--stage", "rlvr1", "--scale", "tiny", "--json", "--from-run", str(tmp_path), "--turns", "3"]
    given = json.loads(plan(capsys, *words))["assumptions"]
    assert (given["generated_tokens"], given["prompt_tokens"]) == (50.0, 30.0)
    assert (given["environment_seconds"], given["turns"]) == (1.5, 3.0)  # the command line wins


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "stage9"], "STAGE: got stage9"),
        (["--stage", "stage1.1", "--gpu-memory-gib", "24"], "no sequence of the expected length fits"),
        (["--stage", "stage1.1", "grpo.nonsense=1"], "grpo.nonsense"),
        (["--stage", "stage1.1", "--from-run", "/nowhere"], "/nowhere"),
        (["--stage", "stage1.1", "--prompt-tokens", "65536"], "--prompt-tokens: got 65536, expected less than policy."),
    ],
)
def test_wrong_inputs_are_refused(capsys, words, message):
    assert planner.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "is_refused"),
    [
        *(("--generated-tokens", value, True) for value in ("0", "-1", "nan", "inf", "many")),
        *((name, "0", True) for name in ("--train-mfu", "--save-gb-per-second", "--gpu-memory-gib")),
        *((name, "0.0", False) for name in ("--push-tensor-ms", "--environment-seconds")),
    ],
)
def test_assumptions_are_numbers_with_which_something_happens(capsys, option, value, is_refused):
    if is_refused:
        with pytest.raises(SystemExit):
            planner.parse(["--stage", "stage1.1", option, value])
        assert f"argument {option}: got '{value}', expected a number above 0" in capsys.readouterr().err
    else:
        assert getattr(planner.parse(["--stage", "stage1.1", option, value]), option[2:].replace("-", "_")) == 0


def test_a_policy_that_does_not_fit_is_said(capsys):
    words = ["--stage", "stage2.1", "--scale", "small", "policy.megatron_cfg.activation_checkpointing=false"]
    text = plan(capsys, *words)
    assert "DOES NOT FIT" in text


@pytest.mark.parametrize("longest", [600, 1100, 8192, 65536, 10**9])
def test_a_mean_rollout_is_never_longer_than_the_longest(longest):
    given = Assumptions(prompt_tokens=500.0)
    draw, mean = Random(0), log(given.generated_tokens) - given.length_sigma**2 / 2
    drawn = [min(exp(draw.gauss(mean, given.length_sigma)), longest - 500) for _ in range(20_000)]
    assert given.rollout_tokens(longest) == pytest.approx(500 + fmean(drawn), rel=0.02)
    assert given.rollout_tokens(longest) <= longest


def test_the_plan_of_a_short_context_has_no_longer_rollouts_and_says_whose_model_it_is(capsys, monkeypatch):
    monkeypatch.delenv("MODEL_PATH", raising=False)
    assert planner.main(["--stage", "stage1.1", "policy.max_total_sequence_length=8192"]) == 0
    said = capsys.readouterr().out
    [(mean, longest)] = re.findall(r"sequences of ([\d,]+) tokens \(expected mean\), or [\d,]+ of ([\d,]+)", said)
    assert int(mean.replace(",", "")) < int(longest.replace(",", "")) == 8192
    assert "as published, since MODEL_PATH is not set" in said


PROFILE = """
[big]
executor = "slurm"
gpus_per_node = 4
container = "{image}"
"""


def test_a_plan_has_the_configuration_that_a_launch_has(capsys, tmp_path, monkeypatch):
    """The profile of CLUSTER, and what the variables of a launch add to the configuration, count in a plan."""
    monkeypatch.setattr(planner, "_SIMULATED_STEPS", 1)
    image = tmp_path / "image.sqsh"
    image.write_bytes(b"x" * 1000)
    (tmp_path / "env.toml").write_text(PROFILE.format(image=image), encoding="utf-8")
    monkeypatch.setenv("ENV_TOML", str(tmp_path / "env.toml"))
    monkeypatch.setenv("CLUSTER", "big")
    engines = (
        "policy.generation.colocated.resources.gpus_per_node=4",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
    )
    judges = "env.nemo_gym.num_gpu_nodes=14"
    found = json.loads(plan(capsys, "--stage", "stage1.1", "--json", *engines, judges))
    assert found["sizes"]["total_gpus"] == 4 * found["sizes"]["num_nodes"]
    assert {one["what"]: one["node_bytes"] for one in found["read_at_start"]}["container image"] == 1000
    monkeypatch.setenv("CLUSTER", "bigg")
    assert planner.main(["--stage", "stage1.1"]) == 2
    assert "has no profile bigg; did you mean big?" in capsys.readouterr().err
    monkeypatch.delenv("CLUSTER")
    assert planner.main(["--stage", "stage9"]) == 2
    assert planner.main(["--stage", "stage1.1", "grpo.num_prompt_per_step=1", "grpo.seed=-1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3, "every problem at once"


def test_a_push_takes_the_time_of_its_bytes_and_of_its_calls(capsys):
    text = plan(capsys, "--stage", "stage1.1")
    assert "push      5.3 s: 247 GB from one GPU to all engines, in 2,007 tensors" in text
    slower = plan(capsys, "--stage", "stage1.1", "--push-gb-per-second", "25", "--push-tensor-ms", "1")
    assert "push      11.9 s: 247 GB" in slower


def test_what_a_push_receives_must_fit_beside_the_memory_that_an_engine_takes(capsys):
    assert "a weight push                       3.1  beside gpu_memory_utilization" in plan(
        capsys, "--stage", "stage1.1"
    )
    text = plan(capsys, "--stage", "stage1.1", "policy.generation.vllm_cfg.gpu_memory_utilization=0.93")
    assert "DOES NOT FIT" in text
