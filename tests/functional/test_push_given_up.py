"""A push that is given up reaches the rank that waits in it, and the rank can be called again: real Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from speed import patiently

from recipes.cluster.private import private_ray
from recipes.errors import EngineError
from recipes.grpo.refit import refit
from recipes.policy.policy import Policy
from recipes.types import WeightLayout
from tests.configuration import block

pytestmark = pytest.mark.functional


class Rank:
    """Waits in a broadcast as `PolicyWorker` does, without a GPU."""

    def __init__(self, mark: Path) -> None:
        self.num_given_up = 0
        self.mark = mark

    def send_weights(self, _num_before: int, timeout_s: float) -> None:
        self.mark.touch()
        is_cancelled, end = ray.get_runtime_context().is_canceled, time.monotonic() + timeout_s
        while not is_cancelled():
            assert time.monotonic() < end, "nobody cancelled the call"
            time.sleep(0.05)
        self.num_given_up += 1
        raise EngineError("weight push: given up")

    def count(self) -> int:
        return self.num_given_up


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Any]]:
    with private_ray(2):
        ray.cloudpickle.register_pickle_by_value(__import__(__name__))  # the actor cannot import a test
        yield [ray.remote(Rank).options(num_cpus=0).remote(tmp_path / "waits")]


def test_a_rank_that_waits_for_a_dead_engine_can_save(ranks: list[Any], tmp_path: Path) -> None:
    deadlines = block("deadlines", refit=60.0)
    policy = Policy(ranks, None, deadlines)  # type: ignore[arg-type]
    policy._layout = WeightLayout(path="", names=(), dtypes=(), shapes=(), offsets=(), num_bytes=0)

    def fail(_version: int) -> None:
        end = time.monotonic() + patiently(30)
        while not (tmp_path / "waits").exists():  # Ray drops a cancelled call that has not begun
            assert time.monotonic() < end, "the rank did not begin"
            time.sleep(0.05)
        raise EngineError("engine 1 is dead")

    generation: Any = SimpleNamespace(
        drain=lambda: None, needs_connect=lambda _layout: False, needs_weight_content=False, update_weights=fail
    )
    began = time.monotonic()
    with pytest.raises(EngineError, match="engine 1 is dead"):
        refit(policy, generation, version=1)
    assert ray.get(ranks[0].count.remote(), timeout=30) == 1
    assert time.monotonic() - began < 30
