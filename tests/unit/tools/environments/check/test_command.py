"""The command that checks an environment: wrong input is one message, and nothing is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.office import write_small_office
from tools.environments.check.__main__ import main

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
    (tmp_path / "rows.jsonl").write_text("[1]\n", encoding="utf-8")
    (tmp_path / "good.jsonl").write_text(json.dumps({**ROW, "expected_answer": "B"}), encoding="utf-8")
    places = {"{rows}": str(tmp_path / "rows.jsonl"), "{good}": str(tmp_path / "good.jsonl")}
    status = main([*(places.get(word, word) for word in arguments), "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr().err
    assert (status, message in said) == (2, True), said
    assert not (tmp_path / "page.html").exists()


def test_the_office_of_the_example_rows_is_checked_where_the_runs_own_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables lie beside the rows in one directory, as they are handed out."""
    stored = tmp_path / "examples" / "workplace_assistant"
    stored.mkdir(parents=True)
    for path in Path(write_small_office(tmp_path / "office")).glob("*/*.csv"):
        path.rename(stored / path.name)
    call = {"name": "email_delete_email", "arguments": '{"email_id": "00000001"}'}
    row = {"responses_create_params": {"input": "Delete 00000001"}, "ground_truth": [call]}
    (tmp_path / "examples" / "workplace_assistant.jsonl").write_text(json.dumps(row), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["--name", "workplace_assistant", "--examples", "examples", "--out", "page.html"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"PASS  right answer +full reward on 1 of 1 rows", said) and " 0 failed" in said
