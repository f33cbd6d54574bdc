"""The shared-memory file of a weight push: layout, content, and files of runs that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.errors import EngineError, PolicyError
from recipes.policy.weights import SharedMemoryWriter, checked, make_layout, remove_stale_files, within

SHAPES = [("a", torch.float32, (3, 5)), ("b", torch.bfloat16, (2,)), ("c", torch.float32, (16,))]


def test_tensors_start_on_aligned_offsets() -> None:
    layout = make_layout(SHAPES, path="")
    assert layout.offsets == (0, 64, 128)  # 60 and 4 bytes, rounded up
    assert layout.num_bytes == 192
    assert layout.dtypes == ("float32", "bfloat16", "float32")


def test_a_push_overwrites_every_tensor_and_the_file_goes_at_the_end() -> None:
    writer = SharedMemoryWriter(SHAPES, driver_pid=1)
    path = Path(writer.layout.path)
    assert path.stat().st_mode & 0o777 == 0o600  # other users of the machine cannot read it
    for value in (1.0, 2.0):
        tensors = [(name, torch.full(shape, value, dtype=dtype)) for name, dtype, shape in SHAPES]
        writer.write(tensors, num_before=0)
        raw = path.read_bytes()
        for (_, tensor), offset in zip(tensors, writer.layout.offsets, strict=True):
            expected = tensor.view(torch.uint8).numpy().tobytes()
            assert raw[offset : offset + len(expected)] == expected
    remove_stale_files()
    assert path.exists(), "a file in use was taken for a stale one"
    other = SharedMemoryWriter(SHAPES, driver_pid=1)
    assert other.layout.path != writer.layout.path, "another user could guess the name and make the file first"
    other.close()
    writer.close()
    assert not path.exists()


def test_the_file_counts_the_tensors_of_all_pushes_one_by_one() -> None:
    writer = SharedMemoryWriter(SHAPES, driver_pid=1)
    counts = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _tensors():
            counts.append(count())
            yield name, tensor

    def count() -> int:
        assert writer.layout.count_offset is not None
        return int.from_bytes(Path(writer.layout.path).read_bytes()[writer.layout.count_offset :][:8], "little")

    for push in range(2):
        writer.write(tensors(), num_before=3 * push)
    assert [*counts, count()] == [0, 1, 2, 3, 4, 5, 6]
    writer.close()


def test_a_push_that_does_not_fit_the_layout_is_refused() -> None:
    writer = SharedMemoryWriter(SHAPES[:1], driver_pid=2)
    with pytest.raises(PolicyError, match=r"sends b \(float32 \[3, 5\]\), the engines expect a \(float32 \[3, 5\]\)"):
        writer.write([("b", torch.zeros(3, 5))], num_before=0)
    writer.close()


def _tensors() -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros(shape, dtype=dtype)) for name, dtype, shape in SHAPES]


def test_what_the_layout_announced_passes() -> None:
    assert [name for name, _ in checked(_tensors(), make_layout(SHAPES, path=""))] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: [weights[1], weights[0], weights[2]], r"sends b .*expect a "),
        (lambda weights: [("a", weights[0][1].half()), *weights[1:]], r"sends a \(float16.*expect a \(float32"),
        (lambda weights: [("a", weights[0][1].T), *weights[1:]], r"sends a \(float32 \[5, 3\].*expect a .*\[3, 5\]"),
        (lambda weights: weights[:2], r"still expect c "),
        (lambda weights: [*weights, ("d", torch.zeros(1))], r"sends d, the engines expect no more"),
    ],
    ids=["order", "dtype", "shape", "too few", "too many"],
)
def test_what_the_layout_did_not_announce_is_named(change: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        list(checked(change(_tensors()), make_layout(SHAPES, path="")))


def test_the_file_of_a_killed_run_is_removed() -> None:
    program = (
        "import os, torch; from recipes.policy.weights import SharedMemoryWriter as W;"
        "w = W([('a', torch.float32, (4,))], driver_pid=os.getpid()); print(w.layout.path, flush=True); os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    path = Path(killed.stdout.strip())
    assert killed.returncode == 9
    assert path.exists()
    remove_stale_files()
    assert not path.exists()


@pytest.mark.timeout(60)
def test_a_pipe_that_another_user_has_put_there_is_not_waited_for() -> None:
    pipe = Path("/dev/shm/recipe-weights-0-0")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    try:
        remove_stale_files()
        assert pipe.exists()
    finally:
        pipe.unlink()


def test_a_group_that_never_forms_ends_at_its_deadline() -> None:
    never, began = threading.Event(), time.monotonic()
    with pytest.raises(EngineError, match=r"the group not complete within 0\.1 s"):
        within(0.1, lambda: never.wait(30), what="the group", is_cancelled=lambda: False)
    with pytest.raises(EngineError, match="the group: given up, since an engine has failed"):
        within(30, lambda: never.wait(30), what="the group", is_cancelled=lambda: True)
    assert time.monotonic() - began < 15
    never.set()
    assert within(30, lambda: 7, what="the group", is_cancelled=lambda: False) == 7
    with pytest.raises(ValueError, match="NCCL says no"):
        within(30, lambda: _fail("NCCL says no"), what="the group", is_cancelled=lambda: False)


def _fail(message: str) -> None:
    raise ValueError(message)
