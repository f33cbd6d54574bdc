"""What the system refuses is told with the resource, the place and what to do; so is why an engine's process ended."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from recipes.errors import PolicyError, resource_problem
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
    assert (
        core_cause().startswith("its log names no error, as when the kernel kills") and "output above" in core_cause()
    )
