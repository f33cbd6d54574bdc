"""Server instances: files, schema and the verifiers that read the settings say the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config.keys import native
from recipes.config.keys.schema import CONFIG_DIR, SERVER_KINDS, schema, settings_of
from recipes.config.load import load_config
from recipes.config.stages import Stage, config_path, load_stages
from recipes.environments.instances import servers_of
from recipes.environments.registry import AGENTS, ALL_VERIFIERS, LATER_AGENTS
from recipes.errors import ConfigError

FILES = sorted((CONFIG_DIR / "environments").glob("*.yaml"))
KINDS = schema()["$defs"]["server_instance"]["properties"]
EXAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "string": "http://x", "object": {}, "array": []}
STAGE_FILES = sorted(
    {config_path(stage, scale, platform) for stage in load_stages() for scale in stage.configs
     for platform in stage.configs[scale]} | {CONFIG_DIR / "nano_grpo.yaml"}
)  # fmt: skip


@functools.cache
def block(path: Path) -> dict[str, Any]:
    """Return the resolved env.nemo_gym of a stage."""
    found: dict[str, Any] = load_config(path).tree["env"]["nemo_gym"]
    return found


def instances(path: Path) -> dict[str, Any]:
    """Return the server instances of a file, or of a stage with those that its files add."""
    data = yaml.safe_load(path.read_text())
    if path in STAGE_FILES:
        return {
            name: value for name, value in block(path).items() if isinstance(value, dict) and set(value) & set(KINDS)
        }
    return dict(data)


def types(kind: str, found: dict[str, Any]) -> set[str]:
    return {server for instance in found.values() for server in instance.get(kind, {})}


def test_every_file_is_used_by_a_stage() -> None:
    named = {CONFIG_DIR / name for path in STAGE_FILES for name in block(path)["config_paths"]}
    wide = {CONFIG_DIR / name for name in block(CONFIG_DIR / "tiny" / "wide.yaml")["config_paths"]}
    assert named | wide == set(FILES) - {CONFIG_DIR / "environments" / "served.yaml"}  # an example of the user's own


@pytest.mark.parametrize("kind", SERVER_KINDS)
def test_the_schema_declares_the_types_that_stages_use_and_no_others(kind: str) -> None:
    used = {server for path in STAGE_FILES for server in types(kind, instances(path))}
    of_users = {"external_agent"} if kind == "responses_api_agents" else set()
    assert used | of_users == set(KINDS[kind]["properties"])


def test_agents_of_the_files_are_those_that_rows_name() -> None:
    """Rows of the published blends name these agents; a second name of a family is a blend's of another release."""
    named = {name for path in FILES for name, value in instances(path).items() if "responses_api_agents" in value}
    assert named <= {*AGENTS, *LATER_AGENTS}
    others = {name for name in {*AGENTS, *LATER_AGENTS} - named if not name.endswith("_tool_simulation_agent")}
    assert others == {"structured_outputs_v3_simple_agent", "structured_outputs_v4_simple_agent"}


def test_what_the_rules_say_of_the_native_engine_is_what_it_has() -> None:
    assert set(native.RESOURCES_TYPES) == set(ALL_VERIFIERS)


def test_every_verifier_that_exists_has_its_settings_declared() -> None:
    known = KINDS["resources_servers"]["properties"]
    for name, verifier in ALL_VERIFIERS.items():
        assert name in known, f"declare {name} in configs/environments/servers.json"
        undeclared = verifier.settings - set(settings_of(known[name]))
        assert not undeclared, f"declare in configs/environments/servers.json: {name} {undeclared}"
    assert set(native.AGENT_TYPES) == set(KINDS["responses_api_agents"]["properties"])


@pytest.mark.parametrize("name", ALL_VERIFIERS)
def test_a_declared_setting_of_an_existing_verifier_is_read_or_refused_by_name(name: str) -> None:
    for setting, node in settings_of(KINDS["resources_servers"]["properties"][name]).items():
        kinds = node.get("type", "object")
        value = node.get("enum", [EXAMPLES[kinds if isinstance(kinds, str) else kinds[0]]])[0]
        try:
            server = servers_of({"mine": {"resources_servers": {name: {setting: value}}}})["mine"]
        except ConfigError as error:
            (problem,) = error.problems
            assert problem.where.endswith(f".{setting}"), setting
        else:
            assert setting not in ALL_VERIFIERS[name].settings or server.settings == {setting: value}


@pytest.mark.parametrize("stage", load_stages(), ids=lambda stage: stage.id)
@pytest.mark.parametrize(("scale", "platform"), [("prod", "h100"), ("prod", "b200"), ("small", "h100")])
def test_the_native_engine_takes_the_servers_of_every_stage(stage: Stage, scale: str, platform: str) -> None:
    loaded = load_config(config_path(stage, scale, platform))
    assert loaded.repaired is not None
    servers_of(loaded.repaired.env.nemo_gym.instances)


def test_a_setting_with_one_value_is_refused_with_another() -> None:
    given = {"mine": {"resources_servers": {"jailbreak_detection": {"reward_if_unclear": 0.5}}}}
    with pytest.raises(ConfigError, match=r"reward_if_unclear: got 0\.5, expected 0\.0, the one value"):
        servers_of(given)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_says_what_it_is_for(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert len(path.read_text().splitlines()) <= 50


def test_every_setting_has_a_meaning() -> None:
    for kind in SERVER_KINDS:
        for server, node in KINDS[kind]["properties"].items():
            assert len(node["description"]) > 10, server
            for setting, inner in settings_of(node).items():
                assert len(inner["description"]) > 5, f"{server}.{setting}"
