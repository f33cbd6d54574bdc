"""`make drift`: published stage files against ours, with files of our own in the published form."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config.load import load_config
from recipes.config.merge import put
from tools.draft.nemo_rl import drift
from tools.draft.nemo_rl.accepted import gym_files, server_types, settings_of_type
from tools.draft.nemo_rl.drift import digest_of, leaves_of, main, table
from tools.draft.nemo_rl.export import export
from tools.draft.nemo_rl.import_file import base_path

KEY = "loss_fn.reference_policy_kl_penalty"


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkout with stage 3 in NeMo RL's form, with some values changed, and a table that pairs it with ours."""
    monkeypatch.setattr(drift, "TABLE", tmp_path / "drift.yaml")

    def write(reasons: list[dict[str, Any]], **values: Any) -> Path:
        tree = dict(export(load_config(base_path("stage3"))).tree)
        for key, value in values.items():
            put(tree, key, value)
        (tmp_path / "up").mkdir(exist_ok=True)
        (tmp_path / "up" / "their.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        group = {"files": {"their.yaml": "stage3/prod/h100"}, "reasons": reasons}
        groups = {"nemo_rl": group, "gym": {"files": {}, "reasons": []}}
        (tmp_path / "drift.yaml").write_text(yaml.safe_dump(groups), encoding="utf-8")
        return tmp_path / "up"

    return write


def run(upstream: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["--upstream", str(upstream)])
    return status, capsys.readouterr().out


def test_equal_values_are_no_differences(upstream, capsys) -> None:
    status, printed = run(upstream([]), capsys)
    assert (status, printed.count("NO REASON")) == (0, 0), printed


def because(why: str, **at: str | list[str]) -> dict[str, Any]:
    return {"why": why, "at": {key.replace("__", "."): pairs for key, pairs in at.items()}}


@pytest.mark.parametrize(
    ("reasons", "status", "says"),
    [
        ([], 1, f"{KEY}: 0.5 -> 0.0001: NO REASON"),
        ([because("a faster trial", **{KEY: "0.5 -> 0.0001"})], 0, f"{KEY}: a faster trial"),
        ([because("a faster trial", **{KEY: ["0.7 -> 0.0001", "0.5 -> 0.0001"]})], 1, "0.7 -> 0.0001: no published"),
        ([because("a faster trial", **{KEY: "0.5 -> 0.001"})], 1, f"{KEY}: 0.5 -> 0.0001: NO REASON"),
        ([because("a faster trial", loss_fn="0.5 -> 0.0001")], 1, f"{KEY}: 0.5 -> 0.0001: NO REASON"),
        (
            [because("a faster trial", **{KEY: "0.5 -> 0.0001"}), because("luck", grpo__seed="1 -> 2")],
            1,
            "grpo.seed: 1 -> 2: no published file differs there so any more",
        ),
    ],
)
def test_each_difference_needs_a_reason_and_each_reason_a_difference(upstream, capsys, reasons, status, says) -> None:
    """A reason holds for the two values that it names: another one upstream, or here, needs another reason."""
    found, printed = run(upstream(reasons, **{KEY: 0.5}), capsys)
    assert found == status
    assert says in printed


@pytest.mark.parametrize(
    ("key", "value", "pair"),
    [
        ("policy.draft.enabled", True, "true -> none"),
        ("policy.dtensor_cfg.enabled", True, "true -> none"),
        ("policy.dynamic_batching.enabled", True, "true -> none"),
        ("grpo.penalize_malformed_thinking", False, "false -> none"),
        ("policy.generation.vllm_cfg.use_deep_gemm", True, "true -> none"),
        ("policy.generation.port_range_low", 20000, "20000 -> none"),
    ],
)
def test_what_no_key_of_ours_says_has_a_reason_at_its_value_alone(upstream, capsys, key, value, pair) -> None:
    status, printed = run(upstream([], **{key: value}), capsys)
    assert status == 1 and f"{key}: {pair}: " in printed
    assert run(upstream([because("off", **{key: pair})], **{key: value}), capsys)[0] == 0


def test_another_long_text_is_another_difference(upstream, capsys) -> None:
    key = "env.nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare.default_principle"
    texts = ["Prefer the shorter one. " * 9 + end for end in ("a", "b")]
    lines = [line for text in texts for line in run(upstream([], **{key: text}), capsys)[1].splitlines() if key in line]
    assert len(set(lines)) == 2 and all("sha256 " in line for line in lines)


def test_a_key_that_nothing_here_has_needs_a_reason_too(upstream, capsys) -> None:
    status, printed = run(upstream([], **{"policy.pretrained_checkpoint": {"path": "x"}}), capsys)
    assert status == 1 and "policy.pretrained_checkpoint.path" in printed


def test_a_value_that_follows_from_another_one_is_no_line_of_its_own(upstream, capsys) -> None:
    status, printed = run(upstream([], **{"grpo.num_prompts_per_step": 64}), capsys)
    assert status == 1 and "grpo.num_prompts_per_step: 64 -> " in printed
    pairs = re.findall(r"(\S+) -> (\S+): NO REASON", printed)
    assert pairs and not [pair for pair in pairs if pair[0] == pair[1]]


def test_a_new_file_beside_the_published_ones_needs_a_reason(upstream, capsys) -> None:
    place = upstream([])
    (place / "small").mkdir()
    (place / "small" / "stage4.yaml").write_text("grpo: {}\n", encoding="utf-8")
    (place / "README.md").write_text("no stage", encoding="utf-8")
    status, printed = run(place, capsys)
    assert status == 1 and printed.count("NO REASON") == 1
    assert "small/stage4.yaml: the file: there, and not in our list: NO REASON" in printed
    reason = {"why": "a trial", "at": {"small": "stage4.yaml"}}
    assert run(upstream([reason]), capsys)[0] == 0


def test_a_git_directory_is_read_at_its_newest_commit(upstream, capsys) -> None:
    place = upstream([])
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    (place / "their.yaml").unlink()
    assert run(place / ".git", capsys)[0] == 0
    assert main(["--upstream", str(place)]) == 2
    assert "none of the published stage files is there" in capsys.readouterr().err


def test_every_pair_of_the_table_names_a_file_of_ours() -> None:
    pairs = [ours for group in table().values() for ours in group["files"].values()]
    assert len({base_path(ours) for ours in pairs}) == len(pairs) == 12


SETTINGS = "class C(BaseResourcesServerConfig):\n    grading_mode: str = 'a'\n"
READ = {server: " ".join(settings_of_type(kind, server)) for kind, server in server_types()}


@pytest.fixture
def gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkout of NeMo Gym that declares what our list has, and a table with the given reasons."""
    monkeypatch.setattr(drift, "TABLE", tmp_path / "drift.yaml")
    place = tmp_path / "gym"
    files = {path: yaml.safe_dump({key: {} for key in names}) for path, names in gym_files().items()}
    files |= {f"{kind}/{server}/app.py": f"# {READ[server]}\n" for kind, server in server_types()}
    files["resources_servers/mcqa/app.py"] += SETTINGS
    read = ("app.py", "configs/mcqa.yaml")
    seen = {
        "resources_servers/mcqa": {
            name: digest_of(name, files[f"resources_servers/mcqa/{name}"].encode()) for name in read
        }
    }
    for name, text in {drift.GYM_MARK: "", **files}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")

    def with_reasons(**at: str | list[str]) -> Path:
        groups = {"gym": {"files": {}, "seen": seen, "reasons": [{"why": "newer", "at": at}] if at else []}}
        (tmp_path / "drift.yaml").write_text(yaml.safe_dump(groups), encoding="utf-8")
        return place

    return with_reasons


def test_a_gym_that_declares_what_our_list_has_shows_no_drift(gym, capsys) -> None:
    status, printed = run(gym(), capsys)
    assert status == 0 and printed.startswith("drift: 0 differences, 0 without a reason, in ")
    assert run(gym(mcqa="more"), capsys)[0] == 1


def test_names_types_and_settings_of_a_gym_are_compared(gym, capsys) -> None:
    place = gym(mcqa="more")
    app = place / "resources_servers" / "mcqa" / "app.py"
    app.write_text(f"{SETTINGS}    more: int = 3\n# {READ['mcqa']}\n", encoding="utf-8")
    status, printed = run(place, capsys)
    assert status == 1 and f"{app.relative_to(place)}: mcqa.more: newer\n" in printed
    assert printed.count("NO REASON") == printed.count(": types of settings: ") == 1
    (place / "resources_servers" / "calendar" / "app.py").unlink()
    renamed = place / "resources_servers" / "mcqa" / "configs" / "mcqa.yaml"
    renamed.write_text("mcqa: {}\nmcqa_agent: {}\n", encoding="utf-8")
    status, printed = run(place, capsys)
    assert status == 1
    assert "calendar: there is no such type: NO REASON" in printed
    assert "not declared by both: mcqa_agent, mcqa_simple_agent: NO REASON" in printed


@pytest.mark.parametrize(
    ("file", "says", "at"),
    [
        (
            "resources_servers/brand_new/app.py",
            "resources_servers/brand_new: there",
            {"resources_servers": "brand_new"},
        ),
        ("responses_api_agents/other/app.py", "responses_api_agents/other: there", {"responses_api_agents": "other"}),
        ("resources_servers/mcqa/configs/v2.yaml", "resources_servers/mcqa: there", {"resources_servers/mcqa": "v2"}),
    ],
)
def test_what_a_gym_has_and_our_list_lacks_needs_a_reason(gym, capsys, file, says, at) -> None:
    place = gym()
    (place / file).parent.mkdir(parents=True, exist_ok=True)
    (place / file).write_text("a: {}\n" if file.endswith("yaml") else "", encoding="utf-8")
    status, printed = run(place, capsys)
    assert status == 1 and says in printed and "NO REASON" in printed
    gym(**at)
    assert run(place, capsys)[0] == 0


def test_a_setting_that_a_gym_reads_no_more_needs_a_reason(gym, capsys) -> None:
    place = gym()
    (place / "resources_servers" / "mcqa" / "app.py").write_text("", encoding="utf-8")
    status, printed = run(place, capsys)
    assert status == 1 and "mcqa.grading_mode: a setting of our list that nothing there reads: NO REASON" in printed


@pytest.mark.parametrize(
    ("file", "text", "is_change"),
    [
        ("app.py", SETTINGS.replace("str", "int") + "# {}\n", True),
        ("app.py", SETTINGS.replace("'a'", "'b'") + "# {}\n", True),
        ("app.py", f"# {{}}, moved\n\n{SETTINGS}    def read(self): ...\n", False),
        ("configs/mcqa.yaml", "mcqa: {domain: other}\nmcqa_simple_agent: {}\n", True),
        ("configs/mcqa.yaml", "# the same\nmcqa_simple_agent: {}\nmcqa: {}\n", False),
    ],
)
def test_changed_values_and_types_of_settings_are_seen(gym, capsys, file, text, is_change) -> None:
    place = gym()
    (place / "resources_servers/mcqa" / file).write_text(
        text.replace("{}\n", READ["mcqa"] + "\n", 1) if "app" in file else text, "utf-8"
    )
    status, printed = run(place, capsys)
    assert (status, printed.count("not what was read last")) == (int(is_change), int(is_change)), printed


def test_somebody_has_read_every_file_and_type_of_our_list() -> None:
    assert set(leaves_of(table()["gym"]["seen"])) == {
        *gym_files(),
        *(f"{kind}/{server}/app.py" for kind, server in server_types()),
    }
