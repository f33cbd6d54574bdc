"""What the native engine refuses, because its parts would then not agree on a prompt or on a log-probability."""

from pathlib import Path

import pytest

from recipes.config.load import load_config, refusals

STAGE = Path(__file__).resolve().parents[3] / "configs/tiny/stage1_rlvr.yaml"


CHAT = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"


@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.top_p=0.9",
        "policy.hf_config_overrides={rope_theta: 1}",
        f"{CHAT}.tool_parser=llama3_json",
        f"{CHAT}.reasoning_parser=granite",
    ],
)
def test_what_only_one_side_would_do_is_refused(override: str) -> None:
    key = override.partition("=")[0]
    assert [key in problem.where for problem in refusals(load_config(STAGE, [override]))] == [True]


def test_validation_may_filter() -> None:
    assert refusals(load_config(STAGE, ["policy.generation.val_top_p=0.9"])) == []


def test_http_requests_and_rollouts_get_the_same_template_arguments() -> None:
    tokenizer, served = "policy.tokenizer.chat_template_kwargs", f"{CHAT}.default_chat_template_kwargs"
    one, other = "{enable_thinking: true}", "{enable_thinking: false}"
    serves = "policy.generation.vllm_cfg.expose_http_server=true"
    for overrides, is_refused in (
        ([serves, f"{served}={one}"], False),
        ([serves, f"{tokenizer}={one}", f"{served}={one}"], False),
        ([serves, f"{tokenizer}={one}"], True),
        ([serves, f"{tokenizer}={one}", f"{served}={other}"], True),
        ([f"{tokenizer}={one}"], False),
    ):
        problems = [problem for problem in refusals(load_config(STAGE, overrides)) if served in problem.where]
        assert bool(problems) is is_refused, overrides
