"""The pipeline with a recording Slurm: what is submitted after what, what is refused, what a failure leaves."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.grpo.checkpoint import SavedState, write_state
from recipes.grpo.data import CollectorState, DataIdentity, PromptDataset
from tests.in_process import Done, in_process
from tools.launch.pipeline import main

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"stage1.1": "rlvr1", "stage1.2": "rlvr2", "stage1.3": "rlvr3"}
# Each call leaves its words in calls/N and gets job 100 + N; call `fail` is refused.
SBATCH = """#!/usr/bin/env bash
number=$(($(ls calls | wc -l) + 1))
printf '%s\\0' "$@" >"calls/${number}"
[[ $(cat fail) != "${number}" ]] || { echo 'sbatch: error: Batch job submission failed: no' >&2; exit 1; }
echo "$((100 + number));cluster"
"""
SQUEUE = """#!/usr/bin/env bash
for word in "$@"; do [[ ${word} != --name=* ]] || cat "queue/${word#--name=}" 2>/dev/null; done
exit 0
"""
NO_CONTROLLER = "#!/usr/bin/env bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n"


@dataclass
class Pipeline:
    directory: Path
    env: dict[str, str]

    def __call__(self, *args: str, expect: int = 0, **variables: str) -> Done:
        env = {name: value for name, value in {**self.env, **variables}.items() if value}
        done = in_process(main, ["--stages", " ".join(STAGES), *args], env, self.directory)
        assert done.status == expect, done.stdout + done.stderr
        return done

    def calls(self) -> list[list[str]]:
        files = sorted((self.directory / "calls").iterdir(), key=lambda path: int(path.name))
        return [file.read_text(encoding="utf-8").split("\0")[:-1] for file in files]

    def run_dir(self, stage: str) -> Path:
        return self.directory / "results" / f"{stage}-{STAGES[stage]}-tiny"

    def train(self, stage: str, *, state: str, max_num_steps: int) -> Path:
        """Leave what a run leaves that has trained two steps; return its export."""
        run_dir = self.run_dir(stage)
        step = run_dir / "checkpoints" / "step_000002"
        shutil.copytree(self.env["MODEL_PATH"], step / "hf")
        digests = {f"hf/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in (step / "hf").iterdir()}
        (step / "COMPLETE").write_text(json.dumps(digests), encoding="utf-8")
        data = PromptDataset(Path(self.env["TRAIN_PATH"]))
        identity = DataIdentity(sha256=data.sha256, num_rows=len(data), shuffle=False, seed=42)
        waits = CollectorState(position=2, in_flight=(), finished=(), failed=())
        write_state(step, SavedState(step=2, data=identity, collector=waits, ledger=(), metrics={}))
        (step.parent / "latest").symlink_to(step.name)
        (run_dir / "status.json").write_text(json.dumps({"state": state}), encoding="utf-8")
        (run_dir / "resolved.json").write_text(
            json.dumps({"config": {"grpo": {"max_num_steps": max_num_steps}}}), encoding="utf-8"
        )
        return step.parent / "latest" / "hf"


@pytest.fixture
def pipeline(launch) -> Pipeline:
    directory = launch.directory
    shims = {"sbatch": SBATCH, "squeue": SQUEUE, **dict.fromkeys(("scontrol", "sinfo", "sacctmgr"), NO_CONTROLLER)}
    for name, text in shims.items():
        (directory / "bin" / name).write_text(text, encoding="utf-8")
        (directory / "bin" / name).chmod(0o755)
    for name in ("calls", "queue"):
        (directory / name).mkdir()
    (directory / "fail").write_text("none", encoding="utf-8")
    env = {**launch.env, "EXP_NAME": "", "CONFIG_PATH": "", "SCALE": "tiny", "SKIP_CODE_SNAPSHOT": "true"}
    return Pipeline(directory, env)


def option(words: list[str], name: str) -> list[str]:
    return [word.removeprefix(name) for word in words if word.startswith(name)]


def test_every_job_waits_for_its_parent_and_starts_from_its_export(pipeline):
    done = pipeline("grpo.max_num_steps=3")
    first, second, third = calls = pipeline.calls()
    assert [option(words, "--dependency=") for words in calls] == [[], ["afterok:101"], ["afterok:102"]]
    assert [words.count("--kill-on-invalid-dep=yes") for words in calls] == [0, 1, 1]
    assert [option(words, "--job-name=") for words in calls] == [[pipeline.run_dir(stage).name] for stage in STAGES]
    model = "policy.model_name="
    assert option(first, model) == [pipeline.env["MODEL_PATH"].rstrip("/")]
    assert option(second, model) == [f"{pipeline.run_dir('stage1.1')}/checkpoints/latest/hf"]
    assert option(third, model) == [f"{pipeline.run_dir('stage1.2')}/checkpoints/latest/hf"]
    assert all(words[0] == "--parsable" and words[-1] == "grpo.max_num_steps=3" for words in calls)
    assert done.stdout.splitlines()[1] == f"stage1.2: job 102, after job 101, {pipeline.run_dir('stage1.2')}"
    assert done.stdout.splitlines()[-1] == "cancel all: scancel 101 102 103"
    assert "stage1.2, stage1.3: start weights are the parent's last complete export, found and checked" in done.stderr
    lock = json.loads((pipeline.run_dir("stage1.2") / "run.lock.json").read_text(encoding="utf-8"))
    assert lock["model"] == {"path": f"{pipeline.run_dir('stage1.1')}/checkpoints/latest/hf"}


def test_printed_lines_are_what_is_submitted(pipeline):
    text = pipeline("grpo.max_num_steps=3", DRY_RUN="1").stdout
    assert pipeline.calls() == []
    assert not (pipeline.directory / "results").exists()
    subprocess.run(["bash", "-euc", text], env=pipeline.env, cwd=pipeline.directory, check=True, timeout=30)
    pasted = pipeline.calls()
    for file in (pipeline.directory / "calls").iterdir():
        file.unlink()
    pipeline("grpo.max_num_steps=3")
    assert pasted == pipeline.calls()
    assert len(pasted) == 3


def test_printed_lines_name_the_snapshot_that_is_still_to_be_written(pipeline):
    text = pipeline(DRY_RUN="1", SKIP_CODE_SNAPSHOT="").stderr
    lines = [
        line for line in text.splitlines() if "the launch itself writes " in line and "SKIP_CODE_SNAPSHOT=true" in line
    ]
    assert [line.split("/snapshots/")[1].split("/")[0] for line in lines] == [
        pipeline.run_dir(stage).name for stage in STAGES
    ]


def test_problems_of_all_stages_are_listed_at_once_and_nothing_is_submitted(pipeline):
    (pipeline.directory / "val.jsonl").unlink()
    text = pipeline("grpo.num_generations_per_prompt=1", expect=2, CONTAINER="/no/such.sqsh").stderr
    lines = [line for line in text.splitlines() if ": note: " not in line]
    assert all(line.startswith("pipeline: stage1.1, stage1.2, stage1.3: ") for line in lines), text  # each of them once
    assert len([line for line in lines if "val.jsonl: no such file" in line]) == 1
    assert any("grpo.num_generations_per_prompt: got 1" in line for line in lines)
    assert any("CONTAINER: there is no file /no/such.sqsh" in line for line in lines)
    assert pipeline.calls() == []
    assert not (pipeline.directory / "results").exists()


def test_wrong_stages_are_named_at_once(pipeline):
    text = pipeline("--stages", "stage1.1 stage9 rlvr7", expect=2).stderr
    assert "STAGES: got stage9" in text
    assert "STAGES: got rlvr7" in text
    text = pipeline(expect=2, CONFIG_PATH="configs/tiny/stage1_rlvr.yaml", ENGINE="nemo_rl").stderr
    assert "ENGINE: got nemo_rl, expected native" in text
    assert "CONFIG_PATH: it is set, and 3 stages cannot share one configuration" in text


def test_a_check_names_what_is_wrong_before_anything_is_made(pipeline):
    missing = {"MODEL_PATH": "/no/model", "TRAIN_PATH": "/no/rows"}
    assert not pipeline("--check", **missing).stdout
    refused = pipeline("--check", "grpo.max_num_step=7", expect=2, **missing)
    assert refused.stderr.count("did you mean grpo.max_num_steps?") == 1
    assert "/no/" not in refused.stderr
    assert pipeline.calls() == []


def test_failed_submission_ends_the_pipeline_and_says_how_to_cancel(pipeline):
    (pipeline.directory / "fail").write_text("3", encoding="utf-8")
    done = pipeline(expect=1)
    assert len(pipeline.calls()) == 3
    assert "stage1.3: sbatch failed: sbatch: error: Batch job submission failed: no" in done.stderr
    assert "submitted: stage1.1 is job 101, stage1.2 is job 102" in done.stderr
    assert "to cancel: scancel 101 102" in done.stderr

    (pipeline.directory / "fail").write_text("4", encoding="utf-8")
    assert "to cancel" not in pipeline(expect=1).stderr  # nothing was submitted


def test_finished_stages_are_left_out_and_the_rest_begins_from_the_finished_export(pipeline):
    export = pipeline.train("stage1.1", state="done", max_num_steps=3)
    pipeline.train("stage1.2", state="stopped", max_num_steps=3)
    done = pipeline("grpo.max_num_steps=3")
    second, third = pipeline.calls()
    assert option(second, "--job-name=") == ["stage1.2-rlvr2-tiny"]
    assert option(second, "--dependency=") == []
    assert option(second, "policy.model_name=") == [str(export)]
    assert option(third, "--dependency=") == ["afterok:101"]
    assert "stage1.1: stage1.1-rlvr1-tiny has reached its end, left out" in done.stderr


def test_everything_finished_is_nothing_to_do_and_more_steps_are(pipeline):
    pipeline.train("stage1.1", state="done", max_num_steps=3)
    assert "nothing to do" in pipeline("--stages", "rlvr1", "grpo.max_num_steps=3").stderr
    assert pipeline.calls() == []
    pipeline("--stages", "rlvr1", "grpo.max_num_steps=4")
    assert len(pipeline.calls()) == 1


def test_stage_that_trained_from_an_unfinished_parent_is_refused(pipeline):
    pipeline.train("stage1.1", state="done", max_num_steps=3)
    pipeline.train("stage1.2", state="done", max_num_steps=3)
    text = pipeline("grpo.max_num_steps=4", expect=2).stderr
    assert "stage1.2: MDL008 EXP_NAME=stage1.2-rlvr2-tiny: " in text
    assert pipeline.calls() == []


def test_live_job_of_one_stage_refuses_all(pipeline):
    (pipeline.directory / "queue" / "stage1.2-rlvr2-tiny").write_text("77|PENDING\n", encoding="utf-8")
    text = pipeline(expect=2).stderr
    assert "stage1.2: PTH003 EXP_NAME=stage1.2-rlvr2-tiny: job 77 of this run is PENDING" in text
    assert pipeline.calls() == []


def test_name_goes_before_the_name_of_every_run(pipeline):
    pipeline("--stages", "stage1.1 stage1.2", EXP_NAME="try7")
    first, second = pipeline.calls()
    assert option(first, "--job-name=") == ["try7-stage1.1-rlvr1-tiny"]
    results = f"{pipeline.directory}/results"
    assert option(second, "policy.model_name=") == [f"{results}/try7-stage1.1-rlvr1-tiny/checkpoints/latest/hf"]

    text = pipeline("--stages", "stage1.3", EXP_NAME="try7", MODEL_PATH="", expect=2).stderr
    assert f"MODEL_PATH={results}/try7-stage1.2-rlvr2-tiny/checkpoints/latest/hf: no such directory" in text


def test_local_lines_can_be_pasted(pipeline):
    lines = pipeline("grpo.max_num_steps=3", DRY_RUN="1", LAUNCHER="local").stdout.splitlines()
    assert lines[1] == (
        f"env SCALE=tiny LAUNCHER=local RESULTS_DIR={pipeline.directory}/results EXP_NAME=stage1.2-rlvr2-tiny "
        f"MODEL_PATH={pipeline.run_dir('stage1.1')}/checkpoints/latest/hf ./super_launch.sh stage1.2 "
        "grpo.max_num_steps=3"
    )
    assert len(lines) == 3
