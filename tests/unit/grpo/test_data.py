"""The prompt stream's order, and what a wrong data file is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.contract.rows import last_user_text
from recipes.errors import DataError, RunError
from recipes.grpo.data import PromptDataset, PromptStream, check_file, require_rows, row_id


def row(number: int) -> dict[str, Any]:
    return {"responses_create_params": {"input": f"question {number}"}, "agent_ref": {"name": "a"}, "number": number}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows), encoding="utf-8"
    )
    return path


def test_stream_is_the_file_in_order_then_the_file_again(tmp_path: Path) -> None:
    dataset = PromptDataset(write(tmp_path / "train.jsonl", [row(0), "", row(1), row(2)]))
    stream = PromptStream(dataset, num_epochs=2, shuffle=False, seed=0)
    drawn = [stream.draw(position) for position in range(7)]
    assert drawn.pop() is None
    assert [(ref.epoch, ref.row_index) for ref, _ in drawn] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [content["number"] for _, content in drawn] == [0, 1, 2, 0, 1, 2]


def test_shuffled_epochs_are_permutations_that_only_the_seed_decides(tmp_path: Path) -> None:
    dataset = PromptDataset(write(tmp_path / "train.jsonl", [row(n) for n in range(50)]))

    def order(seed: int, positions: range) -> list[int]:
        stream = PromptStream(dataset, num_epochs=2, shuffle=True, seed=seed)
        return [stream.draw(position)[0].row_index for position in positions]

    first, second = order(1, range(50)), order(1, range(50, 100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != order(2, range(50))
    assert order(1, range(60, 70)) == second[10:20], "a resumed stream draws what the first would have drawn"


def test_row_id_does_not_depend_on_key_order() -> None:
    assert row_id({"a": 1, "b": [2]}) == row_id({"b": [2], "a": 1}) != row_id({"a": 1, "b": [3]})


def test_last_user_text() -> None:
    items = [{"role": "user", "content": "first"}, {"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
    assert last_user_text({"responses_create_params": {"input": items}}) == "x"
    assert last_user_text({"responses_create_params": {"input": "plain"}}) == "plain"
    task = {"input": [], "metadata": {"problem_statement": "mend it"}}
    assert last_user_text({"responses_create_params": task}) == "mend it"
    assert last_user_text({"responses_create_params": {"input": [], "metadata": {"problem_statement": 3}}}) == ""
    assert last_user_text({"responses_create_params": {**task, "input": [{"role": "assistant", "content": "x"}]}}) == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": ', "invalid JSON"),
        ("[1]", "a JSON list instead of an object"),
        ({"_hf_placeholder": {}}, "an unfilled `_hf_placeholder`"),
        ({"agent_ref": {"name": "a"}}, "no `responses_create_params.input`"),
        ({"responses_create_params": {"input": []}, "agent_ref": {"name": "a"}}, "no `responses_create_params.input`"),
        ({"responses_create_params": {"input": "x"}}, "no `agent_ref.name`"),
        ({**row(0), "number": -1}, "number is negative"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "train.jsonl", [row(0), "", line, row(1)])
    problems = check_file(path, lambda content: ["number is negative"] if content["number"] < 0 else [])
    assert len(problems) == 1
    assert problems[0].where == f"{path}:3"
    assert message in problems[0].wrong


def test_all_wrong_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["nonsense"] * 50)
    problems = check_file(path, lambda _: [])
    assert len(problems) == 21
    assert problems[-1].wrong == "50 of 50 rows are wrong; only the first are listed"


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.jsonl: there is no such file"):
        require_rows(tmp_path / "nowhere.jsonl", lambda _: [])
    with pytest.raises(DataError, match="the file has no rows"):
        require_rows(write(tmp_path / "empty.jsonl", []), lambda _: [])


def flipped(line: bytes) -> bytes:
    return line.replace(b"x", b"y")


EDITS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a letter": lambda lines: [lines[0], flipped(lines[1]), lines[2]],
    "two rows change places": lambda lines: [lines[0], lines[2], lines[1]],
    "a row is longer": lambda lines: [lines[0], lines[1][:-2] + b" }\n", lines[2]],
    "cut": lambda lines: [lines[0], lines[1][:9]],
    "gone": lambda lines: [lines[0]],
    "no JSON": lambda lines: [lines[0], b"{" * len(lines[1])],
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_row_that_is_edited_in_place_during_the_run_is_one_clear_error(tmp_path: Path, edit: str) -> None:
    rows = [{**row(number), "text": f"x{number}"} for number in range(3)]
    path = write(tmp_path / "train.jsonl", rows)
    dataset = PromptDataset(path)
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("r+b") as file:
        file.write(b"".join(EDITS[edit](lines)))
        file.truncate()
    assert dataset[0] == rows[0]
    with pytest.raises(RunError, match=r"train\.jsonl: row 2 is not what it was when the run began"):
        dataset[1]
