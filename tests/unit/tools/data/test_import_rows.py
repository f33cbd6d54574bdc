"""Rows of a user's own: which forms are read, what becomes of each column, and what a wrong file is told."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from tools.data.import_rows import main

QUESTIONS = [{"question": f"{n} + 1 = ?", "answer": str(n + 1), "level": n} for n in range(30)]
REWARD = "def score(response, row):\n    return float(response.strip() == row['expected_answer'])\n"


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write records in the form that the file's name says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    else:
        path.write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    return path


def imported(directory: Path, rows: Path, *words: str) -> list[dict[str, Any]]:
    reward = directory / "r.py"
    reward.write_text(REWARD, encoding="utf-8")
    assert main(["--rows", str(rows), "--out", str(directory / "out"), "--reward", str(reward), *words]) == 0
    found = [
        (directory / "out" / name).read_text(encoding="utf-8") for name in ("train-split.jsonl", "val-split.jsonl")
    ]
    return [json.loads(line) for text in found for line in text.splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_questions_become_rows_whatever_the_file(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]):
    rows = imported(tmp_path, write(tmp_path / f"mine{suffix}", QUESTIONS))
    assert len(rows) == 30
    assert rows[3]["responses_create_params"]["input"] == [{"role": "user", "content": "3 + 1 = ?"}]
    assert (rows[3]["expected_answer"], str(rows[3]["level"])) == ("4", "3")
    assert {row["agent_ref"]["name"] for row in rows} == {"reward_simple_agent"}
    assert next((tmp_path / "out").glob("reward-*.py")).read_text(encoding="utf-8") == REWARD
    said = capsys.readouterr().out
    assert "question: the message of the user (30 of 30 rows)" in said
    assert "level: kept for the reward (30 of 30 rows)" in said


def test_a_chat_is_asked_up_to_the_users_last_message(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    rows = imported(tmp_path, write(tmp_path / "chat.jsonl", [{"messages": chat, "id": n} for n in range(3)]))
    assert rows[0]["responses_create_params"]["input"] == chat[:4]
    assert (rows[0]["expected_answer"], rows[0]["id"]) == ("d", 0)


def test_columns_of_other_names_and_rows_of_gym_are_taken(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "hi"}]
    conversational = write(tmp_path / "trl.jsonl", [{"prompt": asked, "answer": "y"}] * 3)
    (row, *_) = imported(tmp_path, conversational)
    assert (row["responses_create_params"]["input"], row["answer"]) == (asked, "y")
    other = [{"q": "x?", "gold": "y", "prompt": "unused"}] * 3
    words = ("--fields", "question=q", "answer=gold")
    (row, *_) = imported(tmp_path, write(tmp_path / "other.jsonl", other), *words)
    assert (row["question"], row["expected_answer"], row["prompt"]) == ("x?", "y", "unused")
    gym = {"responses_create_params": {"input": "hello"}, "agent_ref": {"name": "mine_simple_agent"}, "n": 1 << 70}
    assert main(["--rows", str(write(tmp_path / "gym.jsonl", [gym] * 3)), "--out", str(tmp_path / "gym")]) == 0
    assert json.loads((tmp_path / "gym" / "rows.jsonl").read_text(encoding="utf-8").splitlines()[0]) == gym


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ('{"q": 1}\n' * 9, ["--agent", "a"], "row 1 and 8 more: it has the columns q; expected question or prompt or"),
        ('{"question": "x"}\n' * 9, [], "row 1 and 8 more: no agent scores it; give REWARD=my_reward.py, or ARGS="),
        ('{"messages": [{"role": "assistant"}]}\n', ["--agent", "a"], "no message of the user"),
        ('{"messages": 3}\n', ["--agent", "a"], "got 3, expected a list of messages with a role"),
        ('{"question": {"a": 1}}\n', ["--agent", "a"], "column 'question': got {'a': 1}, expected a text"),
        ('{"instruction": "x", "input": "y"}\n', ["--agent", "a"], "instruction and input could each be the question"),
        ('{"question": "x", "question": "y"}\n', ["--agent", "a"], "it cannot be read: "),
        ('{"question": "x"}\n', ["--agent", "a", "--fields", "answer=gold"], "expected gold, the answer of FIELDS"),
        (
            '{"messages": [{"role": "user", "tool_calls": [1]}]}\n',
            ["--agent", "a"],
            "it has tools; write it as a NeMo Gym row",
        ),
        ("[1]\n", ["--agent", "a"], "got list, expected an object"),
        ('{"question": "x"}\n', ["--agent", "a"], "got 1 rows, expected two rows at least"),
        ('{"question"\n', ["--agent", "a"], "it cannot be read: "),
        ('{"question": "x"}\n' * 3, ["--agent", "a", "--fields", "qestion=x"], "got qestion, expected question or"),
        ('{"question": "x"}\n' * 3, ["--reward", "none.py"], "REWARD: got none.py, expected a file"),
        ('{"question": "x"}\n' * 3, ["--agent", "a", "--reward", "none.py"], "both would score the rows"),
    ],
)
def test_what_cannot_be_used_is_said_once_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    assert main(["--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
