"""`make eval URL=...`: a model that vLLM serves earns the same rewards, row by row, as its weights do directly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from speed import patiently
from tiny_run import DEADLINES, launch_environment

from recipes.generation.engine_args import CPU_ENV, ENV

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
# Every other text earns another reward, so that equal rewards are equal answers. A server without a parser shows no
# special tokens and no incomplete characters, which a random model may say.
REWARD = r"""
import re, zlib

def score(response, row):
    return zlib.crc32(re.sub(r"</?\w+>|\ufffd", "", response).encode()) % 1000 / 1000
"""
NUM_ROWS = 12


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """Serve a model with vLLM's own program; give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    words += ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 27), "--block-size", "32", "--max-num-seqs", "32"]
    env = {**os.environ, **ENV, **CPU_ENV}
    with log.open("wb") as out:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + patiently(300)
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text(encoding="utf-8")[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=patiently(60))


def evaluate(place: Path, results: str, *words: str) -> subprocess.CompletedProcess[str]:
    reward = f"env.nemo_gym.reward.resources_servers.reward.file={place}/reward.py"
    fixed = ["--data", f"{place}/rows.jsonl", "--samples", "2", "--results", f"{place}/{results}", reward]
    command = [sys.executable, "-m", "tools.data.curriculum.evaluate", *words, *fixed]
    chat = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"  # the server is started without parsers, too
    command += [f"{chat}.enable_auto_tools=false", f"{chat}.tool_parser=null", f"{chat}.reasoning_parser=null"]
    command += ["policy.generation.max_new_tokens=12"]
    command += [f"deadlines.{name}={round(patiently(seconds))}" for name, seconds in DEADLINES.items()]
    env = {**os.environ, "SCALE": "tiny"}
    limit = patiently(400)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False)


def greedy(place: Path, results: str) -> list[tuple[Any, ...]]:
    [path] = (place / results).glob("eval-*/checkpoint/greedy/pass_rates.jsonl")
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(entry["row_id"], entry["mean_reward"], entry["mean_tokens"]) for entry in entries]


def test_a_served_model_earns_what_its_weights_earn(tmp_path: Path) -> None:
    launch_environment(tmp_path, num_rows=5, overrides={})
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    agent = {"type": "responses_api_agents", "name": "reward_simple_agent"}
    asked = [[{"role": "user", "content": f"{n} + {n * n} = ?"}] for n in range(NUM_ROWS)]
    rows = [{"responses_create_params": {"input": one}, "agent_ref": agent} for one in asked]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    direct = evaluate(tmp_path, "direct", str(tmp_path / "model"))
    assert direct.returncode == 0, direct.stdout[-2000:] + direct.stderr[-2000:]
    with served(tmp_path / "model", tmp_path / "server.log") as url:
        by_url = evaluate(tmp_path, "by_url", "--url", url)
        assert by_url.returncode == 0, by_url.stdout[-2000:] + by_url.stderr[-2000:]
        other = evaluate(tmp_path, "by_url", "--url", url, "--served", "another")
        assert other.returncode == 2 and "MODEL: got another, expected one of " in other.stderr
        again = evaluate(tmp_path, "by_url", "--url", url)
        assert again.returncode == 0 and "12 rows, 2 answers each: 0 to answer" in again.stdout
    assert greedy(tmp_path, "by_url") == greedy(tmp_path, "direct")
    assert len({reward for _, reward, _ in greedy(tmp_path, "direct")}) > NUM_ROWS // 2

    gone = evaluate(tmp_path, "by_url", "--url", url)
    assert gone.returncode == 2 and "it lists no models" in gone.stderr and "start the engine" in gone.stderr
