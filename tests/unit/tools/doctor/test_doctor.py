"""The doctor: a sound launch has no finding, each defect its code, and no defect hides another."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from recipes.cluster.ports import ray_ports
from recipes.errors import Problem
from tests.unit.tools.launch_case import ENOUGH, HELD_OUT_ROW, PLACEHOLDER_ROW, ROW, LaunchCase, write_case
from tools.doctor import examine as examine_module
from tools.doctor import machine
from tools.doctor.__main__ import main, table
from tools.draft.findings import CODES, errors, forced, found
from tools.job import local
from tools.job.local import LOCAL_RUNS

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def case(tmp_path: Path) -> LaunchCase:
    return write_case(tmp_path)


def test_nothing_is_found_in_a_sound_launch(case):
    assert case.codes() == []


@pytest.mark.parametrize(("num_gpus", "codes"), [(0, []), (1, ["ALC002"]), (2, [])])
def test_a_local_run_has_a_gpu_for_each_worker_or_none(case, monkeypatch, num_gpus, codes):
    monkeypatch.setattr(machine, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(machine, "version", lambda _name: "2.9.1" if num_gpus else "2.9.1+cpu")
    assert case.codes(LAUNCHER="local") == codes


def test_a_machine_without_gpus_is_told_what_is_too_large_for_it(case, monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    monkeypatch.setattr(machine, "count_devices", lambda: 0)
    monkeypatch.setattr(machine, "version", lambda _name: "2.9.1")
    monkeypatch.setattr(machine, "MAX_CPU_WEIGHTS_BYTES", 10)
    assert case.codes(LAUNCHER="local") == ["ALC003"]
    monkeypatch.setattr(machine, "count_devices", lambda: 2)
    monkeypatch.setattr(machine, "version", lambda _name: "2.9.1+cpu")
    assert case.codes(LAUNCHER="local") == ["ENG007"]
    monkeypatch.setattr(machine, "MAX_CPU_WEIGHTS_BYTES", 2**30)  # now it is a tiny run, beside GPUs that it needs not
    assert case.codes(LAUNCHER="local") == ["ENG010"]
    [note] = [one for one in case.examine(LAUNCHER="local") if one.code == "ENG010"]
    assert note.severity == "note" and "torch 2.9.1+cpu is a CPU build: it uses no GPU" in str(note.problem)


@pytest.mark.parametrize(("torch", "usable"), [("2.13.0+cpu", 0), ("2.13.0+cu130", 3), ("2.13.0", 3)])
def test_devices_that_torch_cannot_use_are_no_gpus(monkeypatch, torch, usable):
    monkeypatch.setattr(local, "count_devices", lambda: 3)
    monkeypatch.setattr(local, "version", lambda _name: torch)
    assert local.count_gpus() == usable


def test_what_a_container_gives_as_shared_memory_is_too_little(case, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(free=64 * 2**20))
    monkeypatch.setattr(machine, "MIN_FREE_BYTES", 0)
    findings = errors(case.examine(LAUNCHER="local"))
    assert [str(finding.problem) for finding in findings if finding.code != "PTH006"] == []
    [finding] = findings
    assert finding.problem.where == "/dev/shm"
    assert finding.problem.got == "64 MiB free" and "256 MiB for Ray's object store" in finding.problem.expected
    assert "--shm-size" in finding.problem.fix


def test_a_shell_that_allows_few_open_files_is_told(case, monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    limits = {resource.RLIMIT_NOFILE: (64, 64), resource.RLIMIT_NPROC: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(local.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(local, "control_groups", lambda _controller: [])
    assert case.codes(LAUNCHER="local") == ["ALC004"]


def test_a_container_that_allows_few_threads_is_told(case, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    monkeypatch.setattr(local, "control_groups", lambda _controller: [tmp_path])
    (tmp_path / "pids.max").write_text("100\n", encoding="utf-8")
    [finding] = errors(case.examine(LAUNCHER="local"))
    assert finding.code == "ALC004" and "200 for Ray and the driver, 150 for each of " in finding.problem.expected


def cut_parent(case: LaunchCase) -> None:
    weights = case.export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])


def wrong_container(case: LaunchCase) -> None:
    (case.directory / "training.sqsh").write_text("<html>404 Not Found</html>", encoding="utf-8")


def fill_nothing(case: LaunchCase) -> None:
    case.write_rows("train.jsonl", ROW, PLACEHOLDER_ROW)


DEFECTS: dict[str, Callable[[LaunchCase], object]] = {
    "MDL002": cut_parent,
    "IMG002": wrong_container,
    "DAT002": fill_nothing,
    "MDL001": lambda case: (case.export / "tokenizer.json").unlink(),
    "MDL003": lambda case: (case.export.parent / "COMPLETE").unlink(),
    "DAT001": lambda case: (case.directory / "val.jsonl").unlink(),
    "DAT006": lambda case: (case.directory / "val.jsonl").open("a").write(json.dumps(HELD_OUT_ROW) + "\n"),
    "DAT008": lambda case: (case.directory / "val.jsonl.manifest.json").unlink(),
    "IMG001": lambda case: (case.directory / "sandbox.sqsh").unlink(),
    "IMG003": lambda case: (case.directory / "sandbox.sqsh").open("r+b").truncate(100),
    "PTH001": lambda case: ((case.directory / "cache").rmdir(), (case.directory / "cache").touch()),
}


@pytest.mark.parametrize("code", DEFECTS)
def test_a_defect_on_disk_is_found_alone(case, code):
    DEFECTS[code](case)
    assert case.codes() == [code]


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        ("ENV001", {"PERSISTENT_CACHE": ""}),
        ("ENV001", {"MODEL_PATH": ""}),
        ("ENV001", {"CONFIG_PATH": ""}),
        ("ENV002", {"LAUNCHER": "kubernetes"}),
        ("ENV002", {"SBATCH_NUM_NODES": "many"}),
        ("ENV002", {"BRING_UP_SECONDS": "soon"}),
        ("ENV002", {"BRING_UP_SECONDS": "0"}),
        ("ENV002", {"SLURM_TIME_LIMIT": "four hours"}),
        ("CFG001", {"EXTRA_HYDRA_ARGS": "grpo.num_prompt_per_step=8"}),
        ("CFG001", {"CONFIG_PATH": "configs/none.yaml"}),
        ("CFG003", {"EXTRA_HYDRA_ARGS": "policy.megatron_cfg.fp8_cfg.enabled=true"}),
        ("CFG004", {"EXTRA_HYDRA_ARGS": "checkpointing.checkpoint_must_save_by=00:05:00:00"}),
        ("IMG002", {"CONTAINER": "image.sqsh"}),
        ("IMG004", {"CONTAINER": "docker://registry.example/Training:1"}),
        ("TOK001", {"EXTRA_HYDRA_ARGS": "logger.wandb_enabled=true"}),
    ],
)
def test_a_wrong_variable_is_found_alone(case, code, variables):
    assert case.codes(**variables) == [code]


def test_too_few_nodes_are_found(case):
    (finding,) = [
        finding
        for finding in case.examine(CONFIG_PATH="configs/stage3_rlhf.yaml", SBATCH_NUM_NODES="99")
        if finding.code == "ALC001"
    ]
    assert finding.problem.expected == "at least 100 (32 train + 64 generation + 4 judges)"


def test_a_wrong_scale_hides_only_what_the_stage_table_would_give(case):
    given = dict.fromkeys(("EXP_NAME", "CONFIG_PATH", "MODEL_PATH", "TRAIN_PATH", "VAL_PATH"), "")
    assert case.codes("stage1.1", SCALE="huge", SLURM_ACCOUNT="", **given) == ["ENV002", "ENV001"]
    assert case.codes("stage7", **given) == ["ENV003"]
    assert case.codes("stage3", SCALE="small", PLATFORM="b200", **given) == ["ENV003"]


def test_a_missing_task_image_is_found(case):
    case.write_task_rows()
    known = case.codes("stage2.2", SCALE="tiny")
    assert not {"SIF001", "SIF002", "SIF003"} & set(known)
    case.sif.unlink()
    assert sorted(case.codes("stage2.2", SCALE="tiny")) == sorted([*known, "SIF002"])
    assert sorted(case.codes("stage2.2", SCALE="tiny", SIF_DIR="/no/where")) == sorted([*known, "SIF001"])


@contextmanager
def busy(port: int) -> Iterator[None]:
    """Listen on a port; a run on this machine that has it serves as well."""
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            squatter.bind(("", port))
            squatter.listen()
        yield


def test_a_busy_port_is_found_where_a_node_of_the_job_could_be(case, monkeypatch):
    port = ray_ports().node_manager
    with busy(port):
        assert case.codes() == []  # a login node: the ports of the nodes are not its own
        monkeypatch.setattr(machine, "is_node_of", lambda partition: partition == "batch")
        problems = [finding.problem.where for finding in case.examine() if finding.code == "PRT001"]
    assert [where for where in problems if where.startswith(f"port {port} ")]


@pytest.mark.parametrize(
    ("where", "code"),
    [("port 1200 (Ray control)", "PRT001"), ("net.ipv4.ip_local_port_range", "PRT002"), (LOCAL_RUNS, "PRT003")],
)
def test_a_problem_with_ports_has_the_code_of_what_is_wrong(where, code):
    problem = Problem(where=where, wrong="in use by pid 4108 (python)", fix="end it")
    assert machine.code_of(problem) == code


def test_a_model_that_the_engine_does_not_build_is_named(case):
    config = json.loads((case.export / "config.json").read_text(encoding="utf-8")) | {
        "architectures": ["GptOssForCausalLM"]
    }
    (case.export / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (case.export.parent / "COMPLETE").write_text('{"hf/tokenizer_config.json": "0"}', encoding="utf-8")
    codes = [finding.code for finding in case.examine() if finding.code.startswith("MDL")]
    assert codes == ["MDL003", "MDL009"]


def test_make_passes_the_words_on(monkeypatch):
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    command = ["make", "--dry-run", "--no-print-directory", "doctor", "STAGE=stage1.2", "ARGS=--json a.b=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == ".venv/bin/python -m tools.doctor --stage stage1.2 --json a.b=1"


def test_eight_defects_at_once_are_eight_findings(case, monkeypatch):
    monkeypatch.setattr(machine, "is_node_of", lambda _partition: True)
    case.write_task_rows()
    case.sif.unlink()
    case.write_rows(
        "train.jsonl", json.loads((case.directory / "val.jsonl").read_text(encoding="utf-8")), PLACEHOLDER_ROW
    )
    cut_parent(case)
    wrong_container(case)
    variables = {"SCALE": "small", "CONFIG_PATH": "", "SLURM_ACCOUNT": "", "SBATCH_NUM_NODES": "19"}
    with busy(ray_ports().gcs):
        codes = case.codes("stage2.2", "grpo.num_prompt_per_step=8", **variables)
    expected = {"ENV001", "CFG001", "SIF002", "DAT002", "ALC001", "PRT001", "MDL002", "IMG002"}
    assert expected <= set(codes)


def test_a_check_that_fails_hides_no_other(case, monkeypatch):
    def fail(_draft: object) -> list[object]:
        raise ZeroDivisionError("in the check")

    monkeypatch.setitem(examine_module.SUBJECTS, "data", fail)
    wrong_container(case)
    findings = errors(case.examine())
    assert [finding.code for finding in findings] == ["DOC001", "IMG002"]
    assert findings[0].problem.what == "the check itself failed with ZeroDivisionError: in the check"


def test_force_leaves_what_is_certainly_wrong():
    one = {"where": "w", "got": "g", "expected": "e", "fix": "f"}
    findings = forced([found("CFG001", **one), found("SLM002", **one), found("DAT008", **one)])
    assert [(finding.severity, finding.is_forced) for finding in findings] == [
        ("error", False),
        ("note", True),
        ("note", False),
    ]


def test_no_code_of_the_configuration_can_be_forced():
    assert not [code for code, entry in CODES.items() if code.startswith(("CFG", "ENV", "ALC001")) and entry.can_force]
    assert all(code in table() for code in CODES)


def test_report_for_programs_and_for_readers(case, monkeypatch, capsys):
    wrong_container(case)
    for name in ("STAGE", "SCALE", "LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    assert main(["--json", ENOUGH]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["exit_status"] == 2
    assert (report["experiment"], report["num_nodes"]) == ("exp", 1)
    (image,) = [entry for entry in report["findings"] if entry["severity"] == "error"]
    assert image["code"] == "IMG002"
    assert image["where"] == "CONTAINER"
    assert set(image) == {"code", "severity", "forced", "can_force", "wrong", "where", "got", "expected", "fix"}
    assert main([ENOUGH]) == 2
    text = capsys.readouterr().out
    assert "  IMG002  CONTAINER: got " in text
    assert "doctor: 1 error" in text
    (case.directory / "training.sqsh").write_bytes((case.directory / "sandbox.sqsh").read_bytes())
    assert main([ENOUGH, "grpo.seed=43"]) == 0


def test_a_file_for_a_directory_and_a_directory_for_a_file_are_said_to_be_so(case):
    file, directory = f"{case.directory}/train.jsonl", str(case.directory)
    problems = [finding.problem for finding in errors(case.examine(MODEL_PATH=file, VAL_PATH=directory))]
    assert sorted((problem.where, problem.what) for problem in problems) == [
        (directory, "this is a directory, and a JSONL file is needed"),
        (f"MODEL_PATH={file}", "start weights are a directory, this is a file"),
    ]
    assert "set VAL_PATH" in next(problem.fix for problem in problems if problem.where == directory)


def lost_checkpoint(case: LaunchCase) -> None:
    (case.directory / "results" / "exp" / "checkpoints" / "step_000004").mkdir(parents=True)


def dangling_latest(case: LaunchCase) -> None:
    root = case.directory / "results" / "exp" / "checkpoints"
    root.mkdir(parents=True)
    (root / "latest").symlink_to("step_000004")


# Everything that `setup` raises before Ray is asked: what is done to a sound launch, its overrides, the doctor's code.
REFUSED_BY_SETUP: dict[str, tuple[Callable[[LaunchCase], object], tuple[str, ...], str]] = {
    "ChatCodec: no tokenizer": (lambda case: (case.export / "tokenizer.json").unlink(), (), "MDL001"),
    "ChatCodec: no template": (
        lambda case: (case.export / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}', encoding="utf-8"),
        (),
        "MDL007",
    ),
    "require_rows: no file": (lambda case: (case.directory / "train.jsonl").unlink(), (), "DAT001"),
    "require_rows: no rows": (lambda case: case.write_rows("train.jsonl"), (), "DAT001"),
    "require_rows: no agent": (
        lambda case: case.write_rows("train.jsonl", {**ROW, "agent_ref": {"name": "nobody"}}), (), "DAT003",
    ),
    "require_rows: a placeholder": (fill_nothing, (), "DAT002"),
    "too_few_rows": (lambda _: None, ("grpo.num_prompts_per_step=64", "grpo.max_num_epochs=1"), "DAT012"),
    "latest_checkpoint: none complete": (lost_checkpoint, (), "PTH007"),
    "latest_checkpoint: taken away": (dangling_latest, (), "PTH007"),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSED_BY_SETUP)
def test_what_setup_refuses_the_doctor_refuses_before_the_queue(case, refusal):
    break_it, overrides, code = REFUSED_BY_SETUP[refusal]
    break_it(case)
    found = case.examine("", *overrides)
    assert code in [finding.code for finding in found if finding.severity == "error"]


def test_weights_and_biases_in_a_container_is_said_to_be_unseen(case):
    found = case.examine("", "logger.wandb_enabled=true", WANDB_API_KEY="k")
    assert [finding.code for finding in found if finding.code.startswith("WAN")] == ["WAN003"]


@pytest.mark.parametrize(
    ("is_on", "environ", "codes"),
    [
        ("true", {"WANDB_API_KEY": "k"}, ["WAN001"]),
        ("true", {"WANDB_MODE": "offline"}, ["WAN001"]),
        ("false", {"WANDB_API_KEY": "k"}, []),
        ("false", {"WANDB_API_KEY": "k", "WANDB_PROJ": "p"}, ["WAN002"]),
        ("false", {"WANDB_PROJ": "p"}, []),
    ],
)
def test_weights_and_biases_is_looked_for_where_the_run_will_be(case, monkeypatch, is_on, environ, codes):
    monkeypatch.setitem(sys.modules, "wandb", None)
    found = case.examine("", f"logger.wandb_enabled={is_on}", LAUNCHER="local", **environ)
    assert [finding.code for finding in found if finding.code.startswith("WAN")] == codes
    contained = case.examine("", f"logger.wandb_enabled={is_on}", **environ)
    assert "WAN001" not in [finding.code for finding in contained]  # the image may have it
