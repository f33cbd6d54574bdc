"""Prompts without a verdict are named in the report: those that failed in every epoch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.errors import InputError
from recipes.grpo.checkpoint import complete_checkpoints
from recipes.grpo.data import NO_VARIANCE
from tests.page_text import text_of
from tools.look.report import ledger
from tools.look.report.ledger import unjudged
from tools.look.report.load import load_run
from tools.look.report.page import MAX_SHOWN, render, unjudged_table

LEDGER = [
    {"key": "0:0:aa", "step": 1, "reason": ""},
    {"key": "0:1:bb", "step": 0, "reason": "env_failed: no image <b>for</b> it"},
    {"key": "0:2:cc", "step": 0, "reason": NO_VARIANCE},
    {"key": "0:3:dd", "step": 0, "reason": "timed_out: late"},
    {"key": "1:3:dd", "step": 4, "reason": ""},
    {"key": "1:1:bb", "step": 0, "reason": "timed_out: later"},
]


def write_ledger(run_dir: Path, step: int, entries: list[dict[str, object]]) -> None:
    place = run_dir / "checkpoints" / f"step_{step:06d}"
    place.mkdir(parents=True)
    (place / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    (place / "COMPLETE").touch()


def test_only_prompts_that_failed_in_every_epoch_are_listed(tmp_path: Path) -> None:
    write_ledger(tmp_path, 2, LEDGER[:4])
    assert [one.line for one in unjudged(tmp_path)] == [2, 4]
    write_ledger(tmp_path, 10, LEDGER)
    (one,) = unjudged(tmp_path)
    assert (one.line, one.prompt_id, one.reason) == (2, "bb", "timed_out: later")


def test_a_run_without_a_checkpoint_lists_none(tmp_path: Path) -> None:
    assert unjudged(tmp_path) == ()
    assert unjudged_table((), "rows.jsonl") == ""


@pytest.fixture
def remove_before_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give a function that makes a run save a checkpoint and remove the one before, so many times before a read."""

    def remove(times: int) -> None:
        left = iter(range(times))

        def listed(root: Path) -> dict[int, Path]:
            found = complete_checkpoints(root)
            if next(left, None) is not None:
                newest = max(found)
                write_ledger(tmp_path, newest + 1, LEDGER)
                shutil.rmtree(found[newest])
            return found

        monkeypatch.setattr(ledger, "complete_checkpoints", listed)

    return remove


def test_a_checkpoint_that_the_run_removes_is_left_for_the_newer_one(
    tmp_path: Path, remove_before_reads: Callable[[int], None]
) -> None:
    write_ledger(tmp_path, 2, LEDGER[:4])
    remove_before_reads(1)
    assert [one.line for one in unjudged(tmp_path)] == [2]


def test_a_ledger_that_cannot_be_read_is_an_error_that_says_why(
    tmp_path: Path, remove_before_reads: Callable[[int], None]
) -> None:
    write_ledger(tmp_path, 2, LEDGER[:4])
    remove_before_reads(3)
    with pytest.raises(InputError, match=r"checkpoints: the run removed its newest checkpoint .* 3 times; make the"):
        unjudged(tmp_path)
    (tmp_path / "checkpoints" / "step_000005" / "ledger.jsonl").unlink()
    with pytest.raises(InputError, match=r"step_000005: the checkpoint has no ledger.jsonl; copy it from elsewhere"):
        unjudged(tmp_path)


def test_the_table_names_the_task_of_a_row_and_escapes_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    tasks = [{}, {"responses_create_params": {"metadata": {"instance_id": "a__b-1<script>"}}}]
    rows.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    write_ledger(tmp_path, 2, LEDGER[:2])
    page = unjudged_table(unjudged(tmp_path), str(rows))
    assert "a__b-1&lt;script&gt;" in page and "<b>for" not in page
    assert "env_failed: no image <b>for</b> it 1" in text_of(page)
    rows.unlink()
    assert "bb" in text_of(unjudged_table(unjudged(tmp_path), str(rows)))


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    entries = [
        {"key": f"0:{n}:p{n}", "step": 0, "reason": f"aborted: the agent ended: {n}"} for n in range(MAX_SHOWN + 7)
    ]
    write_ledger(tmp_path, 1, entries)
    page = unjudged_table(unjudged(tmp_path), "")
    assert page.count("<tr>") == 1 + MAX_SHOWN
    assert f"aborted: the agent ended {MAX_SHOWN + 7}; the first {MAX_SHOWN} are shown" in text_of(page)


def test_the_report_of_a_run_has_the_table(make_run: Callable[..., Path]) -> None:
    run_dir = make_run(num_steps=2)
    assert "Prompts without a verdict" not in render(load_run(run_dir))
    write_ledger(run_dir, 2, LEDGER)
    assert "timed_out: later" in text_of(render(load_run(run_dir)))
