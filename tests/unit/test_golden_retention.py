"""Which checkpoints are kept, against what the reference implementation keeps."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.grpo.checkpoint import steps_to_keep
from tests.recorded import cases


@pytest.mark.parametrize("case", cases("checkpoint_retention"))
def test_retention(case: dict[str, Any]) -> None:
    given = case["inputs"]
    kept = steps_to_keep(
        {step: None if metric is None else float(metric) for step, metric in given["checkpoints"]},
        keep_top_k=given["keep_top_k"],
        by_metric=given["metric_name"] is not None,
        higher_is_better=given["higher_is_better"],
        on_period={step for step, _ in given["checkpoints"] if step % given["save_period"] == 0},
        keep_latest=given["ft_keep_latest_k"],
    )
    assert kept == set(case["expected"]["kept"])
