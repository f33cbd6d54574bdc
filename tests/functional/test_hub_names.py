"""A model and rows by their names on a hub on loopback: fetched once at one commit, resumed, trained, recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import Hub, broken_off, environment, running_hub, status
from speed import patiently
from tiny_run import TWO_STEPS, launch_environment

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
NAME, COMMIT = "lab/small", "0123456789abcdef0123456789abcdef01234567"
QUESTIONS = b"".join(b'{"question": "Say %d.", "answer": "%d"}\n' % (n, n) for n in range(40))


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"main/train-0.jsonl": QUESTIONS, "main/train-1.jsonl": QUESTIONS, "main/test.jsonl": b"{}\n"}
    with running_hub(Hub(NAME, COMMIT, files)) as hub:
        yield hub


def run(place: Path, hub: Hub, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    env = environment(place, hub, **more)
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(400), check=False
    )


def test_rows_by_name_are_fetched_once_at_one_commit(hub: Hub, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def score(response, row):\n    return 0.0\n", encoding="utf-8")
    words = ("tools.data.import_rows", "--rows", NAME, "--out", str(tmp_path / "own"), "--reward", str(reward))
    hub.faults["get"] = [broken_off(1.0), status(403)]  # the first file comes, the second is refused
    refused = run(tmp_path, hub, *words)
    assert refused.returncode == 2 and "HTTP 403" in refused.stderr
    assert not (tmp_path / "own").exists()

    hub.requests.clear()
    done = run(tmp_path, hub, *words)
    assert done.returncode == 0, done.stderr
    assert hub.requests == ["info", "get"]  # what was there is not asked for again
    assert "expected_answer (80 of 80 rows)" in done.stdout
    manifest = json.loads((tmp_path / "own" / "rows.jsonl.manifest.json").read_text(encoding="utf-8"))
    assert manifest["parameters"]["hub"] == f"{NAME}@{COMMIT}"

    hub.requests.clear()
    hub.commit = "f" * 40  # the branch moves on
    assert run(tmp_path, hub, *words).returncode == 0
    assert hub.requests == []
    other = run(tmp_path, hub, *words[:2], f"{NAME}@{'e' * 40}", *words[3:])
    assert other.returncode == 2 and "no such commit; correct the revision" in other.stderr


def test_a_name_of_nothing_says_what_it_was_taken_for(hub: Hub, tmp_path: Path) -> None:
    words = ("tools.data.files.fetch", "--model", "lab/nothing", "--rows", "data/nothing.jsonl")
    refused = run(tmp_path, hub, *words)
    assert refused.returncode == 2
    first, second = refused.stderr.splitlines()[-2:]
    assert "lab/nothing, no path here, so taken for the name of a model on the hub: the hub has no such" in first
    assert second.startswith("data/nothing.jsonl: it is taken for a path, and nothing is there; correct the path")
    no_model = run(tmp_path, hub, "tools.data.files.fetch", "--model", NAME)
    assert no_model.returncode == 2 and "it holds no model" in no_model.stderr


@pytest.mark.parametrize(("option", "kind"), [("--rows", ".jsonl"), ("--model", ".json")])
def test_no_file_is_written_outside_of_the_cache(hub: Hub, tmp_path: Path, option: str, kind: str) -> None:
    escape = f"additional_chat_templates/{'../' * 12}{tmp_path}/escaped{kind}"
    hub.files = {escape: QUESTIONS, "config.json": b"{}", "model.safetensors": b"{}"}
    refused = run(tmp_path, hub, "tools.data.files.fetch", option, NAME)
    assert refused.returncode == 2 and "escaped" in refused.stderr and "check HF_ENDPOINT" in refused.stderr
    assert not (tmp_path / f"escaped{kind}").exists()
    assert hub.requests == ["info"]


def test_a_run_starts_from_a_model_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    variables = launch_environment(tmp_path, num_rows=24, overrides=TWO_STEPS)
    hub.files |= {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    shutil.rmtree(tmp_path / "model")
    env = {**variables, **environment(tmp_path, hub), **{key: variables[key] for key in variables if key in CONTRACT}}
    env |= {"MODEL_PATH": NAME, "EXP_NAME": "run", "PYTHON": sys.executable}
    launch = [str(ROOT / "super_launch.sh"), "stage1.1"]
    dry = subprocess.run([*launch, "--dry-run"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert dry.returncode == 2
    assert f"and {NAME} is not in the cache; run `make fetch MODEL_PATH={NAME}`" in dry.stderr
    assert not hub.requests

    limit = patiently(500)
    done = subprocess.run(launch, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lock = json.loads((tmp_path / "run" / "run.lock.json").read_text(encoding="utf-8"))
    snapshot = tmp_path / "home" / "hub" / "models--lab--small" / "snapshots" / COMMIT
    assert (lock["model"]["hub"], lock["model"]["path"]) == (f"{NAME}@{COMMIT}", str(snapshot))


CONTRACT = ("SCALE", "LAUNCHER", "RESULTS_DIR", "TRAIN_PATH", "VAL_PATH", "EXTRA_HYDRA_ARGS")
