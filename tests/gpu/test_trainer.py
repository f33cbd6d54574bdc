"""The trainer on one GPU: bfloat16 against float32, speed, memory against the planner, and a checkpoint."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.policy.shards import merge_step_metrics
from tests.gpu import gpu_case
from tests.gpu.conftest import Record

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

needs_fused = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_case.save_model(tmp_path_factory.mktemp("small"), gpu_case.SMALL)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_case.save_model(tmp_path_factory.mktemp("large"), gpu_case.LARGE)


def trainer_of(model: Path, *, precision: str = "bfloat16", tokens: int = 4096, recompute: bool = False) -> Any:
    config = gpu_case.config_of(model, precision=precision, micro_batch_tokens=tokens, recompute=recompute)
    return gpu_case.build_trainer(config)


def train(trainer: Any, shard: Any, steps: int) -> list[dict[str, float]]:
    from recipes.policy import step

    return [merge_step_metrics([step.train_steps(trainer, [shard])]) for _ in range(steps)]


def test_bfloat16_logprobs_and_steps_follow_float32(small: Path, record: Record) -> None:
    from recipes.policy import step

    shard = gpu_case.full_shard(tokens=4096, width=256, num_microbatches=2)
    logprobs, losses = {}, {}
    for precision in ("float32", "bfloat16"):
        with gpu_case.fresh_memory():
            trainer = trainer_of(small, precision=precision)
            logprobs[precision] = torch.cat(step.logprobs(trainer, shard))
            losses[precision] = train(trainer, shard, 6)
            del trainer
    mask = torch.cat([torch.tensor(shard.row(row).token_mask()) for row in range(len(shard.batch.lengths_B))]) > 0
    gap = (logprobs["bfloat16"] - logprobs["float32"])[mask].abs()
    norms = {name: steps[0]["grad_norm"] for name, steps in losses.items()}
    record("log-probability gap bf16 - fp32", f"mean {gap.mean():.2e}, max {gap.max():.2e}")
    record("gradient norm of the first step", f"bf16 {norms['bfloat16']:.5g}, fp32 {norms['float32']:.5g}")
    record("loss of the last step", ", ".join(f"{name} {steps[-1]['loss']:.5g}" for name, steps in losses.items()))
    assert gap.mean() < 0.02
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.03)
    assert losses["bfloat16"][-1]["loss"] == pytest.approx(losses["float32"][-1]["loss"], rel=0.1, abs=0.02)


@needs_fused
def test_attention_of_transformer_engine_follows_torchs(small: Path, record: Record) -> None:
    from recipes.policy import step

    shard = gpu_case.full_shard(tokens=4096, width=256, num_microbatches=2)
    logprobs, norms, seconds = {}, {}, {}
    for backend in ("local", "auto"):
        config = gpu_case.config_of(small, precision="bfloat16", micro_batch_tokens=4096, recompute=False)
        config.policy.megatron_cfg.attention_backend = backend
        with gpu_case.fresh_memory():
            trainer = gpu_case.build_trainer(config)
            logprobs[backend] = torch.cat(step.logprobs(trainer, shard))
            norms[backend] = train(trainer, shard, 1)[0]["grad_norm"]
            torch.cuda.synchronize()
            began = time.monotonic()
            train(trainer, shard, 5)
            torch.cuda.synchronize()
            seconds[backend] = (time.monotonic() - began) / 5
            del trainer
    gap = (logprobs["auto"] - logprobs["local"]).abs()
    record("log-probability gap of the two attentions", f"mean {gap.mean():.2e}, max {gap.max():.2e}")
    record("step with either attention", ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items()))
    assert gap.mean() < 0.02
    assert norms["auto"] == pytest.approx(norms["local"], rel=0.03)


@needs_fused
def test_experts_of_one_grouped_gemm_follow_single_ones(
    tmp_path_factory: pytest.TempPathFactory, record: Record
) -> None:
    """With few tokens, so that some experts get none, and with recomputation; each reads the other's checkpoint."""
    from recipes.policy import checkpoint, step

    model = gpu_case.save_model(tmp_path_factory.mktemp("experts"), gpu_case.EXPERTS)
    shards = [gpu_case.full_shard(tokens=tokens, width=32, num_microbatches=2) for tokens in (32, 4096)]
    logprobs, norms, after = {}, {}, {}
    saved = {is_grouped: tmp_path_factory.mktemp("saved") for is_grouped in (False, True)}
    for is_grouped in (False, True):
        config = gpu_case.config_of(model, precision="bfloat16", micro_batch_tokens=4096, recompute=True)
        config.policy.megatron_cfg.moe_grouped_gemm = is_grouped
        config.policy.megatron_cfg.dist_ckpt_optim_fully_reshardable = True
        with gpu_case.fresh_memory():
            trainer = gpu_case.build_trainer(config)
            logprobs[is_grouped] = torch.cat([torch.cat(step.logprobs(trainer, shard)) for shard in shards])
            norms[is_grouped] = [train(trainer, shard, 1)[0]["grad_norm"] for shard in shards]
            checkpoint.save(trainer, saved[is_grouped])
            after[is_grouped] = {name: tensor.cpu() for name, tensor in trainer.export()}
            if is_grouped:
                checkpoint.load(trainer, saved[False])
                read = {name: tensor.cpu() for name, tensor in trainer.export()}
                assert all(torch.equal(tensor, after[False][name]) for name, tensor in read.items())
            del trainer
    gap = (logprobs[True] - logprobs[False]).abs()
    record("log-probability gap of grouped and single experts", f"mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.mean() < 0.02
    assert norms[True] == pytest.approx(norms[False], rel=0.03)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_speed_and_memory_of_a_step(large: Path, record: Record, recompute: bool) -> None:
    from tools.sizing.architecture import read_architecture

    tokens = 16384
    model = read_architecture(large)
    config = gpu_case.config_of(large, precision="bfloat16", micro_batch_tokens=tokens, recompute=recompute)
    shard = gpu_case.full_shard(tokens=tokens, width=2048)
    with gpu_case.fresh_memory():
        trainer = gpu_case.build_trainer(config)
        train(trainer, shard, 2)
        torch.cuda.synchronize()
        began = time.monotonic()
        train(trainer, shard, 5)
        torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / 5
        peak = torch.cuda.max_memory_allocated()
        del trainer
    expected = gpu_case.planned_bytes(large, config)
    rate = 6 * model.active_parameters * tokens / seconds  # forward and backward, without attention and recomputation
    name = "recomputed" if recompute else "kept"
    record(f"step of {tokens} tokens, activations {name}", f"{seconds:.3f} s, {tokens / seconds:.0f} tokens/s")
    limit = matrix_rate()
    record(f"share of the matrix rate, activations {name}", f"{rate / limit:.0%} of {limit / 1e12:.0f} TFLOP/s")
    record(f"peak memory, activations {name}", f"{peak / 2**30:.2f} GiB, planned {expected / 2**30:.2f} GiB")
    assert 0.6 < expected / peak < 1.6


def matrix_rate() -> float:
    """Return the FLOP/s of a large bfloat16 matrix product on this GPU."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for repeats in (3, 20):  # the first is a warm-up
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(repeats):
            a @ b
        torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.monotonic() - began)


@pytest.mark.parametrize("fully_reshardable", [False, True], ids=["usual", "fully-reshardable"])
@pytest.mark.parametrize("kind", ["plain", pytest.param("fused", marks=needs_fused), "offloaded"])
def test_a_bfloat16_checkpoint_continues(
    small: Path, record: Record, tmp_path: Path, fully_reshardable: bool, kind: str
) -> None:
    from recipes.policy import checkpoint

    shard = gpu_case.full_shard(tokens=4096, width=256)
    with gpu_case.fresh_memory():
        config = gpu_case.config_of(
            small, precision="bfloat16", micro_batch_tokens=4096, recompute=False, is_fused=kind == "fused"
        )
        config.policy.megatron_cfg.dist_ckpt_optim_fully_reshardable = fully_reshardable
        if kind == "offloaded":
            gpu_case.offload(config, share=0.5)
        trainer = gpu_case.build_trainer(config)
        train(trainer, shard, 2)
        began = time.monotonic()
        checkpoint.save(trainer, tmp_path)
        saved = time.monotonic() - began
        weights = {name: tensor.cpu() for name, tensor in trainer.export()}
        (straight,) = train(trainer, shard, 1)
        began = time.monotonic()
        checkpoint.load(trainer, tmp_path)
        loaded = time.monotonic() - began
        assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in trainer.export())
        (resumed,) = train(trainer, shard, 1)
        del trainer
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    form = "fully reshardable" if fully_reshardable else "usual"
    record(f"checkpoint, {kind}, {form}", f"{size / 2**30:.2f} GiB, save {saved:.1f} s, load {loaded:.1f} s")
    assert resumed["loss"] == pytest.approx(straight["loss"], rel=1e-3, abs=1e-5)
    assert resumed["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-3)


def test_an_offloaded_optimizer_trains_as_one_that_is_not(small: Path, record: Record) -> None:
    shard = gpu_case.full_shard(tokens=4096, width=256)
    steps, memory = {}, {}
    for share in (0.0, 0.5, 1.0):
        with gpu_case.fresh_memory():
            config = gpu_case.config_of(small, precision="bfloat16", micro_batch_tokens=4096, recompute=False)
            config.policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32 = True
            if share:
                gpu_case.offload(config, share=share)
            trainer = gpu_case.build_trainer(config)
            steps[share] = train(trainer, shard, 5)
            memory[share] = torch.cuda.memory_allocated()
            del trainer
    record("memory after steps", ", ".join(f"{share:g}: {used / 2**30:.2f} GiB" for share, used in memory.items()))
    for share in (0.5, 1.0):
        for own, plain in zip(steps[share], steps[0.0], strict=True):
            assert own["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
    assert memory[1.0] < memory[0.5] < memory[0.0]


def test_state_set_aside_leaves_its_memory(small: Path, record: Record) -> None:
    from recipes.policy.offloading import state as offloading

    shard = gpu_case.full_shard(tokens=4096, width=256)
    with gpu_case.fresh_memory():
        config = gpu_case.config_of(small, precision="bfloat16", micro_batch_tokens=4096, recompute=False)
        config.policy.offload_optimizer_for_logprob = True
        trainer = gpu_case.build_trainer(config)
        train(trainer, shard, 1)
        state = [tensor.clone() for tensor in offloading.state_tensors(trainer.optimizer)]
        before = torch.cuda.memory_allocated()
        with offloading.state_on_host(trainer):
            freed = before - torch.cuda.memory_allocated()
        after = torch.cuda.memory_allocated()
        size = sum(tensor.nbytes for tensor in state)
        assert all(torch.equal(*pair) for pair in zip(offloading.state_tensors(trainer.optimizer), state, strict=True))
        del trainer, state
    record("optimizer state set aside", f"{freed / 2**30:.2f} of {size / 2**30:.2f} GiB")
    assert after == before
    assert freed >= 0.99 * size
