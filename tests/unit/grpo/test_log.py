"""The run logger: whole lines, nothing dropped, a resume that removes what it repeats, errors that surface."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import ConfigError, RunError, StalledError
from recipes.grpo import log
from recipes.grpo.log import RunLogger, progress_line, validation_line
from recipes.grpo.metrics import StepMetrics, pick_rollouts
from recipes.tokens import GroupTokens
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan
from tests.groups import LocalStore, group_of
from tools.data.rows.pass_rates import read_pass_rates


@dataclass(frozen=True)
class Wandb:
    project: str = "p"
    name: str = "n"


@dataclass(frozen=True)
class LoggerCfg:
    tensorboard_enabled: bool = False
    wandb_enabled: bool = False
    prometheus_address: str | None = None
    wandb: Wandb = field(default_factory=Wandb)
    num_val_samples_to_print: int = 0


def step_metrics(step: int, reward: float) -> StepMetrics:
    metrics = StepMetrics(step)
    metrics.add({"reward": reward})
    return metrics


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_group(row: int, rewards: list[float | None], agent: str = "math", trajectory: Any = None) -> Group:
    turn = Turn(
        prompt_token_ids=(1,),
        token_ids=(2, 3),
        logprobs=(-0.1, -0.2),
        versions=(VersionSpan(version=6, start=0, end=1), VersionSpan(version=7, start=1, end=2)),
        finish_reason="stop",
    )
    rollouts = tuple(
        Rollout(
            turns=(turn,),
            status=RolloutStatus.COMPLETED if reward is not None else RolloutStatus.JUDGE_FAILED,
            reason=f"row {row} member {member}",
            reward=reward,
            output_text="<think>\u2028</think> 4 \ud800",  # a line separator and a lone surrogate must survive
            trajectory=trajectory,
        )
        for member, reward in enumerate(rewards)
    )
    prompt = PromptRef(epoch=0, row_index=row, prompt_id=f"{row:016x}")
    return group_of(rollouts, prompt=prompt, agent=agent, prompt_text="2+2?", target_step=7, version=6)


def test_every_step_is_one_line_in_order(tmp_path: Path) -> None:
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=600)
    for step in range(1, 601):  # more than the queue holds
        run.log(step_metrics(step, step / 8))
    run.close()
    records = lines_of(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 601))
    assert records[4]["train/reward"] == 0.625
    assert records[0]["time"] <= records[-1]["time"]  # type: ignore[operator]


def test_a_value_that_is_not_finite_is_named_and_the_line_stays_json(tmp_path: Path) -> None:
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1)
    metrics = StepMetrics(1)
    metrics.add({"loss": float("nan"), "grad_norm": float("inf"), "reward": 0.5})
    run.log(metrics)
    run.close()
    (record,) = lines_of(tmp_path / "metrics.jsonl")
    assert record["train/loss"] is None
    assert record["train/reward"] == 0.5
    assert record["non_finite"] == {"train/loss": "nan", "train/grad_norm": "inf"}


def test_resume_removes_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    first = RunLogger(tmp_path, LoggerCfg(), num_steps=9)
    for step in range(5):
        first.log(step_metrics(step, 0.0))
        first.log_rollouts("train", step, [make_group(step, [1.0])], LocalStore(), limit=1)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tim')  # kill -9 in the middle of a write
    second = RunLogger(tmp_path, LoggerCfg(), num_steps=9)
    second.resume(2)
    second.log(step_metrics(3, 1.0))
    second.close()
    records = lines_of(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["train/reward"]) for record in records] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert [record["step"] for record in lines_of(tmp_path / "rollouts" / "train.jsonl")] == [0, 1, 2]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_run_that_starts_over_keeps_what_was_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        run = RunLogger(tmp_path, LoggerCfg(tensorboard_enabled=True), num_steps=9)
        run.resume(0)
        run.log(step_metrics(0, 0.0))
        run.log(step_metrics(number, 1.0))
        run.log_rollouts("train", number, [make_group(0, [1.0])], LocalStore(), limit=1)
        run.close()
    again = RunLogger(tmp_path, LoggerCfg(), num_steps=9)
    again.resume(0)
    again.log(step_metrics(0, 0.0))
    again.close()
    places = [tmp_path / "set_aside", tmp_path / "set_aside.2"]
    for number, place in enumerate(places, start=1):
        assert [record["step"] for record in lines_of(place / "metrics.jsonl")] == [0, number]
        assert [record["step"] for record in lines_of(place / "pass_rates.jsonl")] == [number]
        assert [record["step"] for record in lines_of(place / "rollouts" / "train.jsonl")] == [number]
        assert list((place / "tensorboard").iterdir())
        assert f"what was logged is kept in {place}" in caplog.text
    assert [record["step"] for record in lines_of(tmp_path / "metrics.jsonl")] == [0]
    repeated = RunLogger(tmp_path, LoggerCfg(), num_steps=9)
    repeated.resume(0)  # no step was trained: the validation before training is repeated, nothing is set aside
    repeated.close()
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == ""
    assert len(list(tmp_path.glob("set_aside*"))) == 2


@pytest.mark.parametrize("line", ["[]", "null", "5", '"x"', "{}", '{"step": "3"}', '{"step": null}', "\x00", '{"st'])
def test_a_line_that_is_no_record_is_removed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', encoding="utf-8")
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=2)
    run.resume(2)
    run.close()
    assert [record["step"] for record in lines_of(file)] == [1, 2]
    assert "removed an unreadable line" in caplog.text


def test_rollout_lines_say_what_came_out_and_why(tmp_path: Path) -> None:
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1)
    run.log_rollouts("val", 7, [make_group(3, [0.5])], LocalStore(), limit=4)
    run.close()
    (record,) = lines_of(tmp_path / "rollouts" / "val.jsonl")
    assert record["step"] == 7
    assert record["prompt_text"] == "2+2?"
    assert record["output_text"] == "<think>\u2028</think> 4 \ud800"
    assert (record["reward"], record["reason"], record["status"]) == (0.5, "row 3 member 0", "completed")
    assert (record["group_version"], record["versions"]) == (6, [6, 7])
    assert "trajectory" not in record
    with pytest.raises(ValueError, match="test"):
        run.log_rollouts("test", 7, [], LocalStore(), limit=1)


def test_what_an_agent_did_is_logged_for_the_rollouts_of_the_sample(tmp_path: Path) -> None:
    noted = {"instance": "a__b-1", "items": [{"role": "tool", "text": "\ud800"}]}
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1)
    run.log_rollouts("train", 1, [make_group(3, [0.5] * 8, trajectory=noted)], LocalStore(), limit=2)
    run.close()
    assert [record["trajectory"] for record in lines_of(tmp_path / "rollouts" / "train.jsonl")] == [noted] * 2


def test_a_logged_rollout_has_its_group_and_the_tokens_of_its_answer(tmp_path: Path) -> None:
    texts = {2: "<think>\u2028</think> ", 3: "4 \ud800"}
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1, text_of=lambda ids: "".join(texts[token] for token in ids))
    groups = [make_group(3, [1.0, 0.0, 0.5]), make_group(4, [1.0, 1.0])]
    advantages = {groups[0].prompt.key: [1.0, None, 0.1], groups[1].prompt.key: [0.0, 0.0]}
    run.log_rollouts("train", 1, groups, LocalStore(), limit=2, advantages=advantages)
    run.close()
    lines = lines_of(tmp_path / "rollouts" / "train.jsonl")
    shown = [(line["prompt"], line["member"]) for line in lines]
    first, second = (group.prompt.key for group in groups)
    assert shown == [
        (first, 0),
        (second, 0),
        (first, 1),
        (first, 2),
    ]  # two, and the rest of the one whose rewards differ
    assert (lines[0]["group_rewards"], lines[0]["group_advantages"]) == ([1.0, 0.0, 0.5], [1.0, None, 0.1])
    assert lines[0]["tokens"] == {"characters": [17, 3], "cost": [10, 20], "versions": [[6, 1], [7, 1]]}
    assert len(json.dumps(lines[0]["tokens"])) < 90


def test_every_trained_group_leaves_its_pass_rate_and_a_resume_removes_what_it_repeats(tmp_path: Path) -> None:
    logger = RunLogger(tmp_path, LoggerCfg(), num_steps=2)
    logger.log_rollouts("train", 1, [make_group(0, [1.0, 0.5]), make_group(1, [None, None])], LocalStore(), limit=1)
    logger.log_rollouts("train", 2, [make_group(0, [1.0, None])], LocalStore(), limit=1)
    logger.log_rollouts("val", 2, [make_group(2, [1.0])], LocalStore(), limit=1)
    logger.close()
    file = tmp_path / "pass_rates.jsonl"
    lines = lines_of(file)
    shown = [(line["step"], line["line"], line["pass_rate"], line["mean_reward"], line["num_scored"]) for line in lines]
    assert shown == [(1, 1, 0.5, 0.75, 2), (1, 2, None, None, 0), (2, 1, 1.0, 1.0, 1)]
    assert read_pass_rates(file) == {lines[0]["row_id"]: 1.0}  # the last line of a row counts
    with file.open("a") as cut:
        cut.write('{"row_id": "x", "pass_')
    assert read_pass_rates(file) == {lines[0]["row_id"]: 1.0}
    again = RunLogger(tmp_path, LoggerCfg(), num_steps=2)
    again.resume(1)
    again.close()
    assert [line["step"] for line in lines_of(file)] == [1, 1]


def test_texts_that_do_not_come_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stalled(LocalStore):
        def get(self, references: Sequence[Any]) -> list[GroupTokens]:
            raise StalledError("the tokens of 1 groups did not come")

    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1)
    for kind in ("train", "val"):
        run.log_rollouts(kind, 1, [make_group(0, [1.0, 0.0])], Stalled(), limit=2)
    run.log_rollouts("train", 2, [make_group(1, [1.0])], LocalStore(), limit=2)
    run.close()
    assert [line["step"] for line in lines_of(tmp_path / "rollouts" / "train.jsonl")] == [2]
    assert [line["step"] for line in lines_of(tmp_path / "pass_rates.jsonl")] == [1, 2]
    assert caplog.messages == ["step 1: rollouts are not logged: the tokens of 1 groups did not come"] * 2


def test_validation_samples_are_printed_when_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunLogger(tmp_path, LoggerCfg(num_val_samples_to_print=2), num_steps=1)
    groups = [make_group(row, [0.5]) for row in range(3)]
    with caplog.at_level("INFO"):
        run.log_rollouts("train", 7, groups, LocalStore(), limit=3)
        assert not caplog.messages
        run.log_rollouts("val", 7, groups, LocalStore(), limit=3)
    run.close()
    assert len(caplog.messages) == 2
    assert caplog.messages[1] == (
        "validation at step 7, math, reward 0.5: row 1 member 0\n2+2?\n<think>\u2028</think> 4 \\ud800"
    )


def test_picked_rollouts_alternate_agents_and_prompts_and_keep_some_failures() -> None:
    groups = [
        make_group(2, [1.0, 0.0]),
        make_group(0, [0.0, 1.0]),
        make_group(5, [1.0, None, None, None], agent="aime"),
    ]
    reasons = [group.rollouts[member].reason for group, member in pick_rollouts(groups, 3)]
    assert reasons == ["row 5 member 0", "row 0 member 0", "row 2 member 0"]
    reasons = [group.rollouts[member].reason for group, member in pick_rollouts(groups, 7)]
    assert reasons[0] == "row 5 member 1"  # a quarter, rounded down, is kept for those without a verdict
    assert len(set(reasons)) == 7
    assert len(pick_rollouts(groups, 100)) == 8


def test_a_failing_write_reaches_the_loop(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1)
    run.log(step_metrics(1, 0.0))
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        run.close()


def test_close_names_what_a_stuck_disk_did_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1)
    monkeypatch.setattr(run, "_write_metrics", lambda *args: release.wait(20))
    for step in range(3):
        run.log(step_metrics(step, 0.0))
    with pytest.raises(StalledError, match="log records not written"):
        run.close(deadline_seconds=0.2)
    release.set()


def test_a_full_queue_makes_the_loop_wait_then_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "QUEUE_SIZE", 2)
    monkeypatch.setattr(log, "ENQUEUE_SECONDS", 0.1)
    release = threading.Event()
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=1)
    monkeypatch.setattr(run, "_write_metrics", lambda *args: release.wait(20))
    with pytest.raises(StalledError, match="2 log records wait"):
        for step in range(4):
            run.log(step_metrics(step, 0.0))
    release.set()
    run.close()


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunLogger(tmp_path, LoggerCfg(tensorboard_enabled=True), num_steps=4)
    for step in (1, 2, 3):
        run.log(step_metrics(step, step / 4))
    run.close()
    again = RunLogger(tmp_path, LoggerCfg(tensorboard_enabled=True), num_steps=4)
    again.resume(2)
    again.log(step_metrics(3, 9.0))
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5), (3, 9.0)]


def test_wandb_that_is_not_installed_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logger\.wandb_enabled: it is true, but .*make setup"):
        RunLogger(tmp_path, LoggerCfg(wandb_enabled=True), num_steps=1)


class Projects:
    """W&B as it is met: a run is continued by its id, and a step that it has had already is not taken again."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}

    def init(self, *, id: str, resume: str, **_options: object) -> Any:
        run = self.runs.setdefault(id, {})

        def log(scalars: dict[str, float], step: int) -> None:
            if step >= max(run, default=0):
                run[step] = run.get(step, {}) | scalars

        assert resume == "allow"
        return SimpleNamespace(log=log, finish=lambda: None)


def test_wandb_has_each_step_as_it_was_trained_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projects = Projects()
    monkeypatch.setitem(sys.modules, "wandb", projects)  # type: ignore[arg-type]

    def train(place: Path, after: int, steps: Sequence[int], reward: float) -> dict[int, float]:
        run = RunLogger(place, LoggerCfg(wandb_enabled=True), num_steps=9)
        run.resume(after)
        for step in steps:
            run.log(step_metrics(step, reward))
        run.close()
        newest = list(projects.runs.values())[-1]
        return {step: scalars["train/reward"] for step, scalars in newest.items()}

    one, other = tmp_path / "mine" / "stage1", tmp_path / "yours" / "stage1"
    assert train(one, 0, [0, 1, 2], 0.1) == {0: 0.1, 1: 0.1, 2: 0.1}
    assert train(one, 2, [3, 4], 0.2) == {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.2, 4: 0.2}  # nothing lost: the same run
    assert len(projects.runs) == 1
    assert train(one, 3, [4, 5], 0.3) == {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.2, 4: 0.3, 5: 0.3}  # step 4 was lost
    assert len(projects.runs) == 2
    assert train(one, 0, [1], 0.4) == {1: 0.4}  # its checkpoints are gone
    assert train(other, 0, [1], 0.5) == {1: 0.5}  # of the same name, in the same project
    assert len(projects.runs) == 4


class Copy:
    """Takes numbers as W&B does, until the step in which it fails; ends only when it may."""

    def __init__(self, fails_in: int) -> None:
        self.fails_in, self.steps, self.may_end = fails_in, list[int](), threading.Event()

    def init(self, **_options: object) -> Copy:
        if not self.fails_in:
            raise ConnectionError("the server is away")
        return self

    def log(self, _scalars: dict[str, float], step: int) -> None:
        if step == self.fails_in:
            raise ConnectionError("the server is away")
        self.steps.append(step)

    def finish(self) -> None:
        self.may_end.wait(20)


@pytest.mark.parametrize(("fails_in", "copied"), [(0, []), (2, [1])])
def test_a_copy_of_the_numbers_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails_in: int, copied: list[int]
) -> None:
    copy = Copy(fails_in)
    monkeypatch.setitem(sys.modules, "wandb", copy)  # type: ignore[arg-type]
    run = RunLogger(tmp_path, LoggerCfg(wandb_enabled=True), num_steps=3)
    for step in (1, 2, 3):
        run.log(step_metrics(step, 0.0))
        run.flush()
    run.close()
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert copy.steps == copied
    assert [entry.message for entry in caplog.records if "W&B" in entry.message and "server is away" in entry.message]


def test_a_copy_that_does_not_end_fails_no_run_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Copy(fails_in=9)
    monkeypatch.setitem(sys.modules, "wandb", copy)  # type: ignore[arg-type]
    run = RunLogger(tmp_path, LoggerCfg(wandb_enabled=True), num_steps=1)
    run.log(step_metrics(1, 0.0))
    run.close(deadline_seconds=0.5)
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1
    assert "W&B did not end within 0.5 s; metrics.jsonl is complete" in caplog.text
    copy.may_end.set()


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_prometheus_reads_the_newest_value_of_each_number(tmp_path: Path) -> None:
    port = free_port()
    cfg = LoggerCfg(prometheus_address=f"127.0.0.1:{port}")
    run = RunLogger(tmp_path, cfg, num_steps=2)
    run.resume(0)  # before the engines start
    assert scraped(port) == {}
    for step, more in ((1, {"validation/a-b/accuracy": 0.5}), (2, {"train/loss": math.nan})):
        metrics = step_metrics(step, step / 4)
        metrics.add(more, prefix="")
        run.log(metrics)
        run.flush()
    while scraped(port).get("super_rl_step") != 2:  # the file is written first
        time.sleep(0.01)
    assert scraped(port) == {
        "super_rl_step": 2, "super_rl_train_reward": 0.5, "super_rl_validation_a_b_accuracy": 0.5
    }  # fmt: skip
    other = RunLogger(tmp_path / "other", cfg, num_steps=2)
    with pytest.raises(ConfigError, match=rf"prometheus_address: cannot listen at 127.0.0.1:{port}: .*choose another"):
        other.resume(0)
    run.close()
    again = RunLogger(tmp_path / "again", cfg, num_steps=2)
    again.resume(0)  # the port is free again
    again.close()


def test_the_dashboard_asks_only_for_numbers_that_a_run_has() -> None:
    dashboard = (Path(log.__file__).parents[2] / "tools/look/grafana.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"super_rl_(\w+)", dashboard)) - {"step"}
    statuses = {f"train_rollout_status_{status.value}" for status in RolloutStatus}
    assert statuses <= asked
    sources = [path.read_text(encoding="utf-8") for path in Path(log.__file__).parents[1].rglob("*.py")]
    named = set(re.findall(r"[\w/]+", " ".join(text.replace('"', " ") for text in sources)))
    known = {name.replace("/", "_") for name in named}
    prefixes = ("timing_train_", "train_", "validation_", "performance_", "idle_")
    assert not [
        name
        for name in asked - statuses
        if name not in known and not any(name.startswith(p) and name.removeprefix(p) in known for p in prefixes)
    ]


def test_progress_line_reads_left_to_right_and_aligns() -> None:
    metrics = StepMetrics(7)
    metrics.add({"reward": 0.4125, "avg_trajectory_age": 1.0, "max_trajectory_age": 1.0})
    metrics.add({"logprob_error_max": 1.2e-6, "token_mult_prob_error": 1.0000025})
    metrics.add({"generation_tokens_per_sec": 1234.4}, prefix="performance/")
    seconds = {"total_step_time": 5.31, "policy_training": 2.4, "exposed_generation": 2.5, "data_processing": 0.001}
    metrics.add(seconds, prefix="timing/train/")
    line = progress_line(metrics, 120)
    assert line == (
        "step   7/120 | reward  0.412 | tok/s   1234 | age 1.0 max 1 | mismatch max 1.2e-06 mean 2.5e-06"
        " |   5.31 s = wait 2.50 train 2.40"
    )
    assert validation_line(metrics) == ""


def test_progress_line_names_paused_environments_and_lost_engines() -> None:
    metrics = StepMetrics(7)
    metrics.add({"code/paused_seconds": 12.0, "art/paused_seconds": 1.0, "math/no_verdict_share": 0.25})
    metrics.add({"num_engines_alive": 3.0, "num_engines": 4.0}, prefix="performance/")
    assert progress_line(metrics, 9) == "step 7/9 | engines 3 of 4 | paused art, code"
    metrics = StepMetrics(7)
    metrics.add({"num_engines_alive": 4.0, "num_engines": 4.0}, prefix="performance/")
    assert progress_line(metrics, 9) == "step 7/9"


def test_validation_has_its_own_line_per_agent() -> None:
    metrics = StepMetrics(0)
    values = {"accuracy": 0.3125, "greedy_accuracy": 0.25, "mcqa/accuracy": 0.5, "math/accuracy": 0.125}
    metrics.add({**values, "math/greedy_accuracy": 0.0, "avg_length": 12.0}, prefix="validation/")
    metrics.add({"validation": 2.0}, prefix="timing/train/")
    assert progress_line(metrics, 40) == "step  0/40 | val 0.312 | greedy 0.250 |   2.00 s = val 2.00"
    assert validation_line(metrics) == "validation at step 0: math 0.125 greedy 0.000 | mcqa 0.500"


def test_flush_returns_when_everything_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, on_disk = os.fsync, dict[Path, bytes]()

    def note(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        on_disk[path] = b"" if path.is_dir() else path.read_bytes()

    monkeypatch.setattr(os, "fsync", note)
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=100)
    for step in range(1, 101):
        run.log(step_metrics(step, 0.0))
    run.flush()
    assert on_disk[tmp_path / "metrics.jsonl"].count(b"\n") == 100
    assert tmp_path in on_disk, "a power cut would lose the name"
    run.close()


def test_flush_ends_at_once_when_a_record_before_it_was_not_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=100)
    run._put(lambda: time.sleep(0.5))  # so that flush is called before the error is there
    run.log(step_metrics(1, 0.0))
    start = time.monotonic()
    with pytest.raises(RunError, match="No space left"):
        run.flush(deadline_seconds=60)
    assert time.monotonic() - start < 30
    with pytest.raises(RunError):
        run.close()


def test_a_step_whose_groups_all_scored_alike_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunLogger(tmp_path, LoggerCfg(), num_steps=9)
    for step, alike in enumerate([*[4.0] * 7, 1.0, 4.0], 1):
        metrics = StepMetrics(step)
        metrics.add({"num_groups": 4.0, "num_groups_zero_variance": alike, "total_reward/max": 0.0})
        run.show(metrics)
    said = [record.getMessage() for record in caplog.records if "scored alike" in record.getMessage()]
    assert [text.split(":")[0] for text in said] == ["step 1", "step 2", "step 4", "step 9"], "a line per step is noise"
    assert said[0].startswith("step 1: 4 of 4 groups scored alike: no gradient; take easier rows")
    assert said[2].endswith("(4 in a row)")
