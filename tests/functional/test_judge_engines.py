"""Judges that a run starts: placed beside policy and engines, a real tiny vLLM engine, verdicts, and its death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from speed import patiently

from recipes.cluster.placement import WorkerCounts, place, place_judges
from recipes.cluster.private import private_ray
from recipes.config.keys.derive import StartedJudge, started_judges
from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.load import load_config, require_valid
from recipes.config.tree import Config
from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import Verdict, message_item, response_object
from recipes.environments.instances import GROUP_VERIFIERS, servers_of
from recipes.environments.scoring.clients import GroupClient
from recipes.environments.scoring.judge_servers import with_addresses
from recipes.errors import ConfigError, StalledError
from recipes.generation.judges import Judges
from tests.configuration import block
from tools.tiny.model import build_model, build_tokenizer

pytestmark = pytest.mark.functional

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "3+4"}]}}
PORTS = (3000, 5000)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with private_ray(2, resources={"worker_units": 3}):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The tiny stage 3 with a random model."""
    model = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    build_model(tokenizer, seed=0).save_pretrained(model)
    return require_valid(load_config(CONFIG_DIR / "tiny" / "stage3_rlhf.yaml", [f"policy.model_name={model}"]))


def score(config: Config, judges: Judges) -> list[Any]:
    """Return the verdicts on the three answers of a group, as the stage's own environment gives them."""
    instances = with_addresses(config.env.nemo_gym.instances, judges.addresses(), judges.api_key)
    server = servers_of(instances)["genrm_compare_resources_server"]
    assert server.judge is not None
    client = GroupClient(
        name=server.name,
        verifier=GROUP_VERIFIERS[server.verifier],
        settings=server.settings,
        judge=server.judge.client(JsonClient()),
        timeout_seconds=patiently(120),
    )
    answers = [response_object([message_item(text)]) for text in ("7", "8", "it is 7")]
    return asyncio.run(client.score(ROW, answers))


def kill_engine(url: str) -> int:
    """Kill the actor that serves this address, as the kernel does when memory is short; return its process id."""
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    [owner] = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr == (host, int(port))
    }
    assert owner is not None
    os.kill(owner, signal.SIGKILL)
    return owner


def test_a_judge_is_placed_scores_dies_and_comes_back_at_its_address(local_ray: None, config: Config) -> None:
    units = tuple(judge.gpus_per_copy for judge in started_judges(config) for _ in range(judge.num_copies))
    counts = WorkerCounts(
        num_train_nodes=1, train_workers_per_node=1, num_engines=1, units_per_engine=1, units_of_judges=units
    )
    places = place(counts, deadline_seconds=patiently(20))
    deadlines: Any = config.deadlines
    cfg = block("policy.generation", port_range_low=PORTS[0], port_range_high=PORTS[1])
    judges = Judges.launch(started_judges(config), placement=places.judges, cfg=cfg, deadlines=deadlines)
    try:
        [url] = judges.addresses()["genrm_model"]
        assert PORTS[0] <= int(url.rpartition(":")[2].partition("/")[0]) < PORTS[1]
        judges.load()
        for verdict in score(config, judges):
            assert isinstance(verdict, Verdict), verdict
            assert -3 < verdict.reward < 9  # of a score from 1 to 5: the tie-breaker, bonuses, terms of the group
        assert httpx.get(f"{url}/models", trust_env=False).status_code == 401  # nobody without the key
        owner = kill_engine(url)
        assert all(isinstance(verdict, Verdict) for verdict in score(config, judges))  # the questions wait for it
        assert judges.addresses() == {"genrm_model": [url]}
        assert not psutil.pid_exists(owner) or psutil.Process(owner).status() == psutil.STATUS_ZOMBIE
    finally:
        judges.shutdown()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models", trust_env=False)


def test_what_a_judge_lacks_is_said_within_its_deadline(local_ray: None, config: Config) -> None:
    with pytest.raises(StalledError, match=r"engines of judges need 2 bundles of 8 worker_units.*num_gpu_nodes"):
        place_judges((8, 1), deadline_seconds=1)
    judge = StartedJudge(
        name="grader",
        server="local_vllm_model",
        model=config.policy.model_name,
        num_copies=1,
        gpus_per_copy=1,
        engine_arguments={"max_modle_len": 64},
    )
    deadlines: Any = config.deadlines
    cfg = config.policy.generation
    judges = Judges.launch([judge], placement=[{"num_cpus": 0}], cfg=cfg, deadlines=deadlines)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"grader.*_kwargs.max_modle_len: vLLM has no such argument"):
        judges.load()
    assert time.monotonic() - began < deadlines.engine_start
