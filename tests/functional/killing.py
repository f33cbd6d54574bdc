"""A run on two cores that loses processes, and what must be true at its end."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from speed import patiently
from tiny_run import launch_environment

from recipes.grpo.checkpoint import complete_checkpoints, latest_checkpoint, load_state

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GENERATIONS = 4, 2
OVERRIDES = {
    "grpo.num_prompts_per_step": PROMPTS,
    "grpo.num_generations_per_prompt": GENERATIONS,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "policy.generation.max_new_tokens": 64,
}
START_SECONDS, STOP_SECONDS = 600.0, 180.0


@dataclass(frozen=True)
class RunCase:
    """One run: `make stage1.1` in a directory, with the number of its steps."""

    directory: Path
    num_steps: int
    environment: Mapping[str, str]

    @property
    def run_dir(self) -> Path:
        return self.directory / "lost"

    def text(self) -> str:
        """Return what the last start has printed."""
        return (self.directory / "log").read_text(errors="replace", encoding="utf-8")

    def steps_done(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else 0

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start it; ask it to stop on the way out if it still runs."""
        with (self.directory / "log").open("wb") as out:
            run = subprocess.Popen(["make", "stage1.1"], cwd=ROOT, env=self.environment, stdout=out, stderr=out)
        try:
            yield run
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(timeout=patiently(60))

    def wait_until(self, run: subprocess.Popen[bytes], condition: Callable[[], Any], what: str) -> None:
        """Wait for something while it runs."""
        deadline = time.monotonic() + patiently(START_SECONDS)
        while not condition():
            assert run.poll() is None, f"ended before {what}:\n{self.text()[-6000:]}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.text()[-6000:]}"
            time.sleep(0.05)

    def stop(self, run: subprocess.Popen[bytes]) -> None:
        """Ask the run to stop; it must save its last step, with every prompt trained once or to come."""
        find(psutil.Process(run.pid), "run_grpo.py")[0].terminate()
        run.wait(timeout=patiently(STOP_SECONDS))
        assert "Error 75" in self.text(), self.text()[-6000:]
        assert exact_step(self.run_dir) == self.steps_done()

    def check_end(self, *, may_fail: bool = False) -> None:
        """Every step is there once, with its prompts, and every prompt was trained once, or has failed if it may."""
        ledger = load_state(complete_checkpoints(self.run_dir / "checkpoints")[self.num_steps]).ledger
        steps = range(1, self.num_steps + 1)
        trained = Counter(entry.step for entry in ledger if entry.step > 0)
        assert trained == dict.fromkeys(steps, PROMPTS)
        assert may_fail or len(ledger) == trained.total(), "a prompt has failed"
        rows = sorted(int(entry.key.split(":")[1]) for entry in ledger)
        assert rows == list(range(len(ledger))), "a prompt was lost, or trained twice"
        records = [
            json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert [record["step"] for record in records] == list(steps)


def exact_step(run_dir: Path) -> int:
    """Return the step that is saved; every prompt up to the saved position must be there once.

    It was trained, has failed, or is to come. Every step up to that one must be in metrics.jsonl as well.
    """
    newest = latest_checkpoint(run_dir / "checkpoints")
    if newest is None:
        return 0
    assert not list((run_dir / "checkpoints").glob("damaged_*")), "a checkpoint was complete, but not whole"
    state = load_state(newest)
    per_step = Counter(entry.step for entry in state.ledger if entry.step > 0)
    assert per_step == dict.fromkeys(range(1, state.step + 1), PROMPTS), "a step trained another number of prompts"
    waiting: list[Any] = [*state.collector.in_flight, *state.collector.finished]
    rows = [int(entry.key.split(":")[1]) for entry in state.ledger] + [one.prompt.row_index for one in waiting]
    assert sorted(rows) == list(range(state.collector.position)), "a prompt was trained twice, or is lost"
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line)["step"] for line in lines[: state.step]]
    assert logged == list(range(1, state.step + 1)), "metrics.jsonl lacks a step"
    return state.step


def make_case(directory: Path, num_steps: int, overrides: Mapping[str, Any]) -> RunCase:
    """Write model and rows; a few rows more than are needed."""
    settings = {**OVERRIDES, "grpo.max_num_steps": num_steps, **overrides}
    environment = launch_environment(directory, num_rows=num_steps * PROMPTS + 20, overrides=settings)
    environment |= {"EXP_NAME": "lost", "MODEL_PATH": str(directory / "model")}
    return RunCase(directory=directory, num_steps=num_steps, environment=environment)


def find(parent: psutil.Process, name: str) -> list[psutil.Process]:
    """Return the processes below `parent` with this title, or with a first argument that ends so, by process id."""
    found = []
    for process in parent.children(recursive=True):
        try:
            words = process.cmdline()[:2]
        except psutil.NoSuchProcess:
            continue
        if any(word.startswith(name) for word in words[:1]) or any(word.endswith(name) for word in words[1:]):
            found.append(process)
    return sorted(found, key=lambda process: process.pid)
