"""super_launch.sh as a user calls it: the dry run is the submission, and every wrong input says how to fix it."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from recipes.cluster.ports import NUM_SLOTS, ray_ports
from tools.draft.contract import REQUIRED, REQUIRED_ON_SLURM, REQUIRED_WITH_CONTAINERS
from tools.launch import command

ROOT = Path(__file__).resolve().parents[2]


def test_dry_run_prints_exactly_what_is_submitted(launch):
    args = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4")
    launch.env["SKIP_CODE_SNAPSHOT"] = "true"  # its name follows the checkout, which may be edited meanwhile
    printed = shlex.split(launch("--dry-run", *args).stdout)
    assert not (launch.directory / "argv").exists()
    assert not (launch.directory / "results").exists()
    launch(*args)
    assert printed == ["sbatch", *launch.submitted()]


def test_submission_has_computed_resources_and_unbroken_words(launch):
    launch.plan("--dry-run")
    launch(EXTRA_HYDRA_ARGS="grpo.max_num_steps=7 'logger.wandb.project=two words'", SEED="43")
    argv = launch.submitted()
    options = dict(word.split("=", 1) for word in argv if word.startswith("--") and "=" in word)
    assert options["--nodes"] == "1"
    assert options["--gres"] == "gpu:2"
    assert options["--account"] == "lab"
    assert options["--time"] == "4:00:00"
    assert options["--signal"] == "B:TERM@600"
    assert f"policy.model_name={launch.directory}/a-model" in argv  # one word, trailing slash gone
    assert argv[-3:] == ["grpo.seed=43", "grpo.max_num_steps=7", "logger.wandb.project=two words"]
    assert f"{launch.directory}/a-model:{launch.directory}/a-model" in options["--mounts"].split(",")
    job = next(word for word in argv if word.endswith("ray.sbatch"))
    assert Path(job).is_file()  # in the snapshot
    assert Path(options["--chdir"]).parent == launch.directory / "snapshots" / "exp"
    assert (Path(options["--chdir"]) / "recipes" / "run_grpo.py").is_file()
    assert not (Path(options["--chdir"]) / ".venv").exists()


def test_production_dry_run_asks_for_the_published_nodes(launch):
    from_stage = dict.fromkeys(("CONFIG_PATH", "EXP_NAME", "TRAIN_PATH", "VAL_PATH"), "")
    words, notes = launch.plan("--stage=stage1.1", DRY_RUN="1", SLURM_TIME_LIMIT="8:00:00", expect=2, **from_stage)
    assert words[:2] == ["print", "sbatch"]
    assert "--nodes=183" in words  # 32 train + 144 generation + 7 judges
    assert "--gres=gpu:8" in words
    assert "--time=8:00:00" in words
    assert "--job-name=stage1.1-rlvr1" in words
    assert "would be refused" in notes


def test_a_dry_run_that_would_be_refused_prints_the_command_and_ends_with_2(launch):
    (launch.directory / "val.jsonl").unlink()
    refused = launch("--dry-run", expect=2, PYTHONPATH=str(ROOT))
    assert "would be refused: DAT001" in refused.stderr
    assert shlex.split(refused.stdout)[0] == "sbatch"
    assert not (launch.directory / "argv").exists()


COUNT_MODULES = """
import sys
from tools.launch.command import main
status = main(sys.argv[1:])
print(status, *sys.modules, file=sys.stderr)
"""
MOST_MODULES = 120  # of ours; all environments and their servers are as many again
HEAVY = {"torch", "ray", "vllm", "aiohttp", "httpx", "fastapi", "transformers", "recipes.environments.verifiers"}


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_dry_run_imports_little(launch, launcher):
    env = launch.environment({"LAUNCHER": launcher, "SCALE": "tiny"})
    command = [sys.executable, "-c", COUNT_MODULES, "--dry-run", "--stage=stage1.1"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("print\0"), done.stderr
    modules = set(done.stderr.splitlines()[-1].split()[1:])
    assert not modules & HEAVY
    ours = {name for name in modules if name.partition(".")[0] in ("recipes", "tools")}
    assert 50 < len(ours) <= MOST_MODULES, sorted(ours)


def test_a_dry_run_reads_no_rows_and_the_launch_reads_them(launch):
    (launch.directory / "val.jsonl").write_text('{"no": "row"}\n' * 600, encoding="utf-8")
    assert "DAT004" not in launch.plan("--dry-run").stderr
    assert "DAT004" in launch.plan(expect=2).stderr


def test_in_a_terminal_the_same_command_has_one_word_a_line(launch):
    launch.env["SKIP_CODE_SNAPSHOT"] = "true"
    override = "logger.wandb.project='two words, a \\ and a $'"
    piped = shlex.split(launch("--dry-run", override).stdout)
    terminal, ours = pty.openpty()
    env = launch.environment({})
    command = [str(ROOT / "super_launch.sh"), "--dry-run", override]
    with subprocess.Popen(command, env=env, cwd=launch.directory, stdout=ours, stderr=subprocess.DEVNULL) as running:
        os.close(ours)
        shown = b""
        with suppress(OSError):  # as Linux says that the other side is closed
            while part := os.read(terminal, 65536):
                shown += part
        os.close(terminal)
        assert running.wait(timeout=30) == 0
    text = shown.decode().replace("\r\n", "\n")
    assert len(text.splitlines()) == len(piped)
    pasted = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True, timeout=30)
    assert pasted.stdout.decode().split("\0")[:-1] == piped


@pytest.mark.parametrize(
    ("variables", "asked", "spares"),
    [
        ({}, 183, None),
        ({"SPARE_NODES": "0"}, 183, None),
        ({"SPARE_NODES": "04"}, 187, 4),
        ({"SBATCH_NUM_NODES": "185"}, 185, 2),
        ({"SBATCH_NUM_NODES": "185", "SPARE_NODES": "1"}, 186, 3),
    ],
)
def test_nodes_beyond_what_the_configuration_needs_are_spare(launch, variables, asked, spares):
    words = launch.plan("--stage=stage1.1", "--dry-run", CONFIG_PATH="", **variables).words
    assert f"--nodes={asked}" in words
    assert [word for word in words if word.startswith("--spares=")] == ([f"--spares={spares}"] if spares else [])


def test_more_nodes_may_be_asked_for_but_not_fewer(launch):
    assert "--nodes=3" in launch.plan("--dry-run", SBATCH_NUM_NODES="3").words
    refused = launch.plan("--stage=stage1.1", "--dry-run", CONFIG_PATH="", SBATCH_NUM_NODES="176", expect=2)
    assert "SBATCH_NUM_NODES: got 176, expected at least 183 (32 train + 144 generation + 7 judges)" in refused.stderr


def test_local_launch_needs_nothing_that_only_slurm_needs(launch):
    only_slurm = dict.fromkeys([*REQUIRED_ON_SLURM, *REQUIRED_WITH_CONTAINERS], "")
    words = launch.plan("--dry-run", LAUNCHER="local", **only_slurm).words
    assert words[2:4] == ["-m", "tools.job.local"]
    assert "--num-units=2" in words
    assert words[words.index("--") + 2] == str(ROOT / "recipes" / "run_grpo.py")


def test_without_sbatch_nothing_is_written(launch):
    (launch.directory / "bin" / "sbatch").unlink()
    (launch.directory / "bin" / "git").symlink_to(shutil.which("git"))  # this machine may have a Slurm
    path = str(launch.directory / "bin")
    before = sorted(launch.directory.iterdir())
    refused = launch.plan(expect=2, PATH=path)
    assert "SLM008 LAUNCHER=slurm: there is no sbatch on this machine" in refused.stderr
    assert sorted(launch.directory.iterdir()) == before
    assert launch.plan("--dry-run", PATH=path).words[:2] == ["print", "sbatch"]


def test_a_variable_with_almost_the_right_name_is_noted(launch):
    result = launch.plan("--dry-run", CONATINER="x", SLURM_TIME_LIMT="8:00:00", SLURM_JOB_PARTITION="p", NUMBER="7")
    notes = [line for line in result.stderr.splitlines() if "ENV007" in line]
    assert len(notes) == 2
    assert "note: ENV007 CONATINER: nothing here reads it; did you mean CONTAINER?" in result.stderr
    assert "ENV007 SLURM_TIME_LIMT: nothing here reads it; did you mean SLURM_TIME_LIMIT?" in result.stderr


def test_what_an_unknown_launcher_would_need_is_not_missing(launch):
    only_slurm = dict.fromkeys([*REQUIRED_ON_SLURM, *REQUIRED_WITH_CONTAINERS], "")
    lines = launch.plan(expect=2, LAUNCHER="kubernetes", **only_slurm).stderr.splitlines()
    (line,) = [line for line in lines if "note:" not in line]
    assert "ENV002 LAUNCHER: got kubernetes" in line


def test_all_missing_variables_are_listed_at_once_with_their_meaning(launch):
    names = {**REQUIRED, **REQUIRED_ON_SLURM, **REQUIRED_WITH_CONTAINERS}
    result = launch.plan(expect=2, **dict.fromkeys(names, ""))
    lines = result.stderr.splitlines()
    assert len(lines) == len(names)
    for name, meaning in names.items():
        assert any(f"{name}: not set: {meaning}" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("stage9",), "STAGE: got stage9, expected one of stage1.1 (rlvr1), stage1.2 (rlvr2)"),
        (("stage1.1", "stage1.2"), "two stages given: 'stage1.1' and 'stage1.2'"),
        (("--frobnicate",), "unknown option '--frobnicate'"),
        (("stage1.1", "stage1.2", "--frobnicate"), "unknown option '--frobnicate'"),
    ],
)
def test_wrong_words_are_refused_with_the_fix(launch, args, message):
    assert message in launch(*args, expect=2).stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.num_prompt_per_step=8", "did you mean grpo.num_prompts_per_step?"),
        ("grpo.max_num_steps=many", "grpo.max_num_steps: got"),
        ("grpo.num_generations_per_prompt=1", "grpo.num_generations_per_prompt"),
    ],
)
def test_wrong_overrides_are_refused_with_the_fix(launch, override, message):
    assert message in launch.plan(override, expect=2).stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LAUNCHER", "kubernetes", "LAUNCHER: got kubernetes, expected slurm or local"),
        ("ENGINE", "verl", "ENGINE: got verl, expected native or nemo_rl"),
        ("CONTAINER_RUNTIME", "docker", "CONTAINER_RUNTIME: got docker"),
        ("EXP_NAME", "a/b", "EXP_NAME: got a/b"),
        ("EXP_NAME", "a" * 129, "EXP_NAME: got 129 characters, expected 128 at most"),
        ("SEED", "4.5", "SEED: got 4.5"),
        ("SEED", "4294967296", "grpo.seed: got 4294967296, expected an integer >= 0 and <= 2147483647"),
        ("DRY_RUN", "perhaps", "DRY_RUN: got perhaps, expected true or false"),
        ("EXTRA_HYDRA_ARGS", "a='b", "EXTRA_HYDRA_ARGS: got a='b"),
        ("CONFIG_PATH", "configs/none.yaml", "none.yaml"),
    ],
)
def test_wrong_variables_are_refused(launch, name, value, message):
    assert message in launch.plan(expect=2, **{name: value}).stderr


def test_everything_wrong_on_disk_is_listed_at_once(launch):
    (launch.directory / "train.jsonl").write_text("\n".join(['{"agent_ref": 1}', "not json", ""]), encoding="utf-8")
    (launch.directory / "val.jsonl").unlink()
    weights = launch.directory / "a-model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    (launch.directory / "a-model" / "tokenizer.json").unlink()
    text = launch.plan(expect=2, CONTAINER="/no/such.sqsh").stderr
    assert "train.jsonl:1: " in text
    assert "train.jsonl:2: " in text
    assert "val.jsonl: no such file" in text
    assert "tokenizer.json" in text
    assert "model.safetensors: got" in text
    assert "CONTAINER: there is no file /no/such.sqsh" in text
    assert not (launch.directory / "argv").exists()


def test_unknown_agent_is_named_with_its_line(launch):
    row = json.loads((launch.directory / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    bad = {**row, "agent_ref": {"name": "mcqa_simple_agnet"}}
    (launch.directory / "train.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(bad)}\n", encoding="utf-8")
    text = launch.plan(expect=2).stderr
    assert "train.jsonl:2: unknown agent 'mcqa_simple_agnet'; did you mean 'mcqa_simple_agent'?" in text


def test_what_may_be_wrong_about_the_cluster_can_be_forced_a_wrong_configuration_not(launch):
    manifest = launch.directory / "train.jsonl.manifest.json"
    manifest.write_text(json.dumps({"outputs": [{"file": "train.jsonl", "rows": 2}]}), encoding="utf-8")
    assert "DAT006" in launch.plan(expect=2).stderr
    refused = launch.plan("--force", "grpo.num_generations_per_prompt=1", expect=2).stderr
    assert "note: DAT006" in refused
    assert ": CFG001 " in refused
    assert not (launch.directory / "argv").exists()
    assert "note: DAT006" in launch("--force").stderr
    assert launch.submitted()


def test_a_word_that_deletes_a_key_is_an_override(launch):
    result = launch("stage1.1", "~no_such.key", expect=2, SCALE="tiny")
    assert "~no_such.key: there is no such key to delete" in result.stderr


def test_a_number_of_restarts_is_decimal_for_the_job_file_too(launch):
    assert "--max-restarts=8" in launch.plan("--dry-run", MAX_RESTARTS="08").words


def test_a_disk_that_takes_nothing_more_is_one_line(launch, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "/runs/exp/run.lock.json")

    monkeypatch.setattr(command, "prepare", full)
    stderr = launch.plan(expect=2).stderr
    assert stderr.splitlines()[-1].startswith("/runs/exp/run.lock.json: Disk quota exceeded; make room")
    assert "Traceback" not in stderr


def test_a_check_looks_at_the_input_and_not_for_files(launch):
    for number in (1, 2):
        missing = {"MODEL_PATH": "/no/model", "TRAIN_PATH": "/no/rows", "MAX_RESTARTS": "x" * (number - 1)}
        wrong = [] if number == 1 else ["grpo.max_num_step=7"]
        said = launch("--check", *wrong, expect=2 * (number - 1), **missing)
        assert not said.stdout
        assert "/no/" not in said.stderr
    assert "MAX_RESTARTS: got x" in said.stderr
    assert "did you mean grpo.max_num_steps?" in said.stderr
    assert not (launch.directory / "results").exists()


def test_missing_model_is_refused(launch):
    assert "no such directory" in launch.plan(expect=2, MODEL_PATH="/no/model").stderr


def test_busy_ports_are_refused_before_ray_starts_and_the_owner_is_named(launch):
    """One port of every slot is taken: by this test, or by a run that has the slot."""
    with ExitStack() as stack:
        for slot in range(NUM_SLOTS):
            squatter = stack.enter_context(socket.socket())
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                squatter.bind(("", ray_ports(slot).gcs))
                squatter.listen()
        text = launch.plan(expect=2, LAUNCHER="local").stderr
    assert re.search(r"port \d+ \(Ray .*in use by pid", text)
    assert not (launch.directory / "results" / "exp" / "logs").exists()


def test_second_submission_reuses_the_snapshot_and_names_what_changed(launch):
    first = launch.plan()
    assert "differs" not in first.stderr
    again = launch.plan("grpo.max_num_steps=5", REFRESH_CODE_SNAPSHOT="false")
    (snapshot,) = [word for word in first.words if word.startswith("--chdir=")]
    assert [word for word in again.words if word.startswith("--chdir")] == [snapshot]
    assert "differs from the last start: config.sha256" in again.stderr
    lock = json.loads((launch.directory / "results" / "exp" / "run.lock.json").read_text(encoding="utf-8"))
    assert lock["seed"] == 42
    assert len(lock["model"]["weights_sha256"]) == 64


def test_help_is_the_header(launch):
    text = launch("--help").stdout
    assert text.startswith("Start one stage")
    assert "Usage: ./super_launch.sh [--dry-run] [--check] [--force] [STAGE] [KEY=VALUE ...]" in text
