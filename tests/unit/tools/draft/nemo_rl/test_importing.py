"""A NeMo RL file as an overlay of ours: the way back of every export, and what their own files are like."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path

import pytest
import yaml

from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import PLATFORMS, SCALES, LoadedConfig, config_path, load_config, load_stages
from recipes.config.merge import leaves
from recipes.errors import ConfigError
from tools.draft.nemo_rl.export import CONFIG_PATHS, export, render_export, rules
from tools.draft.nemo_rl.import_file import ImportedOverlay, import_over, main, overlays, problems_of, read_file

SWE2 = CONFIG_DIR / "stage2_swe2.yaml"


def all_stages() -> list[Path]:
    paths = set()
    for stage, scale, platform in product(load_stages(), SCALES, PLATFORMS):
        if platform in stage.configs[scale] or (scale == "tiny" and stage.id != "mopd"):  # NeMo RL has no teachers
            paths.add(config_path(stage, scale, platform))
    return sorted(paths)


def export_to(path: Path, source: Path, *overrides: str) -> Path:
    config = load_config(source, overrides) if overrides else loaded(source)
    path.write_text("\n".join(render_export(config, export(config))), encoding="utf-8")
    return path


@functools.cache
def loaded(path: Path) -> LoadedConfig:
    return load_config(path)


def over(base: Path, file: Path, *, is_partial: bool = False) -> ImportedOverlay:
    return import_over(read_file(file, is_partial=is_partial), [loaded(base)])


@pytest.mark.parametrize("source", all_stages(), ids=lambda path: str(path.relative_to(CONFIG_DIR)))
def test_export_comes_back_as_an_empty_overlay_of_its_own_file(source: Path, tmp_path: Path) -> None:
    """Among all files of ours, it is also the nearest."""
    theirs = read_file(export_to(tmp_path / "theirs.yaml", source))
    found = import_over(theirs, [loaded(path) for path in overlays()])
    assert found.base.path == source
    paths = lookup(found.base.tree, CONFIG_PATHS)
    kept = [path for path in paths if path not in rules()["gym_lacks"]]  # an export has no others to come back
    assert leaves(found.overlay) == ({} if kept == paths else {CONFIG_PATHS: kept})
    assert all("given at launch" in advice for advice in found.lost.values())


def test_only_what_was_changed_is_in_the_overlay_and_not_what_follows_from_it(tmp_path: Path) -> None:
    changed = ("grpo.num_prompts_per_step=32", "policy.megatron_cfg.optimizer.lr=2.0e-6", "sif_dir=/images")
    found = over(SWE2, export_to(tmp_path / "theirs.yaml", SWE2, *changed))
    assert found.overlay == {
        "grpo": {"num_prompts_per_step": 32},
        "policy": {"megatron_cfg": {"optimizer": {"lr": 2.0e-6}}},
    }


def test_what_does_not_follow_is_in_the_overlay(tmp_path: Path) -> None:
    found = over(SWE2, export_to(tmp_path / "theirs.yaml", SWE2, "policy.generation.max_new_tokens=4096"))
    assert found.overlay == {"policy": {"generation": {"max_new_tokens": 4096}}}


def test_key_of_a_free_block_that_is_gone_is_deleted(tmp_path: Path) -> None:
    removed = "~policy.generation.vllm_kwargs.max_num_batched_tokens"
    found = over(SWE2, export_to(tmp_path / "theirs.yaml", SWE2, removed))
    assert found.overlay == {"policy": {"generation": {"vllm_kwargs": {"~max_num_batched_tokens": None}}}}


def test_other_environments_are_other_files(tmp_path: Path) -> None:
    stage3 = CONFIG_DIR / "stage3_rlhf.yaml"
    kept = [
        "environments/policy_model.yaml",
        "environments/policy_model_reasoning_off.yaml",
        "environments/genrm_model.yaml",
        "environments/genrm_compare.yaml",
    ]
    found = over(stage3, export_to(tmp_path / "theirs.yaml", stage3, f"env.nemo_gym.config_paths=[{', '.join(kept)}]"))
    assert lookup(found.overlay, "env.nemo_gym.config_paths") == kept


def write(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def test_parents_are_merged_as_there(tmp_path: Path) -> None:
    """With a list of parents, `_override_`, and the three functions that their files use."""
    write(tmp_path / "a.yaml", {"grpo": {"seed": 1, "num_prompts_per_step": 2}, "logger": {"wandb": {"entity": "x"}}})
    write(tmp_path / "b" / "b.yaml", {"defaults": "../a.yaml", "grpo": {"seed": 3}})
    child = {
        "defaults": ["a.yaml", "b/b.yaml"],
        "logger": {"_override_": True, "num_val_samples_to_print": 5},
        "grpo": {"num_generations_per_prompt": "${mul:${grpo.num_prompts_per_step}, 8}"},
        "policy": {"train_micro_batch_size": "${max:1,2}", "model_name": "${oc.env:SURELY_NOT_SET}/m"},
    }
    found = over(SWE2, write(tmp_path / "child.yaml", child))
    assert found.overlay == {
        "grpo": {"seed": 3, "num_prompts_per_step": 2, "num_generations_per_prompt": 16},
        "logger": {"num_val_samples_to_print": 5},
        "policy": {"train_micro_batch_size": 2},
    }
    assert "logger.wandb.entity" not in found.lost
    assert found.lost == {"policy.model_name": "given at launch by MODEL_PATH"}


def test_absent_keys_of_a_complete_file_have_the_values_of_their_code(tmp_path: Path) -> None:
    theirs = yaml.safe_load(export_to(tmp_path / "theirs.yaml", SWE2).read_text(encoding="utf-8"))
    for key in ("kl_input_clamp_value", "kl_output_clamp_value", "use_on_policy_kl_approximation", "ratio_clip_max"):
        del theirs["loss_fn"][key]
    found = over(SWE2, write(tmp_path / "less.yaml", theirs))
    assert found.overlay == {
        "loss_fn": {
            "kl_input_clamp_value": 20.0,
            "kl_output_clamp_value": 10.0,
            "use_on_policy_kl_approximation": False,
            "ratio_clip_max": 0.2,
        }
    }


def test_part_of_a_file_says_nothing_about_the_rest(tmp_path: Path) -> None:
    found = over(SWE2, write(tmp_path / "part.yaml", {"defaults": "gone.yaml", "grpo": {"seed": 7}}), is_partial=True)
    assert found.overlay == {"grpo": {"seed": 7}}
    assert found.lost == {"defaults: gone.yaml": "not read; the base stands for it"}


def test_what_has_no_counterpart_is_listed_with_what_to_do(tmp_path: Path) -> None:
    theirs = {
        "grpo": {"penalize_invalid_tool_call": True, "num_val_generations_per_prompt": 4, "val_batch_size": 256},
        "policy": {
            "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 4},
            "megatron_cfg": {"recompute_granularity": "selective", "frobnicate": 1},
            "generation": {"port_range_low": 11001, "colocated": {"enabled": True}},
        },
        "env": {"nemo_gym": {"swe_agents_train": {"responses_api_agents": {"swe_agents": {
            "run_with_mixed_prompts": True, "debug": True}}}}},
    }  # fmt: skip
    found = over(SWE2, write(tmp_path / "theirs.yaml", theirs), is_partial=True)
    agent = "env.nemo_gym.swe_agents_train.responses_api_agents.swe_agents"
    assert found.lost == {
        "grpo.penalize_invalid_tool_call": "true: set grpo.invalid_tool_call_advantage; null = off",
        "grpo.val_batch_size": "256: validation is one batch; delete it",
        "policy.dtensor_cfg": "this recipe trains with Megatron-core only; delete it",
        "policy.megatron_cfg.recompute_granularity": '"selective": nothing here does that; leave it out, or give it to '
        "ENGINE=nemo_rl",
        "policy.megatron_cfg.frobnicate": "1: NeMo RL reads it nowhere either; leave it out",
        "policy.generation.port_range_low": "11001: here it is an integer >= 1024 and <= 8999; the base's value stays",
        "policy.generation.colocated.enabled": "true: here it is false; the base's value stays",
        f"{agent}.run_with_mixed_prompts": "true: no server of NeMo Gym reads it; leave it out",
    }
    assert lookup(found.overlay, "grpo.val_num_generations_per_prompt") == 4
    assert lookup(found.overlay, f"{agent}.debug") is True


def test_baseline_and_normalisation_are_what_their_code_reads(tmp_path: Path) -> None:
    old = write(tmp_path / "old.yaml", {"grpo": {"use_leave_one_out_baseline": False}})
    assert over(SWE2, old).overlay == {"grpo": {"adv_estimator": {"use_leave_one_out_baseline": False}}}
    both = {"use_leave_one_out_baseline": False, "adv_estimator": {"use_leave_one_out_baseline": True}}
    found = over(SWE2, write(tmp_path / "both.yaml", {"grpo": both}))
    assert found.overlay == {}
    assert "that is grpo.adv_estimator.use_leave_one_out_baseline" in found.lost["grpo.use_leave_one_out_baseline"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "theirs.yaml: this file cannot be read ("),
        ("- 1\n", "theirs.yaml: this file has no `key: value` lines"),
        ("", "theirs.yaml: this file has no `key: value` lines"),
        ("defaults: gone.yaml\ngrpo: {seed: 1}\n", "theirs.yaml: defaults: gone.yaml does not exist"),
        ("defaults: theirs.yaml\ngrpo: {seed: 1}\n", "theirs.yaml is among the parents already"),
        ("data: {train: [{data_path: a}]}\n", "theirs.yaml: data.train: several datasets are listed"),
    ],
)
def test_unreadable_file_is_one_clear_error(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["--file", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_file_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"this file cannot be read \(No such file or directory\)"):
        over(SWE2, Path("/no/such.yaml"))


def test_printed_overlay_loads_and_gives_their_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = export_to(tmp_path / "theirs.yaml", SWE2, "grpo.num_prompts_per_step=32", "loss_fn.ratio_clip_max=0.3")
    assert main(["--file", str(theirs), "--base", "stage2.2"]) == 0
    printed = capsys.readouterr()
    assert "defaults: stage2_swe2.yaml\n" in printed.out
    assert "  num_prompts_per_step: 32" in printed.out and "# there 16" in printed.out
    assert "config-import: not taken: policy.model_name" not in printed.err  # it was not given
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(printed.out.replace("defaults: ", f"defaults: {CONFIG_DIR}/"), encoding="utf-8")
    mine = load_config(overlay)
    assert mine.problems == ()
    assert lookup(mine.tree, "policy.train_global_batch_size") == 32 * 32
    assert lookup(mine.tree, "loss_fn.ratio_clip_max") == 0.3


def test_overlay_that_breaks_a_rule_says_what_to_correct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = export_to(tmp_path / "theirs.yaml", SWE2, "policy.generation.colocated.resources.num_nodes=60")
    text = theirs.read_text(encoding="utf-8").replace("num_nodes: 60", "num_nodes: 64")  # as many as there are
    theirs.write_text(text, encoding="utf-8")
    assert main(["--file", str(theirs), "--base", "stage2.2"]) == 0
    assert "config-import: to correct: imported.yaml: policy.generation.colocated" in capsys.readouterr().err


def test_a_problem_of_either_form_names_the_imported_file() -> None:
    found = problems_of("# theirs\ndefaults: stage2_swe2.yaml\ngrpo: {sed: 1, seed: x}\n")
    assert [str(problem) for problem in found] == [
        "imported.yaml: grpo.sed: there is no such key; did you mean grpo.seed?",
        'imported.yaml: grpo.seed: got "x", expected an integer >= 0 and <= 2147483647; '
        "meaning: seed of data order, sampling and initialisation",
    ]


@pytest.mark.parametrize("base", ["stage2.2/huge", "stage2.2/prod/a100", "stage9"])
def test_unknown_base_is_refused(base: str, tmp_path: Path) -> None:
    assert main(["--file", str(write(tmp_path / "x.yaml", {"grpo": {"seed": 1}})), "--base", base]) == 2
