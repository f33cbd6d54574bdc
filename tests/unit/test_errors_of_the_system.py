"""What the system refuses is told with the resource, the place and what to do; so is why an engine's process ended."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from recipes import errors, run_grpo
from recipes.errors import PolicyError, RunError, control_groups, memory_cause, memory_kills, resource_problem
from recipes.generation.serving import core_log
from recipes.generation.serving.core_log import core_cause, last_cause
from recipes.policy import weights


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; make room there"),
        (errno.EDQUOT, "Disk quota exceeded; make room there"),
        (errno.EROFS, "mounted for reading only"),
        (errno.EACCES, "Permission denied: this user may not do that there; ask for the right"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.ENFILE, "fs.file-max"),
        (errno.ENOMEM, "Cannot allocate memory; free some"),
        (errno.EAGAIN, "raise the limit of processes (ulimit -u)"),
    ],
)
def test_an_error_of_the_system_names_resource_place_and_fix(number: int, words: str) -> None:
    of_file = str(resource_problem(OSError(number, os.strerror(number), "/the/file"), "elsewhere"))
    without = str(resource_problem(OSError(number, os.strerror(number)), "elsewhere"))
    assert of_file.startswith(f"/the/file: {os.strerror(number)}") and words in of_file
    assert without.startswith(f"elsewhere: {os.strerror(number)}") and words in without


def test_what_no_row_knows_is_about_the_path_only_where_there_is_one() -> None:
    fix = "correct the path, or what is wrong there"
    assert fix in str(resource_problem(OSError(errno.EXDEV, os.strerror(errno.EXDEV), "/the/file"), "elsewhere"))
    assert fix not in str(resource_problem(TimeoutError("no answer"), "the run"))


def test_shared_memory_that_is_full_is_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PolicyError) as refusal:
        weights.SharedMemoryWriter([("w", torch.float32, (1 << 20,))], driver_pid=1)
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path}: No space left on device, and the weights") and "4.0 MiB" in text
    assert "--shm-size" in text and list(tmp_path.iterdir()) == []


FAILED = """
(EngineCore pid=12) ERROR 11-25 08:09:33 [core.py:1100] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-25 08:09:33 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-25 08:09:33 [core.py:1100]   File "core.py", line 1, in run
(EngineCore pid=12) ERROR 11-25 08:09:33 [core.py:1100]     raise ValueError("an Error: in the code")
(EngineCore pid=12) ERROR 11-25 08:09:33 [core.py:1100] {cause}
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
CAUSES = [
    "FutureWarning: the API will change",
    "ValueError: No available memory for the cache blocks.",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "OSError: [Errno 28] No space left on device",
    "AssertionError",
]


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_a_failed_engine_core_is_found_in_its_log(cause: str) -> None:
    assert last_cause(FAILED.format(cause=cause)) == cause


@pytest.mark.parametrize("text", ["", "all is well\n", "WARNING: no Error here\n", "loading the model\n\n"])
def test_a_log_without_an_error_names_none(text: str) -> None:
    assert last_cause(text) == ""


def test_the_log_is_named_as_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "worker-1-2-3.out"
    log.write_text(FAILED.format(cause=CAUSES[0]), encoding="utf-8")
    monkeypatch.setattr(core_log, "_output", lambda _descriptor: log)
    said = core_cause()
    assert CAUSES[0] in said and said.endswith("see worker-1-2-3.out in logs/latest/ray of the run")
    monkeypatch.setattr(core_log, "_output", lambda _descriptor: None)
    monkeypatch.setattr(core_log, "memory_cause", lambda _before: "the kernel ended 1 process")
    assert core_cause() == "the kernel ended 1 process; see the output above"
    monkeypatch.setattr(core_log, "memory_cause", lambda _before: "")
    assert (
        core_cause().startswith("its log names no error, as when the kernel kills") and "output above" in core_cause()
    )


class Groups:
    """The files of the control groups of a process, in a directory."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._own = directory / "cgroup", directory / "own"
        self.root.mkdir()
        monkeypatch.setattr(errors, "CONTROL_GROUPS", self.root)
        monkeypatch.setattr(errors, "OWN_GROUPS", self._own)
        monkeypatch.setattr(errors, "MACHINE", directory / "vmstat")

    def is_in(self, *lines: str) -> None:
        self._own.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, monkeypatch)


V2 = ("0::/slurm/job_7/step_0", "slurm/job_7/step_0", "slurm/job_7", "memory.events", "memory.max")
V1 = ("4:cpuset,memory:/slurm/job_7", "memory/slurm/job_7", "memory", "memory.oom_control", "memory.limit_in_bytes")


@pytest.mark.parametrize("form", [V2, V1], ids=["version 2", "version 1"])
@pytest.mark.parametrize("is_around", [False, True])
def test_that_the_kernel_ended_a_process_for_want_of_memory_is_said_in_words(
    groups: Groups, form: tuple[str, ...], is_around: bool
) -> None:
    line, inmost, around, events, limit = form
    groups.is_in("1:cpu:/slurm/job_7", line)
    where = around if is_around else inmost  # the limit may be the step's or the job's
    for group in (inmost, around):
        groups.write(f"{group}/{events}", "low 0\nunder_oom 0\noom 5\noom_kill 2\noom_group_kill 0")
        groups.write(f"{group}/{limit}", "max" if events == "memory.events" else str(2**63 - 4096))
    before = memory_kills()
    assert len(before) == 2 and memory_cause(before) == ""
    groups.write(f"{where}/{events}", "oom 9\noom_kill 3")
    assert memory_cause(before).startswith("the kernel ended 1 process: the memory of this job is full; ask ")
    groups.write(f"{where}/{limit}", str(3 * 2**29))
    assert f"the memory of this job is full (1.5 GiB, {groups.root / where}); " in memory_cause(before)
    assert memory_cause({}).startswith("the kernel ended ")


def test_a_process_that_the_kernel_ended_outside_of_any_limit_is_the_machines(groups: Groups) -> None:
    groups.is_in("0::/")
    assert memory_kills() == {} and memory_cause({}) == ""  # as on a system without these files
    groups.write("../vmstat", "nr_free_pages 1\noom_kill 4\nnuma_hit 0")
    before = memory_kills()
    groups.write("../vmstat", "oom_kill 6")
    assert memory_cause(before).startswith("the kernel ended 2 processes: the memory of this machine is full; ")


def test_a_container_that_sees_only_its_own_group_is_known_by_the_root(groups: Groups) -> None:
    groups.is_in("9:name=systemd:/", "4:memory:/docker/0123", "0::/../../x")
    groups.write("memory/memory.limit_in_bytes", "1")
    assert control_groups("memory") == [groups.root / "memory", groups.root]


@pytest.mark.parametrize("failure", [PolicyError("rank 3 died"), OSError(errno.EPIPE, "broken"), ValueError("a fault")])
def test_a_run_that_fails_says_first_that_its_memory_was_full(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception
) -> None:
    groups.is_in("0::/job")
    groups.write("job/memory.events", "oom_kill 0")

    def run_stage(*_: object) -> int:
        groups.write("job/memory.events", "oom_kill 1")
        raise failure

    monkeypatch.setattr(run_grpo, "run_stage", run_stage)
    assert run_grpo.main(["--config=c.yaml", "--run-dir=r"]) == RunError.exit_code
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("run_grpo: ")]
    assert said[0].startswith("run_grpo: the kernel ended 1 process: the memory of this job is full; ")
    if isinstance(failure, PolicyError):
        assert said[1:] == ["run_grpo: rank 3 died"]  # the last line names who failed
