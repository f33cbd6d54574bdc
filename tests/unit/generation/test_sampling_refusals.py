"""What the native engine refuses, because engine and policy would then not compute the same log-probabilities."""

from pathlib import Path

import pytest

from recipes.config.load import load_config, refusals

STAGE = Path(__file__).resolve().parents[3] / "configs/tiny/stage1_rlvr.yaml"


@pytest.mark.parametrize("override", ["policy.generation.top_p=0.9", "policy.hf_config_overrides={rope_theta: 1}"])
def test_what_only_one_side_would_do_is_refused(override: str) -> None:
    key = override.partition("=")[0]
    assert [key in problem.where for problem in refusals(load_config(STAGE, [override]))] == [True]


def test_validation_may_filter() -> None:
    assert refusals(load_config(STAGE, ["policy.generation.val_top_p=0.9"])) == []
