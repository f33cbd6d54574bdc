"""The reference page, the golden files, and what differs between two stages."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config.keys.schema import CONFIG_DIR, SERVER_KINDS, declared, lookup, schema, settings_of
from recipes.config.load import BASE, load_config, with_defaults
from recipes.config.merge import leaves
from tools import show_config as config_diff
from tools.dev.docs import HEADER, SERVERS, page
from tools.dev.docs import main as write_page
from tools.show_config import ABSENT, GOLDEN, golden_files, main, update_golden

BLOCKS = [key for key, node in declared().items() if "properties" in node]


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in line.replace("\\|", "\x00").strip("| ").split("|")]


def test_page_has_each_key_once_with_meaning_unit_and_default() -> None:
    keys = page().partition(SERVERS)[0]
    rows = {cells(line)[0].strip("`"): line for line in keys.splitlines() if line.startswith("| `")}
    assert list(rows) == [key for key in rows if key in declared()]
    assert {*rows, *BLOCKS} == set(declared())
    base = leaves(yaml.safe_load(BASE.read_text(encoding="utf-8")))
    for key, line in rows.items():
        node = declared()[key]
        assert node["description"] in line.replace("\\|", "|"), key
        assert line.count(" | ") >= len(HEADER) - 1, key
        if base.get(key) == "???":
            assert "given at launch" in line
        if "honours" in node.get("x-native", {}):
            assert node["x-native"]["reason"] in line


def settings(nodes: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every setting below a schema node of a server, by a walk of its own."""
    for name, node in nodes.items():
        whole = {**schema()["$defs"].get(node.get("$ref", "").rpartition("/")[2], {}), **node}
        yield f"{prefix}.{name}", whole
        yield from settings(whole.get("properties", {}), f"{prefix}.{name}")


def server_settings() -> dict[str, dict[str, Any]]:
    """Return every setting of every server type."""
    kinds = schema()["$defs"]["server_instance"]["properties"]
    found: dict[str, dict[str, Any]] = {}
    for kind in SERVER_KINDS:
        for server, node in kinds[kind]["properties"].items():
            found |= dict(settings(settings_of(node), f"{kind}.{server}"))
    return found


def test_page_has_every_server_type_and_setting() -> None:
    servers = page().partition(SERVERS)[2]
    shown = {}
    for section in servers.split("\n### ")[1:]:
        lines = section.splitlines()
        shown[lines[0]] = {cells(line)[0].strip("`"): line for line in lines if line.startswith("| `")}
    found = server_settings()
    assert len(found) > 400
    for key, node in found.items():
        if "description" in node:  # else it is a name of the user's own
            _, server, setting = key.split(".", 2)
            assert node["description"] in shown[server][setting].replace("\\|", "|"), key
            assert node.get("x-unit", "") in cells(shown[server][setting]), key


def test_every_number_has_a_unit() -> None:
    for key, node in {**declared(), **server_settings()}.items():
        if key.endswith(".sandbox_port"):
            continue  # a number, or the text of a variable
        kinds = node.get("type", [])
        is_number = "properties" not in node and {"integer", "number"} & set(
            [kinds] if isinstance(kinds, str) else kinds
        )
        assert bool(is_number) == ("x-unit" in node), f"{key}: a number has an `x-unit`, and nothing else has one"


def test_page_shows_range_unit_and_refusal() -> None:
    (row,) = [line for line in page().splitlines() if line.startswith("| `policy.generation.top_p`")]
    assert row == (
        "| `policy.generation.top_p` | a number > 0 and <= 1 | probability | `1.0` | nucleus sampling of training "
        "rollouts; 1 = off | only 1: the trainer does not filter as the engine would: every importance weight would be "
        "biased |"
    )


def test_page_is_written_or_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "docs" / "configuration.md"
    assert write_page(["--write", str(path)]) == 0
    assert write_page([]) == 0
    assert path.read_text(encoding="utf-8") == capsys.readouterr().out == page()


def test_golden_files_are_current() -> None:
    """After a wanted change: make config-golden, and read the diff."""
    files = golden_files()
    assert {path for path in GOLDEN.rglob("*.yaml")} == set(files)
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_golden_file_is_what_the_configuration_says() -> None:
    golden = yaml.safe_load((GOLDEN / "stage2_swe2.yaml").read_text(encoding="utf-8"))
    assert golden["policy.max_total_sequence_length"] == 196608
    assert golden["policy.train_global_batch_size"] == 512
    assert golden["derived"]["num_nodes"] == 64
    tree = with_defaults(load_config(CONFIG_DIR / "stage2_swe2.yaml")).tree
    for key in set(golden) - {"derived"}:
        value = lookup(tree, key)
        assert value == golden[key] or (golden[key] == ABSENT and not value) or isinstance(value, dict), key


def test_update_writes_what_changed_and_removes_what_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_diff, "GOLDEN", tmp_path)
    files = {tmp_path / "stage3_rlhf.yaml": "a: 2\n", tmp_path / "b200" / "stage3_rlhf.yaml": "a: 3\n"}
    monkeypatch.setattr(config_diff, "golden_files", lambda: files)
    assert set(update_golden()) == set(files)
    stale, changed = tmp_path / "stage9.yaml", tmp_path / "stage3_rlhf.yaml"
    stale.write_text("a: 1\n", encoding="utf-8")
    changed.write_text("a: 1\n", encoding="utf-8")
    assert set(update_golden()) == {stale, changed}
    assert not stale.exists()
    assert {path: path.read_text(encoding="utf-8") for path in files} == files
    assert update_golden() == []


def test_difference_prints_only_what_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIG_DIR.parent)
    assert main(["--stage", "stage2.2", "--diff", "stage2.1", "grpo.seed=43"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# configs/stage2_swe2.yaml, and after 'stage2.1' what configs/stage2_swe1.yaml has"
    assert "grpo.num_prompts_per_step: 16  # stage2.1: 64  (configs/stage2_swe2.yaml)" in lines
    assert "grpo.seed: 43  # stage2.1: 42  (command line)" in lines
    assert "env.nemo_gym.policy_model.responses_api_models.vllm_model.sequential_reasoning_allowed: false  " \
        "# stage2.1: (absent)  (configs/environments/policy_model_thinking.yaml)" in lines  # fmt: skip
    assert "#   samples_per_step: 512  # stage2.1: 1,024" in lines
    assert not [line for line in lines if "context_parallel_size" in line or "num_nodes" in line]


def test_difference_to_another_scale_and_platform(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stage", "stage3", "--diff", "stage3/small"]) == 0
    assert "cluster.num_nodes: 96  # stage3/small: 24" in capsys.readouterr().out
    assert main(["--stage", "stage3", "--diff", "stage3/prod/b200"]) == 0
    assert "env.nemo_gym.num_gpu_nodes: 4  # stage3/prod/b200: 8" in capsys.readouterr().out
    assert main(["--stage", "stage3", "--scale", "tiny", "--diff", "stage3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("#")] == []
    assert main(["--stage", "stage3", "--diff", "stage3/huge"]) == 2
    assert "DIFF: got huge, expected one of prod, small, tiny" in capsys.readouterr().err
