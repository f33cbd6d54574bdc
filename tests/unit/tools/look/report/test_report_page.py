"""The page: right numbers, nothing from a model unescaped, nothing fetched, well-formed in every state of a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page_text import text_of
from tools.look.report.__main__ import main
from tools.look.report.chart import Series, line_chart, running_mean, stacked_chart, visible
from tools.look.report.load import Column, load_run
from tools.look.report.page import gain_of, render
from tools.look.report.trajectory import before_and_after

MakeRun = Callable[..., Path]


def test_the_page_states_the_gain_and_the_shares(make_run: MakeRun) -> None:
    run = load_run(make_run(num_steps=40))
    # Mean start of the four agents is 1.30 / 4, mean end 3.01 / 4; the made-up skill closes 1 - e^-3 of the distance.
    after = 0.325 + (0.7525 - 0.325) * (1 - math.exp(-3))
    gain = gain_of(run, "accuracy")
    assert gain is not None
    assert (gain.before, gain.after) == pytest.approx((0.325, after))
    text = text_of(render(run, min_gain=0.25))
    assert f"gain +{after - 0.325:.3f}, required +0.25: reached" in text
    assert "NOT reached" in text_of(render(run, min_gain=0.5))
    total = sum(run.column("timing/train/total_step_time").values[1:])  # not the validation before training
    refit = sum(run.column("timing/train/weight_sync").values) / total
    assert f"refit {refit:.0%}" in text
    assert "generate 82%" in text


def test_provenance_shows_every_leaf_of_the_lock(make_run: MakeRun) -> None:
    text = text_of(render(load_run(make_run(num_steps=1))))
    assert "stage stage1.1" in text
    assert "git.commit0123456789abcdef" in text
    assert "data.train-split.jsonl.sha25677aa" in text
    assert "packagestorch 2.13.0, ray 2.60.0" in text
    assert '"max_num_steps": 40' in text


def test_model_text_cannot_break_out_of_the_page(make_run: MakeRun) -> None:
    page = render(load_run(make_run(num_steps=10)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<b>not bold" not in page
    assert '<span class="tok">&lt;think&gt;</span>' in page
    assert '<span class="tok">&lt;|im_end|&gt;</span>' in page


def test_the_page_fetches_nothing(make_run: MakeRun) -> None:
    page = render(load_run(make_run(num_steps=10))).replace('<a href="rollouts.html">', "")
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://", page)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 45])
def test_every_length_of_run_gives_a_whole_page(make_run: MakeRun, num_steps: int) -> None:
    run_dir = make_run(num_steps=num_steps)
    (run_dir / "run.lock.json").unlink()
    text = text_of(render(load_run(run_dir)))
    assert "smoke-s42" in text
    assert ("a gain needs a second validation" in text) == (num_steps < 10)
    assert ("not finished" in text) == (num_steps < 40)
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_main_writes_the_page_beside_the_run_or_exits_2(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(num_steps=1)
    assert main(["--run-dir", str(run_dir)]) == 0
    assert capsys.readouterr().out.split() == [str(run_dir / "report.html"), str(run_dir / "rollouts.html")]
    assert text_of((run_dir / "report.html").read_text(encoding="utf-8")).startswith("smoke-s42")
    (run_dir / "metrics.jsonl").unlink()
    assert main(["--run-dir", str(run_dir)]) == 2
    assert "it holds no metrics.jsonl" in capsys.readouterr().err


def test_a_value_that_was_not_finite_is_announced(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=2)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0, "train/loss": null, "non_finite": {"train/loss": "nan"}}\n')
    assert "train/loss was not a finite number at step 3" in text_of(render(load_run(run_dir)))


def test_a_curve_goes_through_its_points() -> None:
    svg = line_chart("t", [Series(label="a", column=Column(steps=(0, 10), values=(0.0, 1.0)), color=0)])
    assert 'd="M50.0 202.0L546.0 20.0"' in svg  # lower left to upper right corner of the plot
    assert "not measured in this run" in line_chart(
        "t", [Series(label="a", column=Column(steps=(), values=()), color=0)]
    )


def test_many_steps_are_averaged_into_bars() -> None:
    steps = list(range(1, 401))
    svg = stacked_chart("t", steps, {"a": [2.0] * 400, "zero": [0.0] * 400, "b": [float(step) for step in steps]})
    bars = re.findall(r'<rect class="c(\d)"', svg)
    assert len(bars) == 2 * 134  # three steps per bar, two parts; the part that is zero is left out
    assert set(bars) == {"0", "2"}
    assert "step 1-3 · all 4 · a 2 · b 2" in svg


def test_running_mean_uses_only_the_past() -> None:
    assert running_mean([1.0, 2.0, 6.0, 4.0], 3) == [1.0, 1.5, 3.0, 4.0]


def test_special_tokens_and_control_characters_are_visible() -> None:
    assert visible("a<b") == "a&lt;b"
    assert visible("</think>") == '<span class="tok">&lt;/think&gt;</span>'
    assert visible("x\x1b\u202ey") == 'x<span class="tok">U+001B</span><span class="tok">U+202E</span>y'
    assert visible("\ud800") == '<span class="tok">U+D800</span>'
    long = visible("a" * 2500 + "b" * 2500)
    assert "2000 more characters" in long
    assert long.endswith("b" * 2000)


def test_pairs_are_the_same_prompt_first_and_last() -> None:
    def sample(step: int, prompt: str, agent: str, reward: float) -> dict[str, object]:
        return {"step": step, "prompt_id": prompt, "agent": agent, "reward": reward}

    rollouts = [
        sample(0, "p", "math", 1.0),
        sample(10, "p", "math", 1.0),
        sample(0, "q", "math", 0.0),
        sample(10, "q", "math", 0.0),
        sample(20, "q", "math", 1.0),
        sample(0, "r", "mcqa", 0.0),
        sample(20, "r", "mcqa", 1.0),
        sample(20, "s", "mcqa", 1.0),
    ]
    pairs = [(first["prompt_id"], first["step"], last["step"]) for first, last in before_and_after(rollouts)]
    assert pairs == [("q", 0, 20), ("r", 0, 20), ("p", 0, 10)]


def test_steps_whose_groups_all_scored_alike_are_a_warning_and_a_curve(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=3)
    assert "scored alike: no gradient" not in text_of(render(load_run(run_dir)))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    flat = {"train/num_groups_zero_variance": 8.0, "train/num_groups": 8.0, "train/total_reward/max": 0.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line | flat) + "\n" for line in lines[1:]))
    text = text_of(render(load_run(run_dir)))
    assert "equal rewards, in 3 of 3 steps; the last of them, step 3: 8 of 8 groups scored alike" in text
    assert "Groups without a gradient" in text


def test_where_rewards_are_not_compared_no_group_lacks_a_gradient(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=3)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("train/num_groups_zero_variance", None)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = text_of(render(load_run(run_dir)))
    assert "Groups without a gradient" not in text and "scored alike" not in text


@pytest.mark.parametrize(("planned", "said"), [(3, "all 3 steps done of the 40 asked for"), (5, "step 3 of 5, not")])
def test_the_page_counts_the_steps_that_the_rows_suffice_for(make_run: MakeRun, planned: int, said: str) -> None:
    run_dir = make_run(num_steps=3)
    (run_dir / "status.json").write_text(json.dumps({"num_steps": planned}))
    assert said in text_of(render(load_run(run_dir)))


def test_prompts_are_drawn_by_how_often_they_are_solved(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=3)
    rates: dict[int, list[float | None]] = {1: [0.0, 0.0, 0.25, None], 2: [0.5, 0.75, 1.0, 1.0]}
    lines = [{"step": step, "row_id": "a", "pass_rate": rate} for step, all_of in rates.items() for rate in all_of]
    (run_dir / "pass_rates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = render(load_run(run_dir))
    assert "step 1 · all 3 · never 2 · less than half 1" in page
    assert "step 2 · all 4 · half and more 2 · always 2" in page
    assert all(title in page for title in ("Entropy", "What is wrong with answers"))


def test_a_run_that_learns_from_pairs_shows_both_sides(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=3)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert "Answers of a pair" not in render(load_run(run_dir))
    for line in lines:
        line |= {"train/rewards_chosen_mean": 0.25, "train/rewards_rejected_mean": -1.5, "train/unknown_tool_rate": 0.5}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")
    page = text_of(render(load_run(run_dir)))
    assert "Answers of a pair" in page and "preferred 0.25" in page and "the other -1.5" in page
    assert "calls of unknown tools 0.5" in page
