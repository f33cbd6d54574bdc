"""`make try`: from a model, rows and a reward to the report, killed in the middle; wrong inputs all at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from speed import patiently
from tiny_run import launch_environment

ROOT = Path(__file__).resolve().parents[2]
EXACT = "def score(response, row):\n    return float(row['expected_answer'] in response)\n"
SETTINGS = (
    "grpo.num_prompts_per_step=4 grpo.num_generations_per_prompt=2 grpo.max_num_steps=3 grpo.val_at_start=false "
    "grpo.val_at_end=false policy.generation.max_new_tokens=8 checkpointing.save_period=1"
)

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    rows = [{"question": f"Say the number after {n}.", "answer": str(n + 1)} for n in range(40)]
    name = f"try{os.getpid()}"
    (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "exact.py").write_text(EXACT, encoding="utf-8")
    yield tmp_path / f"{name}.jsonl"
    shutil.rmtree(ROOT / "data" / f"own-{name}", ignore_errors=True)


def command(place: Path, model: str, data: str, reward: str, settings: str) -> list[str]:
    names = [f"MODEL={model}", f"DATA={data}", f"REWARD={reward}"]
    return ["make", "-s", "try", *names, f"RESULTS_DIR={place}/results", f"ARGS={settings}"]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=patiently(600), check=False)


def test_all_wrong_inputs_are_said_before_anything_long(tmp_path: Path) -> None:
    wrong = run(command(tmp_path, "models/nothing", f"{tmp_path}/gone.jsonl", f"{tmp_path}/gone.py", "grpo.nothing=1"))
    assert wrong.returncode == 2
    assert "MODEL=models/nothing: " in wrong.stderr and "nemotron-h" in wrong.stderr
    assert "gone.jsonl: it is taken for a path, and nothing is there" in wrong.stderr
    assert "REWARD: got " in wrong.stderr
    assert "grpo.nothing" in wrong.stderr
    assert "nothing was started" in wrong.stderr
    assert not (tmp_path / "results").exists()
    nothing = run(["make", "-s", "try"])
    assert nothing.returncode == 2
    assert "MODEL: it is not given; give MODEL=smollm2" in nothing.stderr and "DATA: it is not given" in nothing.stderr


def test_a_killed_try_goes_on_where_it_stopped(mine: Path) -> None:
    launch_environment(mine.parent, num_rows=5, overrides={})
    words = command(mine.parent, f"{mine.parent}/model", str(mine), f"{mine.parent}/exact.py", SETTINGS)
    results = mine.parent / "results"
    with (mine.parent / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + patiently(500)
    while not list(results.glob("*/checkpoints/step_000001/COMPLETE")):
        said = (mine.parent / "log").read_text(encoding="utf-8")
        assert process.poll() is None and time.monotonic() < end, said[-4000:]
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    for one in (psutil.Process(process.pid), *below):
        with suppress(psutil.NoSuchProcess):  # some end with those before them
            one.send_signal(signal.SIGKILL)
    process.wait(timeout=patiently(20))
    psutil.wait_procs(below, timeout=patiently(30))

    again = run(words)
    assert again.returncode == 0, again.stdout[-4000:] + again.stderr[-3000:]
    said = (mine.parent / "log").read_text(encoding="utf-8")
    assert "make data-import " in said and "[8] train" in said
    assert "checkpoint: solves " in again.stdout and " of 4 rows: " in again.stdout
    assert "up to date" in again.stdout  # what was measured is not measured again
    [run_dir] = [path.parent for path in results.glob("*/metrics.jsonl")]
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == [1, 2, 3]
    resumed = (run_dir / "logs" / "latest" / "driver.log").read_text(encoding="utf-8")
    assert "step_000001: step 1" in resumed or "step_000002: step 2" in resumed  # by how soon it was killed
    assert (run_dir / "report.html").is_file()

    third = run(words)
    assert third.returncode == 0
    assert "is trained already" in third.stdout and "train; progress" not in third.stdout
