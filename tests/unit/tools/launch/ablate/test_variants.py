"""Variants of an ablation: from words, from a file, and their names."""

from __future__ import annotations

import pytest

from recipes.config.load import config_path, find_stage, load_config
from recipes.errors import ConfigError
from tools.launch.ablate.__main__ import ABLATIONS
from tools.launch.ablate.variants import BASELINE, variants_in, variants_of


def test_each_value_of_each_key_is_a_variant():
    found = variants_of(["grpo.async_grpo.max_trajectory_age_steps=0,2", "loss_fn.use_cispo=true"])
    assert [variant.overrides for variant in found] == [
        (),
        ("grpo.async_grpo.max_trajectory_age_steps=0",),
        ("grpo.async_grpo.max_trajectory_age_steps=2",),
        ("loss_fn.use_cispo=true",),
    ]
    assert found[0] is BASELINE
    assert [variant.question for variant in found[1:]] == [
        "grpo.async_grpo.max_trajectory_age_steps",
        "grpo.async_grpo.max_trajectory_age_steps",
        "loss_fn.use_cispo",
    ]
    assert [variant.slug for variant in found] == [
        "as-the-stage",
        "max-trajectory-age-steps-0",
        "max-trajectory-age-steps-2",
        "use-cispo-true",
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("k=[1,2],[3]", ["[1,2]", "[3]"]),
        ("k={a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
        ("k='a,b',c", ["'a,b'", "c"]),
        ("k=a=b", ["a=b"]),
    ],
)
def test_a_comma_within_a_value_belongs_to_it(word, values):
    assert [variant.overrides[0] for variant in variants_of([word])[1:]] == [f"k={value}" for value in values]


@pytest.mark.parametrize("word", ["grpo.x", "=1", "grpo.x=", "grpo.x=1,", "grpo.x=,1"])
def test_a_word_of_another_form_is_refused(word):
    with pytest.raises(ConfigError, match="expected KEY=VALUE,VALUE"):
        variants_of([word])


def test_two_variants_whose_runs_would_share_a_name_are_refused():
    with pytest.raises(ConfigError, match="runs of one name"):
        variants_of(["a.beta=1", "b.beta=1"])


@pytest.mark.parametrize("content", ["", "[1]", "loss: 1", "loss: {GSPO: }", "loss: {GSPO: {}}", "loss: [", "\x00"])
def test_a_file_of_another_form_is_refused_by_name(content, tmp_path):
    file = tmp_path / "ablations.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ablations\.yaml"):
        variants_in(file)
    with pytest.raises(ConfigError, match="nothing"):
        variants_in(tmp_path / "nothing")


def test_every_variant_of_the_recipe_is_a_configuration_that_differs_from_the_stage():
    path = config_path(find_stage("stage1.1"), "tiny", "h100")
    base = load_config(path, ["policy.model_name=m", "data.train.data_path=t"])
    variants = variants_in(ABLATIONS)
    assert len(variants) > 8
    for variant in variants[1:]:
        loaded = load_config(path, ["policy.model_name=m", "data.train.data_path=t", *variant.overrides])
        assert not loaded.problems, variant.name
        assert loaded.config != base.config, variant.name
