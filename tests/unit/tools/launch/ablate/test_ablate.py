"""The command: what it refuses before a run starts, the order of runs, what a failed run costs, and the page."""

from __future__ import annotations

import json
import os
import stat
from html.parser import HTMLParser

import pytest

from recipes.stop import EXIT_RESUME
from tools.launch.ablate import __main__ as ablate
from tools.launch.ablate import variants as ablate_runs
from tools.launch.ablate.page import STEP_SECONDS, STEP_TOKENS, render
from tools.launch.ablate.variants import BASELINE, Variant
from tools.look.report.load import RunData, StepRecord

CISPO = Variant(question="loss", name="CISPO <b>", overrides=("loss_fn.use_cispo=true",))


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A directory of results, and the variables of a tiny local launch."""
    for name in ("EXP_NAME", "CONFIG_PATH", "SEED", "MODEL_PATH", "TRAIN_PATH", "VAL_PATH", "ENV_TOML", "CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SCALE", "tiny")
    monkeypatch.setenv("LAUNCHER", "local")
    monkeypatch.setenv("RESULTS_DIR", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture
def launcher(tmp_path, monkeypatch, results):
    """A launcher that records how it was called, logs one run as the driver does, and ends with a wanted status."""
    program = tmp_path / "super_launch.sh"
    step = json.dumps({"step": 1, "time": 1.0, "train/reward": 0.5, STEP_TOKENS: 10, STEP_SECONDS: 1})
    program.write_text(
        "#!/usr/bin/env bash\n"
        f'printf "%s %s\\n" "$EXP_NAME" "$*" >> {tmp_path}/calls\n'
        'mkdir -p "$RESULTS_DIR/$EXP_NAME"\n'
        f"echo '{step}' > \"$RESULTS_DIR/$EXP_NAME/metrics.jsonl\"\n"
        f'[[ $EXP_NAME != *"$(cat {tmp_path}/failing)"* ]] || exit "$(cat {tmp_path}/status)"\n',
        encoding="utf-8",
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "failing").write_text("nothing", encoding="utf-8")
    monkeypatch.setattr(ablate_runs, "start", lambda run, stage: _call(program, run, stage))
    monkeypatch.setattr(ablate, "start", lambda run, stage: _call(program, run, stage))
    monkeypatch.setattr(ablate, "refusals", lambda _runs, **_: [])
    return tmp_path


def _call(program, run, stage) -> int:
    words = [str(program), stage, *run.overrides]
    return ablate_runs.run_forwarding(words, {**os.environ, **run.variables})


def test_every_variant_runs_with_the_first_seed_before_any_with_the_second(launcher, results, capsys):
    assert ablate.main(["--stage", "stage1.1", "--seeds", "1 2", "--set", "grpo.x=3", "loss_fn.use_cispo=true"]) == 0
    lines = (launcher / "calls").read_text(encoding="utf-8").splitlines()
    assert lines == [
        "ablate-stage1.1-tiny-as-the-stage-seed1 stage1.1 grpo.x=3",
        "ablate-stage1.1-tiny-use-cispo-true-seed1 stage1.1 grpo.x=3 loss_fn.use_cispo=true",
        "ablate-stage1.1-tiny-as-the-stage-seed2 stage1.1 grpo.x=3",
        "ablate-stage1.1-tiny-use-cispo-true-seed2 stage1.1 grpo.x=3 loss_fn.use_cispo=true",
    ]
    page = results / "ablate-stage1.1-tiny.html"
    assert capsys.readouterr().out.splitlines() == [str(page)] * 4
    assert "use_cispo=true" in page.read_text(encoding="utf-8")


def test_a_run_that_fails_costs_only_itself(launcher, capsys):
    (launcher / "failing").write_text("as-the-stage", encoding="utf-8")
    (launcher / "status").write_text("3", encoding="utf-8")
    assert ablate.main(["--stage", "stage1.1", "--seeds", "1", "loss_fn.use_cispo=true"]) == 1
    assert len((launcher / "calls").read_text(encoding="utf-8").splitlines()) == 2
    said = capsys.readouterr().err
    assert "as the stage, seed 1 (1 of 2): ended with status 3" in said
    assert "1 of 2 runs are well" in said


def test_a_stop_is_meant_for_all_runs(launcher):
    (launcher / "failing").write_text("as-the-stage", encoding="utf-8")
    (launcher / "status").write_text(str(EXIT_RESUME), encoding="utf-8")
    assert ablate.main(["--stage", "stage1.1", "--seeds", "1", "loss_fn.use_cispo=true"]) == EXIT_RESUME
    assert len((launcher / "calls").read_text(encoding="utf-8").splitlines()) == 1


def test_a_wrong_variant_is_refused_before_any_run(results, capsys):
    words = ["--stage", "stage1.1", "--seeds", "1", "loss_fn.use_cispoo=true", "grpo.use_dynamic_sampling=7"]
    assert ablate.main(words) == 2
    said = capsys.readouterr().err
    assert "use_cispoo=true: " in said
    assert "did you mean" in said
    assert "use_dynamic_sampling=7: " in said
    assert not results.exists()


def test_a_check_looks_at_the_input_alone(results, capsys):
    """As before `make ablate` trains the SFT checkpoint that the runs start from."""
    words = ["--stage", "stage1.1", "--seeds", "1", "--check"]
    assert ablate.main([*words, "grpo.max_num_step=7"]) == 2
    assert "did you mean grpo.max_num_steps?" in capsys.readouterr().err
    assert ablate.main([*words, "grpo.max_num_steps=7"]) == 0, capsys.readouterr().err
    assert not results.exists()


@pytest.mark.parametrize("seeds", ["", "a", "1 1", "-1", "1.5"])
def test_wrong_seeds_are_refused(seeds, results, capsys):
    assert ablate.main(["--stage", "stage1.1", f"--seeds={seeds}"]) == 2
    assert "SEEDS" in capsys.readouterr().err


def test_a_page_of_nothing_is_refused(results, capsys):
    assert ablate.main(["--stage", "stage1.1", "--page"]) == 2
    assert "none of its runs has done a step" in capsys.readouterr().err


def run_of(after: float, *, num_steps: int = 6) -> RunData:
    records = [StepRecord(step=0, time=0.0, values={"validation/accuracy": 0.25})]
    for step in range(1, num_steps + 1):
        values = {"train/reward": after * step / num_steps, STEP_TOKENS: 1000.0, STEP_SECONDS: 2.0}
        values |= {"validation/accuracy": after} if step == num_steps else {}
        records.append(StepRecord(step=step, time=0.0, values=values))
    return RunData(name="run", records=tuple(records), rollouts={}, resolved={}, lock={}, warnings=())


def test_the_page_compares_seed_by_seed():
    runs = {BASELINE: {1: run_of(0.5), 2: run_of(0.7)}, CISPO: {1: run_of(0.6), 2: run_of(0.9)}}
    page = render("name", runs, num_seeds=2)
    assert "0.6 ± 0.14" in page
    assert "+0.150 (2 of 2)" in page
    assert "6000" in page  # tokens
    assert "12.0 s" in page
    assert page.count('class="limits') == 4  # two curves of reward, against tokens and seconds


def test_the_page_is_whole_whatever_is_missing():
    class Checker(HTMLParser):
        open: list[str]

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "rect", "line", "circle", "path"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            if tag not in ("meta", "rect", "line", "circle", "path"):
                assert self.open.pop() == tag

    unfinished = run_of(0.5, num_steps=1)
    page = render("<i>", {BASELINE: {}, CISPO: {7: unfinished}}, num_seeds=3, notes=["<script>"])
    checker = Checker()
    checker.open = []
    checker.feed(page)
    assert checker.open == []
    assert "CISPO &lt;b&gt;" in page
    assert "<script>" not in page
    assert "<i>" not in page
    assert "not measured" in page
