"""The stage table, and the command that prints a configuration."""

from pathlib import Path

import pytest
import yaml

from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.load import config_path, find_stage, load_config, load_stages, with_defaults
from recipes.errors import ConfigError
from tools.show_config import main


def test_seven_stages_in_order_each_from_the_one_before() -> None:
    stages = [stage for stage in load_stages() if stage.id.startswith("stage")]
    assert [(stage.id, stage.name) for stage in stages] == [
        ("stage1.1", "rlvr1"),
        ("stage1.2", "rlvr2"),
        ("stage1.3", "rlvr3"),
        ("stage2.1", "swe1"),
        ("stage2.2", "swe2"),
        ("stage3", "rlhf"),
        ("stage4", "healing"),
    ]
    assert [stage.after for stage in stages] == [None, *(stage.id for stage in stages[:-1])]


def test_stages_1_1_to_1_3_share_one_configuration() -> None:
    first, second, third, *_ = load_stages()
    assert first.configs == second.configs == third.configs
    assert len({stage.blend for stage in load_stages()}) == 7


def test_every_listed_file_exists() -> None:
    for stage in load_stages():
        for scale, platforms in stage.configs.items():
            for platform in platforms:
                assert config_path(stage, scale, platform).is_file()


@pytest.mark.parametrize(
    ("scale", "platform", "file"),
    [
        ("prod", "h100", "stage1_rlvr.yaml"),
        ("small", "h100", "small_scale/stage1_rlvr_convergence_27node_h100.yaml"),
        ("tiny", "h100", "tiny/stage1_rlvr.yaml"),
        ("tiny", "b200", "tiny/stage1_rlvr.yaml"),
    ],
)
def test_config_path(scale: str, platform: str, file: str) -> None:
    assert config_path(find_stage("rlvr1"), scale, platform) == CONFIG_DIR / file


def test_unknown_stage_lists_them() -> None:
    with pytest.raises(
        ConfigError, match=r"STAGE: got rlvr9, expected one of stage1.1 \(rlvr1\),.*did you mean rlvr3\?"
    ):
        find_stage("rlvr9")
    with pytest.raises(ConfigError, match=r"^DIFF: got rlvr9"):
        find_stage("rlvr9", where="DIFF")


def test_configuration_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"stage1.1.configs.small.b200: the stage has no file.*choose from: prod on h100"
    ):
        config_path(find_stage("stage1.1"), "small", "b200")


ROW = {
    "id": "stage1", "name": "a", "experiment": "a", "configs": {}, "blend": "a", "after": None,
    "container": "training", "requires": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "got [], expected a list of stages"),
        ([{**ROW, "container": "docker"}], "stages[0].container: 'docker' is not one of"),
        ([{**ROW, "extra": 1}], "'extra' was unexpected"),
        ([ROW, ROW], "id: stage1 stands here twice"),
        ([{**ROW, "after": "stage9"}], "stage1.after: got stage9, expected null"),
    ],
)
def test_wrong_table_is_named(rows: list[object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump({"stages": rows}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_stages(path)
    assert message in str(caught.value)


def test_listed_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(
        yaml.safe_dump({"stages": [{**ROW, "configs": {"prod": {"h100": "no/such.yaml"}}}]}), encoding="utf-8"
    )
    (stage,) = load_stages(path)
    with pytest.raises(ConfigError, match=r"no/such.yaml does not exist"):
        config_path(stage, "prod", "h100")


def test_printed_configuration_loads_again_and_names_its_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIG_DIR.parent)
    assert main(["--stage", "stage1.1", "--scale", "tiny", "grpo.seed=43"]) == 0
    printed = capsys.readouterr().out
    expected = with_defaults(load_config(CONFIG_DIR / "tiny" / "stage1_rlvr.yaml", ["grpo.seed=43"])).tree
    assert yaml.safe_load(printed) == expected
    (seed,) = [line for line in printed.splitlines() if line.startswith("  seed:")]
    assert seed.split("#")[1].strip() == "command line"
    (micro,) = [line for line in printed.splitlines() if "train_mb_tokens:" in line]
    assert "from policy.max_total_sequence_length, policy.train_micro_batch_size" in micro
    assert "#   data_parallel_size: 1" in printed


def test_printing_a_wrong_configuration_fails_with_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stage", "stage1.1", "grpo.sed=43", "cluster.num_nodes=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [": ".join(line.split(": ")[:2]) for line in captured.err.splitlines()] == [
        "command line: grpo.sed",
        "command line: cluster.num_nodes",
    ]


def test_printing_an_unknown_stage_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stage", "stage9"]) == 2
    assert "STAGE: got stage9" in capsys.readouterr().err
