"""The whole data path of one blend against a misbehaving hub: every fault, ten kills, the same bytes at the end."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import psutil
import pyarrow
import pytest
import yaml
from loopback_hub import Hub, broken_off, environment, running_hub, status
from pyarrow import parquet
from speed import patiently

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
DATASET, COMMIT = "org/blends", "0123456789abcdef0123456789abcdef01234567"
MATH, DAPO = "super_v3_lcsft_step1000_skyworks", "super_v3_lcsft_step1000_dapo17k"
AGENT = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}
NUM_ROWS, NUM_QUESTIONS, VAL_ROWS = 6000, 500, 100
TABLE = b"id,name\n1,a\n"
KILLS = 10
REASONING = {"strip": 0.1, "truncate": 0.03}  # no row holds reasoning of earlier turns, so none is cut
OFF = '{"enable_thinking": false}'
MORE = {"HF_TOKEN": "for-the-hub-alone", "DATA_WORKERS": "2"}


def placeholder(number: int) -> dict[str, object]:
    template: object = {"prefix": "Solve: ", "suffix": "\nThink."} if number % 2 else "Answer this: {question}"
    reference = {"row": number % NUM_QUESTIONS, "question_template": template}
    return {"dataset": DAPO if number % 2 else MATH, "agent_ref": AGENT, "_hf_placeholder": reference, "n": number}


def whole_row(number: int) -> dict[str, object]:
    text = f"What is {number} plus {number}? " + "x" * 1500
    return {"responses_create_params": {"input": text}, "agent_ref": AGENT, "expected_answer": str(2 * number)}


def question(number: int) -> str:
    return f"Instructions.\n\nWhat is {number} times seven?\n\nRemember them."


def source_file() -> bytes:
    records = [
        {"prompt": [{"content": question(n)}], "reward_model": {"ground_truth": str(7 * n)}}
        for n in range(NUM_QUESTIONS)
    ]
    content = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), content, row_group_size=100)
    return content.getvalue()


BLEND = b"".join(
    json.dumps(placeholder(n) if n % 10 == 0 or n % 10 == 3 else whole_row(n)).encode() + b"\n" for n in range(NUM_ROWS)
)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    files = {
        "rlvr1.jsonl": BLEND,
        "data/math-00000-of-00001.parquet": source_file(),
        "train/dapo.parquet": source_file(),
    }
    side = {f"org/gym/{COMMIT}/tables/a.csv": TABLE}
    with running_hub(Hub(DATASET, COMMIT, files, raw=side)) as hub:
        yield hub


@pytest.fixture
def place(tmp_path: Path) -> Path:
    blends = {
        DATASET: {
            "revision": COMMIT,
            "blends": {"rlvr1": {"files": {"rlvr1.jsonl": {"rows": NUM_ROWS}}, "reasoning": REASONING}},
        }
    }
    source = {"dataset": DATASET, "revision": COMMIT, "question": ["prompt", 0, "content"]}
    source |= {"answer": ["reward_model", "ground_truth"]}
    sources = {MATH: source | {"split": "math", "style": "skywork"}, DAPO: source | {"split": "train", "style": "dapo"}}
    side = {"blends": ["rlvr1"], "repository": "org/gym", "revision": COMMIT, "path": "tables"}
    side["files"] = {"a.csv": {"bytes": len(TABLE), "sha256": sha256(TABLE).hexdigest()}}
    (tmp_path / "blends.yaml").write_text(yaml.safe_dump({"datasets": blends}), encoding="utf-8")
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump({"sources": sources}), encoding="utf-8")
    (tmp_path / "side_files.yaml").write_text(yaml.safe_dump({"side_files": {"office": side}}), encoding="utf-8")
    return tmp_path


def command(place: Path, data: Path) -> list[str]:
    tables = [f"--{name}={place / name.replace('-', '_')}.yaml" for name in ("blends", "sources", "side-files")]
    fixed = ["--blend", "rlvr1", "--data", str(data), "--val-rows", str(VAL_ROWS), "--back-off", "0.01"]
    return [sys.executable, "-m", "tools.data.prepare", *fixed, *tables]


def prepare(place: Path, data: Path, hub: Hub) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(place, data),
        cwd=ROOT,
        env=environment(place, hub, **MORE),
        capture_output=True,
        text=True,
        timeout=patiently(120),
        check=False,
    )


def outputs(data: Path) -> dict[str, bytes]:
    """Return every file below `data`."""
    return {str(path.relative_to(data)): path.read_bytes() for path in sorted(data.rglob("*")) if path.is_file()}


def faults() -> list[object]:
    return [
        status(429, Retry_After="0"),
        status(503),
        broken_off(0.3),
        broken_off(0.5, reset=True),
        status(500),
    ]


def test_the_path_gives_what_its_rules_say(place: Path, hub: Hub) -> None:
    result = prepare(place, place / "data", hub)
    assert result.returncode == 0, result
    train = (place / "data/rlvr1/train-split.jsonl").read_bytes().splitlines(keepends=True)
    validation = (place / "data/rlvr1/val-split.jsonl").read_bytes().splitlines(keepends=True)
    assert (len(train), len(validation)) == (NUM_ROWS - VAL_ROWS, VAL_ROWS)
    blend, num_off = BLEND.splitlines(keepends=True), 0
    for number, line in enumerate([*train, *validation]):
        row = json.loads(line)
        if off := row["responses_create_params"].pop("metadata", None):
            assert off == {"chat_template_kwargs": OFF}
            num_off += 1
        if number % 10 not in (0, 3):
            assert row == json.loads(blend[number])
            assert off or line == blend[number]
            continue
        text = question(number % NUM_QUESTIONS)
        core = f"What is {number % NUM_QUESTIONS} times seven?"
        prompt = f"Solve: {core}\nThink." if number % 2 else f"Answer this: {text}"
        assert row["responses_create_params"] == {"input": [{"role": "user", "content": prompt}]}
        assert row["expected_answer"] == str(7 * (number % NUM_QUESTIONS))
        assert row["n"] == number
    assert num_off == NUM_ROWS // 10
    manifest = json.loads((place / "data/rlvr1/raw/filled.jsonl.manifest.json").read_text(encoding="utf-8"))
    assert manifest["questions"][MATH]["0"] == sha256(question(0).encode()).hexdigest()
    assert (place / "data/side_files/office/a.csv").read_bytes() == TABLE
    before = outputs(place / "data")
    again = prepare(place, place / "data", hub)
    assert again.stdout.count("is up to date") == 5, again.stdout
    assert outputs(place / "data") == before


def test_faults_and_ten_kills_leave_no_trace_in_any_output(place: Path, hub: Hub) -> None:
    start = time.monotonic()
    assert prepare(place, place / "reference", hub).returncode == 0
    seconds = time.monotonic() - start
    rng = random.Random(11)
    shares = [(kill + rng.random()) / KILLS for kill in range(KILLS)]  # over the whole path, in any order
    rng.shuffle(shares)
    num_killed = 0
    workers: list[psutil.Process] = []
    for share in shares:
        hub.faults |= {"list": [status(503)], "get": faults(), "raw": faults()}
        with subprocess.Popen(
            command(place, place / "data"),
            cwd=ROOT,
            env=environment(place, hub, **MORE),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            start = time.monotonic()
            while (passed := time.monotonic() - start) < share * seconds and process.poll() is None:
                time.sleep(0.005)
            if process.poll() is None:
                workers += psutil.Process(process.pid).children(recursive=True)
                num_killed += 1
            else:
                seconds = passed  # the machine has less to do than at the start
            process.kill()
        if rng.random() < 0.5:  # so that every step is killed, not only the last ones
            for path in (place / "data/rlvr1").glob("**/*.manifest.json"):
                path.unlink(missing_ok=True)
            (place / "data/rlvr1/manifest.json").unlink(missing_ok=True)
    assert num_killed >= KILLS // 2
    assert psutil.wait_procs(workers, timeout=patiently(20))[1] == []  # those of a killed parent end by themselves
    hub.faults |= {"list": [status(503)], "get": faults(), "raw": faults()}
    result = prepare(place, place / "data", hub)
    assert result.returncode == 0, result
    assert outputs(place / "data") == outputs(place / "reference")
    assert "raw" not in hub.with_token
