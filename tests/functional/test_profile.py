"""`make profile` with a real engine: killed in the middle and started again, every row is measured exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from speed import patiently
from tiny_run import DEADLINES, launch_environment

from recipes.grpo.data import PromptDataset, row_id

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, SAMPLES, SEEN = 204, 3, 3
START_SECONDS, EXIT_SECONDS = 300.0, 200.0


def command(place: Path, *more: str) -> list[str]:
    files = ["--model", str(place / "model"), "--data", str(place / "train.jsonl"), "--run-dir", str(place / "run")]
    fixed = ["--config", "configs/tiny/stage1_rlvr.yaml", "--samples", str(SAMPLES)]
    return [sys.executable, "-m", "tools.data.curriculum.profile", *fixed, *files, *more, *deadlines()]


def deadlines() -> list[str]:
    """Give the engine time by the speed of the machine: an answer that is late is no verdict."""
    return [f"deadlines.{name}={round(patiently(seconds))}" for name, seconds in DEADLINES.items()]


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def test_a_killed_profile_goes_on_where_it_stopped(tmp_path: Path) -> None:
    launch_environment(tmp_path, num_rows=NUM_ROWS, overrides={})
    known, result = tmp_path / "run/.pass_rates.jsonl.known", tmp_path / "run/pass_rates.jsonl"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + patiently(START_SECONDS)
    while len(lines_of(known)) < SEEN:
        assert process.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")[-3000:]
        assert time.monotonic() < end, (tmp_path / "log").read_text(encoding="utf-8")[-3000:]
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=patiently(20))
    _, alive = psutil.wait_procs(below, timeout=patiently(30))
    for left in alive:
        left.kill()
    kept = [line for line in known.read_text(encoding="utf-8").split("\n")[:-1]]
    assert SEEN <= len(kept) < NUM_ROWS - 4, "the kill came too late to show anything"
    assert not result.exists()

    again = subprocess.run(
        command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=patiently(EXIT_SECONDS), check=False
    )
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-2000:]
    rows = PromptDataset(tmp_path / "train.jsonl")
    written = lines_of(result)
    entries = [json.loads(line) for line in written]
    assert [entry["line"] for entry in entries] == list(range(1, len(rows) + 1))
    assert [entry["row_id"] for entry in entries] == [row_id(rows[index]) for index in range(len(rows))]
    assert set(kept) <= set(written)  # what was measured before the kill was not measured again
    assert all(entry["num_scored"] == SAMPLES for entry in entries)
    assert {round(entry["pass_rate"] * SAMPLES, 6) for entry in entries} <= {0.0, 1.0, 2.0, 3.0}
    assert not known.exists()

    nothing = subprocess.run(
        command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=patiently(EXIT_SECONDS), check=False
    )
    assert nothing.stdout == f"profile: {result} is up to date\n", nothing.stdout
    other = subprocess.run(
        command(tmp_path, "--samples", "4"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patiently(EXIT_SECONDS),
        check=False,
    )
    assert other.returncode == 2
    assert "parameters.samples was 3, is 4" in other.stdout + other.stderr
    assert lines_of(result) == written


def test_an_evaluation_answers_each_row_sampled_and_greedy_once(tmp_path: Path) -> None:
    launch_environment(tmp_path, num_rows=10, overrides={})
    model, rows = str(tmp_path / "model"), str(tmp_path / "train.jsonl")
    words = [model, "--baseline", model, "--data", rows, "--samples", "2"]
    out = ["--results", str(tmp_path), *deadlines()]
    command = [sys.executable, "-m", "tools.data.curriculum.evaluate", *words, *out]
    env = {**os.environ, "SCALE": "tiny"}
    for answered in ("6 to answer", "is up to date"):  # the second time nothing is sampled
        ended = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(EXIT_SECONDS), check=False
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-2000:]
        assert answered in ended.stdout
    found = json.loads((tmp_path / "eval-model" / "evaluation.json").read_text(encoding="utf-8"))
    everything = found["scores"]["checkpoint"]["all rows"]
    assert everything["num_rows"] == 6 and set(everything["pass_at"]) == {"1", "2"}
    assert everything["greedy"] is not None and found["gain"]["all rows"]["mean"] == 0.0  # the same model twice
    page = (tmp_path / "eval-model" / "evaluation.html").read_text(encoding="utf-8")
    assert "<h3>pass@k of all rows</h3>" in page and str(tmp_path / "model") in page


def test_a_checkpoint_answers_what_is_typed(tmp_path: Path) -> None:
    launch_environment(tmp_path, num_rows=5, overrides={})
    command = [sys.executable, "-m", "tools.look.chat", str(tmp_path / "model")]
    ended = subprocess.run(
        [*command, "policy.generation.max_new_tokens=5"],
        cwd=ROOT,
        env={**os.environ, "SCALE": "tiny"},
        input="Say 3.\n\nSay 4.\n",
        capture_output=True,
        text=True,
        timeout=patiently(EXIT_SECONDS),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second, *rest = ended.stdout.splitlines()[-4:]
    assert "one line is one message" in first and second != "(a new conversation)"
    assert rest[0] == "(a new conversation)" and rest[1]
