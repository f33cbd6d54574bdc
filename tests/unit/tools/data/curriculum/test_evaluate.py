"""What is concluded from the answers to each row: pass@k, intervals, gains, and which checkpoint a name means."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from recipes.errors import InputError
from tools.data.curriculum.evaluate import (
    ALL,
    GAINS,
    HEADS,
    by_environment,
    cells,
    gains,
    interval,
    pass_at_k,
    scores,
    text_of,
)


def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one() -> None:
    for n, solved in ((1, 0), (1, 1), (4, 1), (5, 2), (6, 6), (6, 0), (6, 5)):
        answers = [number < solved for number in range(n)]
        for k in range(1, n + 1):
            choices = list(itertools.combinations(answers, k))
            assert pass_at_k(n, solved, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    with pytest.raises(ValueError, match="got k = 3, expected 1 to 2"):
        pass_at_k(2, 1, 3)


def test_an_interval_holds_the_mean_and_is_no_point_where_all_rows_are_alike() -> None:
    for values in ([1.0] * 5, [0.0] * 5, [0.5], [0.0, 1.0], [0.25, 0.5, 1.0]):
        found = interval(values)
        assert 0.0 <= found.low <= found.mean <= found.high <= 1.0
        assert found.high - found.low > 0.1
    narrow, wide = interval([0.0, 1.0] * 200), interval([0.0, 1.0] * 4)
    assert narrow.high - narrow.low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.02)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert interval([0.5], GAINS).low < 0.0 < interval([0.5], GAINS).high < 1.0 + 1e-9


def write(directory: Path, rates: list[tuple[str, float | None]], *, greedy: float) -> Path:
    for place, samples in ((directory, 4), (directory / "greedy", 1)):
        place.mkdir(parents=True)
        lines = [
            {
                "line": line,
                "agent": agent,
                "num_scored": samples if rate is not None else 0,
                "pass_rate": None if rate is None else greedy if samples == 1 else rate,
                "mean_reward": rate,
            }
            for line, (agent, rate) in enumerate(rates, start=1)
        ]
        (place / "pass_rates.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    return directory


def test_environments_are_told_apart_and_rows_without_a_verdict_left_out(tmp_path: Path) -> None:
    rows = [("mcqa_simple_agent", 0.25), ("mcqa_simple_agent", None), ("math_simple_agent", 1.0)]
    before = write(tmp_path / "a", rows, greedy=0.0)
    after = write(tmp_path / "b", [(name, None if rate is None else 1.0) for name, rate in rows], greedy=1.0)
    found = {"before": by_environment(before), "checkpoint": by_environment(after)}
    assert list(found["before"]) == [ALL, "math", "mcqa"]
    assert (found["before"]["mcqa"].num_rows, found["before"]["mcqa"].num_judged) == (2, 1)
    assert found["before"]["mcqa"].pass_at == {1: 0.25, 2: 0.5, 4: 1.0}
    gained = gains(before, after)
    assert {name: one.mean for name, one in gained.items()} == {ALL: 0.375, "mcqa": 0.75, "math": 0.0}
    lines = text_of([HEADS, *cells(found, gained)]).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [ALL, ALL, "math", "math", "mcqa", "mcqa"]
    assert lines[1].split()[-1] == "0.625" and "+0.375" in lines[2]
    assert "2 of 3" in lines[1] and "1 of 2" in lines[5]


def test_an_environment_without_a_verdict_is_shown(tmp_path: Path) -> None:
    rows = [("mcqa_simple_agent", None), ("math_simple_agent", 1.0)]
    found = {"checkpoint": by_environment(write(tmp_path / "a", rows, greedy=0.0))}
    assert found["checkpoint"]["mcqa"] is None
    assert ("mcqa", "checkpoint", "no verdict") in [row[:3] for row in cells(found, {})]


def test_a_row_with_fewer_verdicts_has_no_part_in_a_larger_k() -> None:
    rows = [
        {"num_scored": 4, "pass_rate": 0.25, "mean_reward": 0.25},
        {"num_scored": 1, "pass_rate": 0.0, "mean_reward": 0.0},
    ]
    assert scores(rows, []).pass_at == {1: 0.125, 2: 0.5, 4: 1.0}


def test_rows_without_any_verdict_are_no_score(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", [("mcqa_simple_agent", None)] * 2, greedy=0.0)
    with pytest.raises(InputError, match="no answer to any row has a verdict"):
        by_environment(directory)
