"""A start of Ray that comes too late is tried again; any other failure is not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import ray

from recipes.cluster.private import private_ray

LATE = "The current node timed out during startup. This could happen because the GCS has become overloaded."


@pytest.mark.parametrize(
    ("failures", "num_starts", "is_up"),
    [([LATE, LATE], 3, True), ([LATE] * 3, 3, False), (["No space left"], 1, False)],
)
def test_a_late_start_is_tried_again(
    failures: list[str], num_starts: int, is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, starts = itertools.chain(failures, itertools.repeat("")), []

    def init(**options: Any) -> None:
        starts.append(options["_temp_dir"])
        if text := next(said):
            raise Exception(text)  # what Ray raises

    monkeypatch.setattr(ray, "init", init)
    if is_up:
        with private_ray(1):
            pass
    else:
        with pytest.raises(Exception, match=failures[-1][:10]), private_ray(1):
            pass
    assert len(set(starts)) == len(starts) == num_starts
