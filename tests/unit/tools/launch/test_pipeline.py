"""Order of the stages, when a run counts as finished, and how a stage on this machine gets signals and gives status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from recipes.errors import LaunchError
from tools.draft.launch import chosen_stages, read_launch
from tools.launch.pipeline import left_out, say
from tools.launch.sequence import is_finished, make_links, run_forwarding, variable


def test_stages_come_in_the_order_of_the_table_each_once():
    assert [stage.id for stage in chosen_stages(["swe1", "stage1.2", "rlvr2"])] == ["stage1.2", "stage2.1"]
    assert len(chosen_stages([])) == 7
    with pytest.raises(LaunchError) as wrong:
        chosen_stages(["stage1.1", "stage1.7", "x"])
    assert [problem.got for problem in wrong.value.problems] == ["stage1.7", "x"]


def test_start_weights_of_a_pending_stage_are_checked_with_those_of_the_first(tmp_path):
    environ = {"SCALE": "tiny", "LAUNCHER": "local", "RESULTS_DIR": str(tmp_path), "MODEL_PATH": "/sft"}
    first, second, third = make_links(chosen_stages(["rlvr1", "rlvr2", "rlvr3"]), ["grpo.max_num_steps=2"], environ)
    assert [link.is_pending for link in (first, second, third)] == [False, True, True]
    assert third.launch.contract["MODEL_PATH"] == f"{tmp_path}/stage1.2-rlvr2-tiny/checkpoints/latest/hf"
    assert third.checked.contract["MODEL_PATH"] == "/sft"
    assert third.checked.config.grpo.max_num_steps == 2


def test_stage_whose_parents_are_not_in_the_pipeline_has_start_weights(tmp_path):
    environ = {"SCALE": "tiny", "LAUNCHER": "local", "RESULTS_DIR": str(tmp_path)}
    [only] = make_links(chosen_stages(["rlvr3"]), [], environ)
    assert only.parent is None
    assert only.launch.contract["MODEL_PATH"] == f"{tmp_path}/stage1.2-rlvr2-tiny/checkpoints/latest/hf"
    assert only.export == tmp_path / "stage1.3-rlvr3-tiny" / "checkpoints" / "latest" / "hf"


def test_stage_whose_parent_is_left_out_starts_from_the_nearest_one_that_runs(tmp_path, capsys):
    environ = {"SCALE": "tiny", "LAUNCHER": "local", "RESULTS_DIR": str(tmp_path), "MODEL_PATH": "/sft"}
    first, second, third = links = make_links(chosen_stages(["rlvr1", "swe1", "rlhf"]), [], environ)
    assert (second.parent, third.parent) == (first, second)
    assert third.launch.contract["MODEL_PATH"] == f"{tmp_path}/stage2.1-swe1-tiny/checkpoints/latest/hf"
    say(left_out(links))
    assert "stage3: it starts from stage2.1; stage2.2 is not in STAGES" in capsys.readouterr().err
    assert not list(left_out(links[:1]))


WIDE, HEADS, STUDENT, TOOLS = (f"tiny-{name}-sft" for name in ("wide", "nemotron-h-heads", "nemotron-h", "tools"))


@pytest.mark.parametrize(
    ("names", "variables", "starts"),
    [
        ("stage1.1 stage1.2", {}, [STUDENT, "stage1.1"]),
        ("stage1.1 stage2.1", {}, [WIDE, "stage1.1"]),  # only the wide warm-up has seen stage 2.1's tasks
        ("stage1.1 stage3 stage4 mopd nano-rl nano-dpo", {}, [WIDE, "stage1.1", HEADS, STUDENT, TOOLS, "nano-rl"]),
        ("stage1.1 stage4", {"MODEL_PATH": "/with/heads"}, ["heads", "stage1.1"]),  # the user's model may have all
        ("stage4", {"EXP_NAME": "mine"}, [HEADS]),
    ],
)
def test_a_tiny_chain_gives_each_stage_a_model_that_can_do_it(tmp_path, names, variables, starts):
    environ = {"SCALE": "tiny", "LAUNCHER": "local", "RESULTS_DIR": str(tmp_path), **variables}
    links = make_links(chosen_stages(names.split()), [], environ)
    for start, link in zip(starts, links, strict=True):
        model = Path(link.launch.contract["MODEL_PATH"])
        if link.parent is None:
            assert model.name == start
        else:
            assert link.parent.stage.id == start and model.is_relative_to(tmp_path)
    apart = [link.stage.id for link in links[1:] if link.parent is None and link.stage.id == "stage4"]
    assert [line.partition(":")[0] for line in left_out(links) if "which has what it trains" in line] == apart


@pytest.mark.parametrize(
    ("state", "trained", "is_complete", "expected"),
    [
        ("done", 5, True, True),
        ("stopped", 5, True, False),  # saved early
        ("running", 5, True, False),
        ("done", 3, True, False),  # more steps are asked for now
        ("done", 5, False, False),
    ],
)
def test_run_is_finished_when_its_driver_said_so_for_these_steps(tmp_path, state, trained, is_complete, expected):
    launch = read_launch("rlvr1", ["grpo.max_num_steps=5"], {"SCALE": "tiny", "LAUNCHER": "local"})
    assert not is_finished(tmp_path, launch)
    step = tmp_path / "checkpoints" / "step_000005"
    step.mkdir(parents=True)
    if is_complete:
        (step / "COMPLETE").write_text("{}", encoding="utf-8")
    (tmp_path / "status.json").write_text(json.dumps({"state": state}), encoding="utf-8")
    (tmp_path / "resolved.json").write_text(
        json.dumps({"config": {"grpo": {"max_num_steps": trained}}}), encoding="utf-8"
    )
    assert is_finished(tmp_path, launch) == expected
    (tmp_path / "status.json").write_text("", encoding="utf-8")  # cut
    assert not is_finished(tmp_path, launch)


def test_names_of_shell_variables():
    assert variable("stage1.1") == "stage1_1"
    assert variable("nano-rl") == "nano_rl"


def test_a_pipeline_without_names_is_that_of_the_first_stage():
    chains = [[stage.id for stage in chosen_stages(names)] for names in ([], ["nano-rl", "stage3"])]
    assert chains == [
        [f"stage{number}" for number in ("1.1", "1.2", "1.3", "2.1", "2.2", "3", "4")],
        ["stage3", "nano-rl"],
    ]


def test_status_is_the_programs():
    assert run_forwarding(["bash", "-c", "exit 75"], os.environ) == 75
    assert run_forwarding(["bash", "-c", "kill -KILL $$"], os.environ) == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_the_program_which_decides(number, tmp_path):
    ready = tmp_path / "ready"
    program = f"trap 'exit 75' TERM INT; touch {ready}; for ((i = 0; i < 600; i++)); do sleep 0.05; done"

    def send() -> None:
        end = time.monotonic() + 20
        while not ready.exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    # A shell cannot trap what was ignored when it started, as INT is in the background of another shell.
    assert run_forwarding(["env", f"--default-signal={number.name[3:]}", "bash", "-c", program], os.environ) == 75
    sender.join()
    assert signal.getsignal(number) is before


def test_program_gets_term_when_this_process_is_killed(tmp_path):
    mark, ready = tmp_path / "got_term", tmp_path / "ready"
    program = f"trap 'touch {mark}; exit' TERM; touch {ready}; for ((i = 0; i < 600; i++)); do sleep 0.05; done"
    code = (
        f"import os; from tools.launch.sequence import run_forwarding as r; r(['bash', '-c', {program!r}], os.environ)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_for(ready)
        parent.kill()
    wait_for(mark)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.02)
