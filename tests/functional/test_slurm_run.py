"""`make stage1.1` on a real Slurm cluster of two nodes, to its end, whatever happens to it on the way.

Real Ray, vLLM and Megatron: policy and driver on the first node, the engine on the second. One run, one test: it is
asked to save, loses a node's slurmd, loses its engine, is submitted again with too little time, and finishes with a
ledger in which every prompt was trained once.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from slurm.cluster import Cluster
from slurm.conf import address
from slurm.jobs import Job, launch, slurm_environment
from story import step
from tiny_run import launch_environment

from recipes.cluster.ports import PORT_TABLE
from recipes.grpo.checkpoint import complete_checkpoints, load_state

pytestmark = [pytest.mark.functional, pytest.mark.timeout(2400)]

STEPS, PROMPTS, SAVE_PERIOD = 4000, 2, 1  # more steps than any start of the test has time for
LAST_STEPS = 20  # of the start that finishes
START_SECONDS = 300.0  # until the first steps are saved, on a busy machine
STEPS_SECONDS = 30.0  # of a start: a few steps, and the 20 s that it keeps free for its save
ENGINE_DEATH_SECONDS = 180.0  # deadlines.generation and deadlines.shutdown of the tiny scale, then the end of the job


def environment(directory: Path) -> dict[str, str]:
    """Write the inputs of a run whose steps are short."""
    overrides = {
        "cluster.num_nodes": 2,
        "cluster.gpus_per_node": 1,
        "grpo.num_prompts_per_step": PROMPTS,
        "grpo.num_generations_per_prompt": 2,
        "grpo.max_num_steps": STEPS,
        "grpo.val_at_start": "false",
        "grpo.val_at_end": "false",
        "checkpointing.save_period": SAVE_PERIOD,
        "checkpointing.keep_top_k": 2,
        "policy.generation.max_new_tokens": 8,
        "deadlines.generation": 60,  # the test waits for it
    }
    env = launch_environment(directory, num_rows=STEPS * PROMPTS + 4, overrides=overrides)
    return env | slurm_environment(directory) | {"CONTAINER_RUNTIME": "none"}


def saved(job: Job) -> int:
    return max(complete_checkpoints(job.run_dir / "checkpoints"), default=0)


def assert_exact(job: Job, num_steps: int) -> None:
    """Every step trained its own prompts, each prompt once, none skipped, and the metrics show each step once."""
    ledger = load_state(complete_checkpoints(job.run_dir / "checkpoints")[num_steps]).ledger
    assert Counter(entry.step for entry in ledger) == dict.fromkeys(range(1, num_steps + 1), PROMPTS)
    rows = [int(entry.key.split(":")[1]) for entry in ledger]
    assert sorted(rows) == list(range(num_steps * PROMPTS)), "a prompt was trained twice or skipped"
    records = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    # Sampled on one node, trained on the other: the weights that crossed are the same.
    assert (
        max(record["train/logprob_error_max"] for record in records if record["train/max_trajectory_age"] == 0) < 1e-4
    )


def outside_the_table(cluster: Cluster, node: str) -> list[str]:
    """Return what the programs of a job listen on that the port table does not have, or not on that address."""
    own = address(cluster.nodes.index(node) + 1)
    shown = cluster.on_node(node, [sys.executable, str(Path(__file__).with_name("listening.py"))]).stdout
    found = []
    for place, port, command in json.loads(shown):
        if ipaddress.ip_address(place).is_loopback or command.startswith(("slurm", "srun", "munged")):
            continue
        is_ours = any(ports.low <= port < ports.high and (ports.is_open or place == own) for ports in PORT_TABLE)
        if not is_ours:
            found.append(f"{place}:{port} {command}")
    return found


@pytest.mark.slow  # seven minutes
def test_a_run_comes_to_its_end_whatever_happens_on_the_way(slurm_cluster: Cluster, tmp_path: Path) -> None:
    env = environment(tmp_path)
    began = time.monotonic()
    job = launch(slurm_cluster, "stage1.1", env)

    with step("driver and engine are on different nodes"):
        job.wait_until(lambda: saved(job) >= SAVE_PERIOD, "first checkpoint", seconds=START_SECONDS)
        start_seconds = time.monotonic() - began
        log = job.driver_log(1)
        assert "generation engine 0 (node n2," in log, log[-3000:]
        assert (job.run_dir / "logs" / "attempt_1" / "ray_head_n1.log").exists()  # the driver runs beside the head
        assert re.search(r"\+[0-9.]+ s: the driver starts", log)

    with step("every port is in the table, with its address"):
        assert [outside_the_table(slurm_cluster, node) for node in slurm_cluster.nodes] == [[], []]

    with step("USR1 saves and requeues"):
        slurm_cluster.run(["scancel", "--signal=USR1", job.id])
        job.wait_until(lambda: job.restarts == 1, "requeue", seconds=120)
        assert "(signal SIGUSR1); start again to resume" in job.driver_log(1), job.everything()
        assert "requeued: saved step_" in job.log
        first = saved(job)
        job.wait_until(lambda: saved(job) > first, "checkpoint of the second start", seconds=START_SECONDS)
        assert f"step {first}, " in job.driver_log(2), "did not resume from the last checkpoint"

    with step("a killed slurmd is named, and the job runs again"):
        before = saved(job)
        slurmd = slurm_cluster.on_node("n2", ["pgrep", "-x", "slurmd"]).stdout.strip()
        slurm_cluster.on_node("n2", ["kill", "-9", slurmd])
        job.wait_until(lambda: job.restarts == 2, "requeue after the loss of n2", seconds=120)
        slurm_cluster.kill_node("n2")
        slurm_cluster.start_node("n2")
        # Said by the start that was ended, or by the next one when Slurm left the first no time.
        lost = re.compile(r"node n2 is lost|n2 is down|Node failure on n2")
        job.wait_until(lambda: lost.search(job.log) is not None, "word of the loss of n2", seconds=60)
        job.wait_until(lambda: saved(job) > before and job.driver_log(3) != "", "third start", seconds=START_SECONDS)

    with step("a dead engine on a node that answers is named, and the job runs again"):
        job.wait_until(lambda: "| reward" in job.driver_log(3), "a step of the third start", seconds=START_SECONDS)
        for pid in slurm_cluster.on_node("n2", ["pgrep", "-f", "VLLM::EngineCor"]).stdout.split():
            slurm_cluster.on_node("n2", ["kill", "-9", pid], check=False)
        job.wait_until(lambda: job.restarts == 3, "requeue after the death of the engine", seconds=ENGINE_DEATH_SECONDS)
        assert "generation engine 0 (node n2" in "".join(job.driver_log(3).splitlines()[-3:]), job.everything()
        assert "requeued: failed with status 1 after it had saved step_" in job.log, job.everything()
        assert "n2 failed and may be used again: the partition has no other node" in job.log, job.everything()
        job.wait_until(lambda: job.driver_log(4) != "", "fourth start", seconds=START_SECONDS)
        slurm_cluster.run(["scancel", job.id])
        assert job.wait(seconds=60) == "CANCELLED"

    with step("a job that is too short for the rest saves and requeues"):
        limit = math.ceil((1.5 * start_seconds + STEPS_SECONDS) / 60)  # the machine may be busier now
        short = launch(slurm_cluster, "stage1.1", env | {"SLURM_TIME_LIMIT": str(limit)})
        short.wait_until(lambda: short.restarts == 1, "requeue at the time limit", seconds=60 * limit + START_SECONDS)
        assert "(the job's time limit); start again to resume" in short.driver_log(5), short.everything()
        assert "requeued: saved step_" in short.log
        slurm_cluster.run(["scancel", short.id])
        assert short.wait(seconds=60) == "CANCELLED"

    with step("a job with time enough goes on from there and finishes"):
        num_steps, cut_short = saved(short) + LAST_STEPS, short.driver_log(5)
        arguments = f"{env['EXTRA_HYDRA_ARGS']} grpo.max_num_steps={num_steps}"
        last = launch(slurm_cluster, "stage1.1", env | {"EXTRA_HYDRA_ARGS": arguments})
        assert last.wait(seconds=START_SECONDS + 300) == "COMPLETED", last.everything()

    with step("every prompt was trained once, and no start has overwritten another's logs"):
        assert_exact(last, num_steps)
        assert last.driver_log(5) == cut_short
        logs = {path.parent.name for path in (last.run_dir / "logs").glob("attempt_*/driver.log")}
        assert logs >= {f"attempt_{number}" for number in range(1, 6)} and len(logs) > 5
