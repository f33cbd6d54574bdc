"""The engine arguments of every published stage, as vLLM resolves them on a GPU node inside a placement group.

vLLM asks Ray for the placement group of the actor in which it runs, so these tests run it in a bundle of eight GPUs,
like those that `cluster/placement.py` reserves. Ray believes the number of GPUs it is told; `fake_cuda` tells vLLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recipes.cluster.private import private_ray
from recipes.config.load import load_config, require_valid
from recipes.generation.engine_args import ENV, engine_args

pytestmark = pytest.mark.functional

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PUBLISHED = sorted(
    str(path.relative_to(CONFIGS)) for pattern in ("*", "b200/*", "small_scale/*") for path in CONFIGS.glob(pattern)
    if path.name.startswith("stage") and path.name != "stages.yaml"
)  # fmt: skip
SHARED_EXPERTS = "policy.generation.vllm_cfg.expert_parallel_size=8"
GIVEN = ("data.train.data_path=x", "data.validation.data_path=x", "sif_dir=x")  # what the launcher sets


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    fake_cuda.write_model(path)
    return path


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    """An actor in a bundle of eight GPUs."""
    gpus = fake_cuda.GPUS_PER_NODE
    with private_ray(1, num_gpus=gpus):
        group = placement_group([{"GPU": gpus}])
        ray.get(group.ready(), timeout=60)

        ray.cloudpickle.register_pickle_by_value(fake_cuda)  # the actor cannot import a module of the tests

        class Node:
            def resolve(self, arguments: dict[str, Any]) -> dict[str, Any]:
                return fake_cuda.resolve(arguments)

        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        yield ray.remote(Node).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy).remote()


def test_there_are_stages_for_every_kind_of_cluster() -> None:
    assert len(PUBLISHED) == 15  # five files each for H100, B200 and small scale


@pytest.mark.parametrize(
    ("name", "overrides"),
    [*((name, ()) for name in PUBLISHED), pytest.param("stage1_rlvr.yaml", (SHARED_EXPERTS,), id="shared experts")],
)
def test_vllm_accepts_the_arguments_of_a_published_stage(
    name: str, overrides: tuple[str, ...], model: Path, node: Any
) -> None:
    config = require_valid(load_config(CONFIGS / name, [f"policy.model_name={model}", *overrides, *GIVEN]))
    generation = config.policy.generation
    arguments = engine_args(generation, model_path=str(model), seed=1, is_cpu=False)
    resolved = ray.get(node.resolve.remote(arguments), timeout=120)
    assert resolved == {
        "executor": "MultiprocExecutor",  # vLLM's own choice inside a placement group refuses a bundle of several GPUs
        "world_size": generation.vllm_cfg.tensor_parallel_size,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "expert_parallel": generation.vllm_cfg.expert_parallel_size > 1,
        "scheduler": "RolloutAsyncScheduler",
        "async_scheduling": True,
        "prefix_caching": generation.vllm_cfg.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer": "nccl",
        "dtype": "torch.bfloat16",
    }


def test_an_engine_runs_no_code_that_an_installed_package_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = importlib.import_module("vllm.plugins")
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n", encoding="utf-8")
    (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text("[own.group]\nother = other:run\n", "utf-8")
    (tmp_path / "other.py").write_text("run = print\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert plugins.load_plugins_by_group("own.group") == {"other": print}
    monkeypatch.setenv("VLLM_PLUGINS", ENV["VLLM_PLUGINS"])
    assert plugins.load_plugins_by_group("own.group") == {}
