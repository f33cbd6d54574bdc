"""Every wrong file gives exactly the expected line, and all lines at once."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.load import load_config
from tests.unit.config.wrong_configs import FILES

AGAIN = "remove it here, or it would be its own parent"
TINY = CONFIG_DIR / "tiny" / "stage1_rlvr.yaml"


def problems(tmp_path: Path, text: str, overrides: list[str]) -> list[str]:
    (tmp_path / "x.yaml").write_text(f"defaults: {TINY}\n{text}", encoding="utf-8")
    return [str(problem) for problem in load_config("x.yaml", overrides).problems]


@pytest.mark.parametrize("name", FILES)
def test_wrong_file_gives_its_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, line = FILES[name]
    (found,) = problems(tmp_path, text, [])
    assert found.removeprefix(f"{CONFIG_DIR}/") == line


def test_the_table_holds_fifty() -> None:
    assert len(FILES) >= 50
    assert len({line for _, line in FILES.values()}) == len(FILES)


TOGETHER = (
    "unknown key", "key that NeMo RL ignores", "text for a number", "number for a truth value", "no choice",
    "number without a dot", "no in a text", "empty list", "octal", "deadline of zero", "off for false",
)  # fmt: skip


def test_ten_wrong_things_in_one_file_give_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the table laid into one; their nodes are merged, so that 3e-6 stays what it is."""
    monkeypatch.chdir(tmp_path)
    whole: Any = yaml.compose(FILES[TOGETHER[0]][0])
    for name in TOGETHER[1:]:
        merge_nodes(whole, yaml.compose(FILES[name][0]))
    assert len(TOGETHER) >= 10
    assert sorted(problems(tmp_path, yaml.serialize(whole), [])) == sorted(FILES[name][1] for name in TOGETHER)


def merge_nodes(target: Any, source: Any) -> None:
    there = {key.value: value for key, value in target.value}
    for key, value in source.value:
        if key.value in there:
            merge_nodes(there[key.value], value)
        else:
            target.value.append((key, value))


OVERRIDES = {
    "grpo.sed=3": "command line: grpo.sed: there is no such key; did you mean grpo.seed?",
    "grpo.seed": "command line: grpo.seed: this is not an override; write key=value, ++key=value or ~key, "
    "e.g. grpo.num_prompts_per_step=64",
    "~grpo.seed=3": "command line: ~grpo.seed=3: this is not an override; write key=value, ++key=value or ~key, "
    "e.g. grpo.num_prompts_per_step=64",
    "grpo.seed=": "command line: grpo.seed: there is nothing after '='; write null for no value, '' for an empty text",
    "grpo.seed=0755": "command line: grpo.seed: got 0755, which YAML reads as 493, expected a decimal number; "
    'write 493, or quote it: "0755"',
    "grpo.seed=[1": "command line: grpo.seed: '[1' is not YAML (did not find expected ',' or ']'); quote it",
    "~grpo.sed": "command line: ~grpo.sed: there is no such key to delete; choose from: ",
    "~grpo.seed": "command line: grpo.seed: this key has no value; set it to an integer >= 0 and <= 2147483647",
    "grpo.seed=abc": 'command line: grpo.seed: got "abc", expected an integer >= 0 and <= 2147483647; '
    "meaning: seed of data order, sampling and initialisation",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_wrong_override_gives_its_line(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = problems(tmp_path, "", [override])
    assert line.startswith(OVERRIDES[override])


@pytest.mark.parametrize(
    ("defaults", "line"),
    [
        ("none.yaml", "y.yaml: defaults: none.yaml does not exist; "
         "give the path relative to this file"),
        ("{a: b}", 'y.yaml: defaults: got {"a": "b"}, expected a path or a list of paths; '
         "name one parent file, or a list of one and of files to lay over it"),
        ("[]", "y.yaml: defaults: got [], expected a path or a list of paths; "
         "name one parent file, or a list of one and of files to lay over it"),
        (f"[{TINY}, none.yaml]", "y.yaml: defaults: none.yaml does not exist; "
         "give the path relative to this file"),
        (f"[{TINY}, {TINY}]", f"y.yaml: defaults: {TINY} is among the parents already; {AGAIN}"),
        ("y.yaml", f"y.yaml: defaults: y.yaml is among the parents already; {AGAIN}"),
        (None, "y.yaml: defaults: this file names no parent; add `defaults:` with the path to "
         "configs/grpo_base.yaml or to a stage file, relative to this file"),
    ],
)  # fmt: skip
def test_wrong_parent_gives_its_line(
    defaults: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "y.yaml").write_text(f"defaults: {defaults}\n" if defaults else "grpo: {seed: 1}\n", encoding="utf-8")
    assert [str(problem) for problem in load_config("y.yaml").problems] == [line]


def test_endless_alias_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "y.yaml").write_text("a: &a [*a]\n", encoding="utf-8")
    assert str(load_config("y.yaml").problems[0]) == ("y.yaml: an alias stands inside its own anchor; delete the alias")


def test_missing_file_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(problem) for problem in load_config("z.yaml").problems] == [
        "z.yaml: this file cannot be read (No such file or directory); check the path"
    ]


def test_all_problems_of_a_file_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
grpo:
  num_prompt_per_step: 8
  num_generations_per_prompt: 1
  seed: -1
  seed: 2
loss_fn:
  use_importance_sampling_correction: false
  truncated_importance_sampling_type: tiss
policy:
  max_total_sequence_length: long
  megatron_cfg:
    sequence_parallel: true
    optimizer: {lr: 1e-4}
  generation: {vllm_kwargs: {dtype: bfloat16}}
deadlines: {rollout: 10}
"""
    found = problems(tmp_path, text, ["cluster.num_node=2"])
    assert [": ".join(line.split(": ")[:2]) for line in found] == [
        "x.yaml:7: grpo.seed",
        "x.yaml: policy.megatron_cfg.optimizer.lr",
        "x.yaml: grpo.num_prompt_per_step",
        "x.yaml: grpo.seed",
        "x.yaml: loss_fn.truncated_importance_sampling_type",
        "x.yaml: policy.max_total_sequence_length",
        "command line: cluster.num_node",
        "x.yaml: grpo.num_generations_per_prompt",
        "x.yaml: loss_fn.use_importance_sampling_correction",
        "x.yaml: policy.megatron_cfg.sequence_parallel",
        "x.yaml: policy.generation.vllm_kwargs.dtype",
        "x.yaml: deadlines.rollout",
    ]
