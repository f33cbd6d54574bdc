"""A stage in the form of NeMo RL: what it is called there, what is added, what is said about what is lost."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import yaml

from recipes.config.keys.schema import CONFIG_DIR, declared, lookup
from recipes.config.load import LoadedConfig, load_config
from recipes.config.merge import leaves
from tools.draft.nemo_rl.accepted import accepted, is_known, is_read_in, pairs_in
from tools.draft.nemo_rl.export import ExportedConfig, export, gym_files, is_instance, rules
from tools.show_config import main

SWE2 = CONFIG_DIR / "stage2_swe2.yaml"
RLVR = CONFIG_DIR / "stage1_rlvr.yaml"


@functools.cache
def exported(path: Path = RLVR, *overrides: str) -> ExportedConfig:
    loaded: LoadedConfig = load_config(path, overrides)
    assert not loaded.problems
    return export(loaded)


def noted(found: ExportedConfig) -> dict[str, str]:
    return {problem.where.rpartition(": ")[2]: problem.what.partition("): ")[2] for problem in found.notes}


def refused(found: ExportedConfig) -> list[str]:
    return [problem.where.rpartition(": ")[2] for problem in found.problems]


def test_every_key_of_ours_is_theirs_or_has_a_rule() -> None:
    base = leaves(load_config(CONFIG_DIR / "grpo_base.yaml").tree)
    unknown = [key for key in base if not is_known(key) and key not in rules()["ours_only"] and not is_instance(key)]
    assert unknown == []


def test_every_rule_names_a_key_that_exists() -> None:
    for section in ("ours_only", "differs", "refused", "values", "same_values"):
        for key in rules()[section]:
            assert key in declared(), f"{section}: {key}"
    for key in rules()["leave_out_null"]:
        assert key in declared(), key
    for theirs, ours in rules()["copy"].items():
        assert is_known(theirs) and ours in declared()
    for key in rules()["ours_only"]:
        assert not is_known(key), f"{key} is a key of theirs"
    for block in (rules()["add"], *rules()["add_with"].values()):
        for key in leaves(block):
            assert is_known(key) and key not in declared(), key
    for path, files in rules()["gym_files"].items():
        assert (CONFIG_DIR / path).is_file(), path
        assert all(file.endswith(".yaml") for file in files)


def test_what_is_called_or_valued_differently() -> None:
    tree = exported().tree
    assert lookup(tree, "checkpointing.keep_top_k") == 1000000  # null is refused there
    assert lookup(tree, "grpo.normalize_rewards") is lookup(tree, "grpo.adv_estimator.normalize_rewards") is True
    serving = lookup(tree, "policy.generation.vllm_cfg.http_server_serving_chat_kwargs")
    assert serving == {"enable_auto_tools": True, "tool_parser": "qwen3_coder", "reasoning_parser": "nano_v3"}
    assert "chat_template" not in lookup(tree, "policy.tokenizer")  # null would select another template
    assert lookup(tree, "policy.megatron_cfg.enabled") is True
    assert lookup(tree, "policy.dtensor_cfg") == {"enabled": False}
    assert "deadlines" not in tree
    for key in rules()["ours_only"]:
        assert lookup(tree, key) is None, key


def test_passes_over_the_rows_are_repetitions_of_the_data() -> None:
    tree = exported(SWE2).tree
    assert lookup(tree, "data.train.repeat") == 100
    assert lookup(tree, "grpo.max_num_epochs") == 1
    assert lookup(exported().tree, "data.train.repeat") is None


def test_synchronous_training_is_their_synchronous_trainer() -> None:
    tree = exported(RLVR, "grpo.async_grpo.max_trajectory_age_steps=0").tree
    assert lookup(tree, "grpo.async_grpo.enabled") is False
    assert lookup(exported().tree, "grpo.async_grpo.enabled") is True
    for how in ("max_trajectory_age_steps=0", "enabled=false"):  # their synchronous trainer shapes rewards, too
        shaped = exported(RLVR, f"grpo.async_grpo.{how}", "grpo.reward_scaling.enabled=true")
        assert lookup(shaped.tree, "grpo.async_grpo.enabled") is False
        assert not [problem for problem in shaped.problems if "reward_scaling" in str(problem)]
    refused = exported(RLVR, "grpo.reward_scaling.enabled=true").problems
    assert [problem for problem in refused if "reward_scaling" in str(problem)]


def test_no_validation_data_is_no_validation_block() -> None:
    assert lookup(exported(RLVR, "data.validation.data_path=null").tree, "data")["validation"] is None


def test_files_of_environments_are_those_of_nemo_gym_in_our_order() -> None:
    assert lookup(exported(SWE2).tree, "env.nemo_gym.config_paths") == [
        "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
        "responses_api_agents/swe_agents/configs/swebench_openhands_training.yaml",
    ]
    paths = lookup(exported().tree, "env.nemo_gym.config_paths")
    assert len(paths) == len(set(paths)) == 23  # of 21 environments, one of them in two files, and the policy model
    order = [path.rpartition("/")[2] for path in paths]
    assert order.index("nl2bash-equivalency.yaml") < order.index("equivalence_llm_judge.yaml")  # the last one counts
    assert gym_files(["environments/policy_model_thinking.yaml"]) == []


def test_instances_declared_in_place_get_a_program_and_others_theirs() -> None:
    gym = lookup(exported().tree, "env.nemo_gym")
    assert lookup(gym, "safety_judge_model.responses_api_models.local_vllm_model.entrypoint") == "app.py"
    assert lookup(gym, "genrm_model.responses_api_models.genrm_model.entrypoint") is None
    assert lookup(gym, "genrm_compare_resources_server.resources_servers.genrm_compare.num_rollouts_per_prompt") == 16
    assert "use_absolute_ip" not in gym
    assert lookup(exported(SWE2).tree, "env.nemo_gym.use_absolute_ip") is True


def test_what_a_launch_gives_stays_a_reference() -> None:
    agent = lookup(exported(SWE2).tree, "env.nemo_gym.swe_agents_train.responses_api_agents.swe_agents")
    assert agent["container_formatter"][0] == "${sif_dir}/swebench_sweb.eval.x86_64.{instance_id}.sif"
    given = exported(SWE2, "sif_dir=/images").tree
    agent = lookup(given, "env.nemo_gym.swe_agents_train.responses_api_agents.swe_agents")
    assert agent["container_formatter"][0] == "/images/swebench_sweb.eval.x86_64.{instance_id}.sif"


def test_each_lost_key_is_said_with_what_happens_instead() -> None:
    notes = noted(exported(SWE2))
    assert {key for key in rules()["ours_only"]} <= set(notes)
    assert notes["grpo.val_greedy"] == "it validates with the sampling of training"
    assert "counts filtered rollouts" in notes["grpo.overlong_filtering"]
    assert "grpo.overlong_filtering" not in noted(exported())  # false there, so it makes no difference


def test_lost_key_that_would_train_something_else_is_refused() -> None:
    assert refused(exported()) == []
    assert refused(exported(SWE2)) == []
    assert "env.should_mask_flagged_samples" in noted(exported(SWE2))
    key = "grpo.async_grpo.num_rollout_workers"
    assert refused(exported(SWE2, f"{key}=2")) == [key]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.5", "grpo.val_period=5"),
         "grpo.stop_at_validation_metric"),
        (("env.nemo_gym.effort_levels.low_weight=0.5", "env.nemo_gym.effort_levels.low_string=x"),
         "env.nemo_gym.effort_levels.low_weight"),
    ],
)  # fmt: skip
def test_value_that_they_do_not_honour_is_refused(overrides: tuple[str, ...], key: str) -> None:
    assert key in refused(exported(RLVR, *overrides))


def test_environment_without_a_counterpart_is_refused() -> None:
    found = exported(
        SWE2, "env.nemo_gym.config_paths=[environments/policy_model.yaml, environments/served.yaml]", "sif_dir=null"
    )
    assert any("environments/served.yaml" in problem.wrong for problem in found.problems)


def test_connection_of_a_served_verifier_is_lost_and_said() -> None:
    key = "env.nemo_gym.mcqa.resources_servers.mcqa.url"
    found = exported(RLVR, f"++{key}=http://127.0.0.1:5001")
    assert noted(found)[key] == "it starts the verifier itself"
    assert lookup(found.tree, key) is None


def test_printed_export_is_yaml_and_the_losses_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["grpo.seed=43", "grpo.async_grpo.num_rollout_workers=2"]
    assert main(["--stage", "stage2.2", "--engine", "nemo_rl", *words]) == 0
    printed = capsys.readouterr()
    tree = yaml.safe_load(printed.out)
    assert tree == exported(SWE2, *words).tree
    assert tree["grpo"]["seed"] == 43
    deadline = "deadlines.refit: NeMo RL 0.7.0 has no such setting (value 1800): it has no such deadline"
    assert f"config: not the same: configs/grpo_base.yaml: {deadline}" in printed.err
    assert "config: refused at launch: command line: grpo.async_grpo.num_rollout_workers: got 2" in printed.err
    assert "  seed: 43" + " " * 60 in printed.out and "# command line" in printed.out


def test_every_key_of_an_export_is_accepted_with_its_type() -> None:
    tree = exported().tree
    for key, value in leaves(tree).items():
        if key in accepted():
            assert accepted()[key].takes(value), key


def test_keys_follow_the_checkout_that_the_launch_names(tmp_path: Path) -> None:
    """A key that a newer checkout reads passes; the same key is a loss, or refused, with the version of the list."""
    source = tmp_path / "nemo_rl" / "algorithms" / "grpo.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "class Base:\n    val_start_at: int\nclass GRPOConfig(Base):\n    x: int\n"
        "class MasterConfig:\n    grpo: GRPOConfig\n",
        encoding="utf-8",
    )
    loaded = load_config(
        SWE2,
        ["grpo.val_start_at=3", "grpo.stop_at_validation_metric=val:accuracy", "grpo.stop_at_validation_threshold=0.5"],
    )
    plain, newer = export(loaded), export(loaded, tmp_path)
    assert lookup(plain.tree, "grpo.val_start_at") is None and lookup(newer.tree, "grpo.val_start_at") == 3
    assert [problem.where.rpartition(": ")[2] for problem in newer.problems] == [
        "grpo.stop_at_validation_metric",
        "grpo.stop_at_validation_threshold",
    ]
    source.write_text(
        'config["grpo"]["stop_at_validation_metric"]\ngrpo_config.get("stop_at_validation_threshold")\n',
        encoding="utf-8",
    )
    pairs_in.cache_clear()
    assert export(loaded, tmp_path).problems == ()


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ('master_config["grpo"]["new"]', True),
        ('master_config.grpo.get("new", 3)', True),
        ("cfg.grpo.new", True),
        ('grpo = config["grpo"]\ngrpo["new"]', True),
        ('config["grpo"]\ngrpo_cfg["new"]', True),
        ("class G:\n    new: int\nclass MasterConfig:\n    grpo: 'NotRequired[G]'", True),
        ("class B:\n    new: int\nclass G(B):\n    pass\nclass MasterConfig:\n    grpo: G | None", True),
        ('"grpo" "new"', False),  # both names are there, and nothing says that one is in the other
        ('config["grpo"]\nconfig["policy"]["new"]', False),
        ("class G:\n    old: int\nclass P:\n    new: int\nclass MasterConfig:\n    grpo: G\n    policy: P", False),
        ("class G:\n    new: int\nclass Other:\n    grpo: G", False),
        ("grpo(new=1)", False),
        ("def broken(", False),
    ],
)
def test_a_key_is_read_where_its_own_block_has_it(tmp_path: Path, source: str, is_read: bool) -> None:
    file = tmp_path / "nemo_rl" / "a.py"
    file.parent.mkdir()
    file.write_text(source, encoding="utf-8")
    assert is_read_in(tmp_path, "grpo.new") is is_read
    assert not is_read_in(None, "grpo.new") and not is_read_in(tmp_path / "nowhere", "grpo.new")


def test_an_environment_that_their_gym_lacks_is_left_out_with_a_note() -> None:
    found = exported(CONFIG_DIR / "b200" / "stage1_rlvr.yaml")
    assert found.problems == ()
    assert "terminal_pivot" not in str(found.tree)
    assert [note.fix for note in found.notes if "terminal_pivot" in note.where] == [
        "leave out its rows, or use ENGINE=native"
    ]
