"""What Megatron-core leaves out without any error, on one rank: recomputation of hybrids, no decay of small weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from one_rank import one_rank, trainer_of
from policy_case import load_case, save_hybrid
from random_batch import random_batch

from recipes.policy import shards, step
from tests.groups import LocalStore

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

_DECAY, _RATE = 0.5, 1e-2
_OVERRIDES = {
    "megatron_cfg__activation_checkpointing": "true",
    "megatron_cfg__scheduler__start_weight_decay": _DECAY,
    "megatron_cfg__scheduler__end_weight_decay": _DECAY,
    "megatron_cfg__optimizer__lr": _RATE,
    "megatron_cfg__optimizer__weight_decay": _DECAY,
    "megatron_cfg__scheduler__lr_warmup_iters": 0,
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[step.Trainer]:
    config = load_case(save_hybrid(tmp_path_factory.mktemp("traps") / "model"), **_OVERRIDES)
    with one_rank(config):
        yield trainer_of(config)


def test_every_layer_of_a_hybrid_is_computed_again_in_the_backward_pass(trainer: step.Trainer) -> None:
    calls: Counter[int] = Counter()
    layers = trainer.model.module.decoder.layers
    hooks = []
    for number, layer in enumerate(layers):
        norms = [
            module for name, module in layer.named_children() if name.endswith("norm") and list(module.parameters())
        ]
        hooks.append(norms[0].register_forward_hook(lambda *_, number=number: calls.update([number])))
    batch = random_batch(4, LocalStore())
    for training, times in ((False, 1), (True, 2)):
        calls.clear()
        plan = shards.divide(batch, trainer.cfg, num_shards=1, training=training)
        (shard,) = shards.split(batch, plan)
        run = step.train_step if training else step.logprobs
        run(trainer, shard)
        assert set(calls.values()) == {times * len(shard.microbatches)} and len(calls) == len(layers)
    for hook in hooks:
        hook.remove()


def test_weight_decay_spares_norms_and_biases(trainer: step.Trainer) -> None:
    """With gradients of 0 a step is the decay alone. The schedule sets it per parameter; Adam itself decays all."""
    model = trainer.model.module
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for part in trainer.optimizer.chained_optimizers:
        part.optimizer.state.clear()  # moments of other steps
    trainer.model.zero_grad_buffer()
    trainer.optimizer.step()
    step.gather_params(trainer)
    factors = {name: (param / before[name]).nanmedian().item() for name, param in model.named_parameters()}
    spared = {name for name, param in before.items() if param.dim() == 1}
    assert len(spared) > 10 and all(torch.equal(before[name], dict(model.named_parameters())[name]) for name in spared)
    assert {name: factors[name] for name in factors if name not in spared} == pytest.approx(
        dict.fromkeys(factors.keys() - spared, 1 - _RATE * _DECAY), rel=1e-5
    )
