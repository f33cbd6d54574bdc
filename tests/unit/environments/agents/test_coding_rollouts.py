"""Agents on repositories among all environments: their rows, their settings, and what gives no verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.config.load import config_path, load_config, load_stages
from recipes.environments.agents.coding.settings import FRAMEWORKS
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.instances import coding_settings_of
from recipes.errors import ConfigError
from recipes.types import RolloutStatus
from tests.configuration import environments as env_block

AGENT = {"type": "responses_api_agents", "name": "swe_agents_train"}


def made(codec: ChatCodec, **settings: Any) -> Environments:
    instances = {"swe_agents_train": {"responses_api_agents": {"swe_agents": settings}}} if settings else {}
    patterns = {"invalid_tool_call_patterns": (), "thinking_tags": ()}
    config = env_block(instances=instances, **patterns)
    return Environments.from_config(config, codec)


@pytest.fixture
def row(gym_row: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return {**gym_row("swe_agents"), "agent_ref": AGENT}


def images(directory: Path, row: dict[str, Any]) -> str:
    instance = row["responses_create_params"]["metadata"]["instance_id"]
    (directory / f"swe_{instance}.sif").touch()
    return f"{directory}/swe_{{instance_id}}.sif"


def test_a_real_row_is_accepted_with_its_image_only(codec: ChatCodec, row: dict[str, Any], tmp_path: Path) -> None:
    formatter = images(tmp_path, row)
    environments = made(codec, container_formatter=formatter)
    assert environments.check_row(row) == []
    metadata = {**row["responses_create_params"]["metadata"], "instance_id": "astropy__astropy-1"}
    metadata["instance_dict"] = json.dumps({**json.loads(metadata["instance_dict"]), "instance_id": "x"})
    params = {**row["responses_create_params"], "metadata": metadata}
    (problem,) = environments.check_row({**row, "responses_create_params": params})
    assert problem.startswith("astropy__astropy-1 has no image: looked for ")
    assert made(codec).check_row(row) == []  # without a configuration nothing says where images are


def test_a_row_that_is_no_task_is_refused_by_its_field(codec: ChatCodec, row: dict[str, Any]) -> None:
    environments = made(codec)
    params = row["responses_create_params"]
    prompt = {**row, "responses_create_params": {**params, "input": [{"role": "user", "content": "hi"}]}}
    assert environments.check_row(prompt) == [
        "field 'input': got a prompt, expected an empty list: the agent writes the prompt itself"
    ]
    (problem,) = environments.check_row({**row, "responses_create_params": {"input": []}})
    assert problem.startswith("field 'dataset_name': got nothing")
    other = {"responses_create_params": {"input": []}, "agent_ref": {"name": "mcqa_simple_agent"}}
    problem = environments.check_row(other)[0]
    assert "expected at least one" in problem


async def test_a_task_without_an_image_or_a_place_for_them_is_no_verdict(
    codec: ChatCodec, row: dict[str, Any], tmp_path: Path
) -> None:
    for settings, reason in (
        ({}, "agent 'swe_agents_train' has no container_formatter"),
        ({"container_formatter": f"{tmp_path}/{{instance_id}}.sif"}, "astropy__astropy-12907 has no image"),
    ):
        environments = made(codec, **settings)
        model: Any = None  # nothing asks it
        rollout = await environments.run(row, model, max_tokens=10)
        assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None)
        assert rollout.reason.startswith(reason)
        assert await environments.finish_group(row, [rollout]) == (rollout,)
        assert not environments.compares(row)
        environments.close()


def test_every_published_file_of_the_stage_can_be_honoured() -> None:
    stage = next(stage for stage in load_stages() if stage.id == "stage2.2")
    paths = {config_path(stage, scale, platform) for scale in ("prod", "small", "tiny") for platform in ("h100", "b200")
             if (scale, platform) != ("small", "b200")}  # fmt: skip
    assert len(paths) == 4
    for path in paths:
        instances = load_config(path).tree["env"]["nemo_gym"]
        blocks = {name: block for name, block in instances.items() if isinstance(block, dict)}
        found = coding_settings_of(blocks)
        assert found.keys() == {"swe_agents_train", "swe_agents_val"}
        for settings in found.values():
            is_tiny = "tiny" in path.parts
            assert [choice.harness.name for choice in settings.choices] == [
                "tiny" if is_tiny else FRAMEWORKS["openhands"]
            ]
            assert settings.images is not None
            assert len(settings.images.templates) == (1 if is_tiny else 3)


def test_all_settings_that_cannot_be_honoured_are_named_at_once(codec: ChatCodec) -> None:
    with pytest.raises(ConfigError) as error:
        made(codec, agent_config="a.toml", container_formatter="no name", agent_framework="aider")
    assert [problem.where.rpartition(".")[2] for problem in error.value.problems] == [
        "agent_config",
        "agent_framework",
        "container_formatter",
    ]
