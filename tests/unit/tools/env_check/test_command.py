"""The command that checks an environment: wrong input is one message, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.env_check.__main__ import main

ROW = {"responses_create_params": {"input": "q"}, "options": [{"A": "x"}, {"B": "y"}]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "mcq"], "--name: there is no environment 'mcq'; did you mean 'mcqa'?"),
        (["--url", "localhost:5000"], "--url: got localhost:5000, expected http://host:port"),
        (["--name", "mcqa", "--examples", "/nowhere"], "/nowhere: there is no row of mcqa; give rows: DATA=FILE"),
        (["--name", "mcqa", "--data", "{rows}"], "rows.jsonl:1: no JSON object"),
        (["--set", "grading_mode=x"], "--set: settings are those of one environment in this process"),
        (["--name", "mcqa", "--set", "x=1", "--data", "{good}"], "mcqa.x: no code reads this setting"),
        (["--name", "workplace_assistant", "--set", "tables=/none", "--data", "{good}"], "tables cannot be read"),
    ],
)
def test_wrong_input_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("[1]\n")
    (tmp_path / "good.jsonl").write_text(json.dumps({**ROW, "expected_answer": "B"}))
    places = {"{rows}": str(tmp_path / "rows.jsonl"), "{good}": str(tmp_path / "good.jsonl")}
    status = main([*(places.get(word, word) for word in arguments), "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr().err
    assert (status, message in said) == (2, True), said
    assert not (tmp_path / "page.html").exists()
