"""Server instances: files, schema and the verifiers that read the settings say the same."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config import load
from recipes.config.keys.schema import CONFIG_DIR, SERVER_KINDS, lookup, schema, settings_of
from recipes.config.load import Stage, config_path, load_config, load_stages, with_defaults
from recipes.environments.contract.settings import keys_of
from recipes.environments.instances import ALL_VERIFIERS, CODING_AGENTS, servers_of
from recipes.errors import ConfigError
from recipes.exact_json import dumps
from recipes.run_grpo import write_resolved
from tools.draft.provenance import changed_keys

FILES = sorted((CONFIG_DIR / "environments").glob("*.yaml"))
KINDS = schema()["$defs"]["server_instance"]["properties"]
EXAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "string": "http://x", "object": {}, "array": []}
STAGE_FILES = sorted(
    {config_path(stage, scale, platform) for stage in load_stages() for scale in stage.configs
     for platform in stage.configs[scale]}
)  # fmt: skip


@functools.cache
def block(path: Path) -> dict[str, Any]:
    """Return the resolved env.nemo_gym of a stage."""
    found: dict[str, Any] = load_config(path).tree["env"]["nemo_gym"]
    return found


def instances(path: Path) -> dict[str, Any]:
    """Return the server instances of a file, or of a stage with those that its files add."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path in STAGE_FILES:
        return {
            name: value for name, value in block(path).items() if isinstance(value, dict) and set(value) & set(KINDS)
        }
    return dict(data)


def types(kind: str, found: dict[str, Any]) -> set[str]:
    return {server for instance in found.values() for server in instance.get(kind, {})}


def used(kind: str) -> set[str]:
    """Return the types of a kind of server that stages use."""
    return {server for path in STAGE_FILES for server in types(kind, instances(path))}


def unused() -> set[Path]:
    """Return the files that no stage reads."""
    blocks = [block(path)["config_paths"] for path in (*STAGE_FILES, CONFIG_DIR / "tiny" / "wide.yaml")]
    return set(FILES) - {CONFIG_DIR / name for names in blocks for name in names}


def test_every_file_is_used_by_a_stage_or_is_that_of_a_verifier_of_the_users_own() -> None:
    left = unused() - {CONFIG_DIR / "environments" / "served.yaml"}  # an example of the user's own
    assert not [path for path in left if not types("resources_servers", instances(path)) - used("resources_servers")]


@pytest.mark.parametrize("kind", SERVER_KINDS)
def test_the_schema_declares_the_types_that_stages_use_and_what_is_here_besides(kind: str) -> None:
    of_users = {"responses_api_agents": {"external_agent"}, "resources_servers": set(ALL_VERIFIERS)}
    declared = set(KINDS[kind]["properties"])
    assert used(kind) <= declared <= used(kind) | of_users.get(kind, set())


def test_agents_of_the_files_are_those_that_rows_name() -> None:
    """Rows of the published blends name these agents; a second name of a family is a blend's of another release."""
    files = set(FILES) - unused()
    named = {name for path in files for name, value in instances(path).items() if "responses_api_agents" in value}
    brought = {name for kind in used("resources_servers") for name in ALL_VERIFIERS[kind].agents}
    assert named - {*CODING_AGENTS} <= brought | {"lc_judge_simple_agent"}  # a second agent of a verifier, of stage 1
    assert brought - named == {"structured_outputs_v3_simple_agent", "structured_outputs_v4_simple_agent"}


def test_every_setting_of_a_verifier_is_in_the_schema_with_its_default() -> None:
    for name, verifier in ALL_VERIFIERS.items():
        nodes = KINDS["resources_servers"]["properties"][name]["properties"]
        assert list(nodes) == list(keys_of(verifier.settings)), f"run `make config-keys`: {name}"
        for key, own in keys_of(verifier.settings).items():
            may_be_null = "null" in nodes[key].get("type", "") and not own.has_one_value
            assert ("default" in nodes[key]) == (own.default is not None or may_be_null), key
            if "properties" not in nodes[key] and "default" in nodes[key]:
                assert dumps(nodes[key]["default"]) == dumps(own.default), f"run `make config-keys`: {name}.{key}"


def an_example(node: dict[str, Any]) -> Any:
    """Return a value that a schema node allows."""
    kinds = node.get("type", "object")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if "const" in node or "enum" in node:
        return node.get("const", node.get("enum", [None])[0])
    if "properties" in node or "$ref" in node:
        return {name: an_example(settings_of(node)[name]) for name in node.get("required", ())} or {"name": "x"}
    return node.get("default", node.get("minimum", EXAMPLES[kind]))


@pytest.mark.parametrize("name", ALL_VERIFIERS)
def test_a_declared_setting_of_an_existing_verifier_is_read_or_refused_by_name(name: str) -> None:
    for setting, node in settings_of(KINDS["resources_servers"]["properties"][name]).items():
        value = an_example(node)
        try:
            server = servers_of({"mine": {"resources_servers": {name: {setting: value}}}})["mine"]
        except ConfigError as error:
            problems = [problem for problem in error.problems if problem.where.split(".")[5] == setting]
            assert len(problems) == len(error.problems), setting
        else:
            key = keys_of(ALL_VERIFIERS[name].settings).get(setting)
            own = ALL_VERIFIERS[name].settings()
            assert key is None or server.settings == replace(own, **{setting: getattr(server.settings, setting)})


WRONG = [
    ("code_gen", {"unit_test_timeout_secs": -1}, r"unit_test_timeout_secs: got -1, expected a number > 0"),
    ("code_gen", {"unit_test_timeout_secs": "soon"}, r'unit_test_timeout_secs: got "soon", expected a number > 0'),
    ("code_gen", {"unit_test_timeout_sec": 1}, r"timeout_sec: no code reads this setting; did you mean 'unit_test_t"),
    ("mcqa", {"grading_mode": "loose"}, r'grading_mode: got "loose", expected one of strict_single'),
    ("mcqa", {"judge_model_server": {"name": "j"}}, r"judge_model_server: no code reads this setting"),
    ("math_with_judge", {"judge_model_server": {"nam": "j"}}, r"judge_model_server: got {.*nam.*}, expected a block"),
    ("ns_tools", {"scores_as": {}}, r"scores_as: no code reads this setting"),
    ("ns_tools", {"python_tool_port": 5}, r"python_tool_port: no code reads this setting"),
    ("swerl_gen", {"sandbox_network": 1}, r"sandbox_network: got 1, expected true or false"),
    (
        "single_step_tool_use_with_argument_comparison",
        {"tool_call_comparator_config": {"word_count_similarity_threshold": 0.7}},
        r"word_count_similarity_threshold: got 0\.7, expected a number >= 0 and <= 0\.5",
    ),
    (
        "single_step_tool_use_with_argument_comparison",
        {"tool_call_comparator_config": {"allow_subset": True}},
        r"tool_call_comparator_config: got .*, expected a block",
    ),
]


@pytest.mark.parametrize(("name", "settings", "message"), WRONG)
def test_a_wrong_setting_is_one_clear_error(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        servers_of({"mine": {"resources_servers": {name: settings}}})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "fix"),
    [("palindrome", "run `make config-keys`"), ("mcqu", "did you mean mcqa?"), ("words", "give the `url`")],
)
def test_an_unknown_type_says_what_to_do(name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes" / "environments" / "verifiers"
    folder.mkdir(parents=True)
    (folder / "palindrome.py").touch()
    monkeypatch.setattr(load, "CONFIG_DIR", tmp_path / "configs")
    assert load._unknown_type(f"env.nemo_gym.mine.resources_servers.{name}").fix.startswith(fix)


def test_defaults_are_shown_with_the_file_that_has_them() -> None:
    """A value that the run takes from a verifier's file is shown as one that a file sets."""
    path = CONFIG_DIR / "stage1_rlvr.yaml"
    shown, key = with_defaults(load_config(path)), "env.nemo_gym.code_gen.resources_servers.code_gen"
    assert shown.sources[f"{key}.unit_test_timeout_secs"].endswith("code_gen.yaml")
    assert lookup(shown.tree, f"{key}.close_last_fence") is False
    assert shown.sources[f"{key}.close_last_fence"] == "recipes/environments/verifiers/code_gen.py"
    for instance, kinds in shown.tree["env"]["nemo_gym"].items():
        for kind, settings in (kinds.get("resources_servers", {}) if isinstance(kinds, dict) else {}).items():
            nodes = KINDS["resources_servers"]["properties"][kind]["properties"]
            assert {name for name, node in nodes.items() if "default" in node} <= settings.keys(), instance


def test_a_run_writes_the_values_of_its_verifiers_down(tmp_path: Path) -> None:
    """Every start's resolved.json has them, and the lock of a launch, so that a changed one is a change of the run."""
    key = "env.nemo_gym.code_gen.resources_servers.code_gen.close_last_fence"
    loaded = load_config(CONFIG_DIR / "stage1_rlvr.yaml")
    write_resolved(loaded, tmp_path)
    resolved = json.loads((tmp_path / "resolved.json").read_text(encoding="utf-8"))
    assert lookup(resolved["config"], key) is False
    assert resolved["sources"][key] == "recipes/environments/verifiers/code_gen.py"
    assert changed_keys(tmp_path, with_defaults(loaded).tree) == []
    [line] = changed_keys(tmp_path, with_defaults(load_config(loaded.path, [f"++{key}=true"])).tree)
    assert line == f"configuration: {key}: was False, is True"


@pytest.mark.parametrize("stage", [one for one in load_stages() if one.configs["prod"]], ids=lambda stage: stage.id)
def test_the_values_of_verifiers_written_out_change_no_server(stage: Stage) -> None:
    loaded = load_config(config_path(stage, "prod", "h100"))
    plain, whole = (
        servers_of({name: value for name, value in one.tree["env"]["nemo_gym"].items() if isinstance(value, dict)})
        for one in (loaded, with_defaults(loaded))
    )
    assert plain == whole


@pytest.mark.parametrize("path", STAGE_FILES, ids=lambda path: str(path.relative_to(CONFIG_DIR)))
def test_the_native_engine_takes_the_servers_of_every_stage(path: Path) -> None:
    loaded = load_config(path)
    assert loaded.repaired is not None
    servers_of(loaded.repaired.env.nemo_gym.instances)


def test_a_setting_with_one_value_is_refused_with_another() -> None:
    given = {"mine": {"resources_servers": {"jailbreak_detection": {"reward_if_unclear": 0.5}}}}
    with pytest.raises(ConfigError, match=r"reward_if_unclear: got 0\.5, expected 0\.0, the one value"):
        servers_of(given)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_says_what_it_is_for(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 50


def test_every_setting_has_a_meaning() -> None:
    for kind in SERVER_KINDS:
        for server, node in KINDS[kind]["properties"].items():
            assert len(node["description"]) > 10, server
            for setting, inner in settings_of(node).items():
                assert len(inner["description"]) > 5, f"{server}.{setting}"
