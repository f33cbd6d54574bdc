"""Commands that load a model or start a server refuse a wrong input before that, and say which one it is."""

from __future__ import annotations

import pytest

from tools import export_hf
from tools.environments import agent_check
from tools.sizing import planner


def test_a_checkpoint_that_is_not_there_is_named_and_not_its_run(tmp_path, capsys):
    assert export_hf.main(["--checkpoint", f"{tmp_path}/run/checkpoints/step_1", "--out", f"{tmp_path}/out"]) == 2
    assert "checkpoints/step_1: there is no such directory" in capsys.readouterr().err


def test_the_address_of_an_agent_has_a_scheme(capsys):
    assert agent_check.main(["--url", "host:8000"]) == 2
    assert "URL: got host:8000, expected http://host:port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "rows.jsonl:1: no JSON"),
        ("[" * 100_000, "rows.jsonl:1: no JSON"),
        ("\n", "rows.jsonl: it has no line"),
        *((text, "rows.jsonl: its first value is no row") for text in ("[1]", "{}", '{"responses_create_params": 5}')),
        ('{"responses_create_params": {"tools": ["x"]}}', "rows.jsonl: its first value is no row"),
    ],
    ids=lambda text: text[:20],
)
def test_a_task_that_cannot_be_read_is_named(tmp_path, capsys, text, wrong):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text, encoding="utf-8")
    assert agent_check.main(["--url", "http://127.0.0.1:1", "--rows", str(rows)]) == 2
    assert wrong in capsys.readouterr().err


def test_the_first_call_is_of_a_tool_that_has_a_name():
    for tools in ([{"function": {"name": "f"}}], [{"type": "web_search"}, {"name": "f"}]):
        (first, *_) = agent_check.made_up({"responses_create_params": {"tools": tools}})
        assert "<function=f>" in first


def test_a_plan_of_the_tiny_model_says_how_to_make_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planner, "ROOT", tmp_path)
    monkeypatch.delenv("MODEL_PATH", raising=False)
    assert planner.main(["--stage", "stage1.1", "--scale", "tiny"]) == 2
    assert "models/tiny-nemotron-h-sft: there is no such directory; run `make tiny`" in capsys.readouterr().err
