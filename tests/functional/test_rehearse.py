"""A rehearsal of stage 1.1 with Super at full size: nothing is found as it is, and each planted fault is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from speed import patiently

from tests.weight_headers import header_alone
from tools.dev import rehearse
from tools.sizing import planner
from tools.sizing.architecture import SUPER_CONFIG

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
STAGE = ["--stage", "stage1.1", "--scale", "small"]
Built = tuple[planner.StagePlan, rehearse.BuiltPolicy, rehearse.BuiltEngine]


@pytest.fixture(scope="module")
def built() -> Built:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MODEL_PATH", raising=False)
        plan = planner.make_plan(planner.parse(STAGE))
        return plan, *rehearse.built(plan)


def codes(found: Built) -> list[tuple[str, str]]:
    return [(one.code, str(one.problem)) for one in rehearse.model_findings(*found)]


def test_super_is_built_whole_and_as_large_as_planned(built: Built) -> None:
    plan, policy, engine = built
    assert codes(built) == []
    assert len(policy.full) == 42_683 and policy.num_compared == 41_643  # its heads are in no class of transformers
    assert [one.rank for one in policy.ranks] == [0, 3, 15, 63]
    assert plan.trainer.weights == pytest.approx(max(one.num_bytes for one in policy.ranks), rel=0.01)
    assert plan.engine.weights == pytest.approx(engine.num_bytes, rel=0.01)


def test_a_tensor_too_few_and_one_of_another_shape_are_found(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, policy, _ = built
    shapes = {name: shape for name, _, shape in policy.full}
    lost, wrong = "backbone.layers.1.mixer.experts.511.up_proj.weight", "backbone.layers.0.mixer.in_proj.weight"
    del shapes[lost]
    shapes[wrong] = (shapes[wrong][0] - 1, *shapes[wrong][1:])
    (tmp_path / "config.json").write_text(json.dumps(dict(SUPER_CONFIG)), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(header_alone(shapes))
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    found = codes((plan, *rehearse.built(plan)))
    assert [code for code, _ in found] == ["MDL011", "MDL011"]
    assert lost in found[0][1] and wrong in found[1][1]


def test_an_engine_refuses_a_wrong_push(built: Built, tmp_path: Path) -> None:
    plan, policy, _ = built
    (tmp_path / "config.json").write_text(json.dumps(dict(SUPER_CONFIG)), encoding="utf-8")

    def pushed(tensors: list[tuple[str, str, tuple[int, ...]]]) -> list[tuple[str, str]]:
        loaded = rehearse.in_own_process(rehearse.load_engine, plan.config.policy.generation, tmp_path, tensors)
        return codes((plan, policy, loaded))

    lost = "backbone.layers.0.mixer.A_log"
    [(code, text)] = pushed([one for one in policy.full if one[0] != lost])
    assert code == "MDL013" and "layers.0.mixer.A" in text
    [(code, text)] = pushed(
        [(n, d, (*s[:-1], s[-1] + 8) if n.endswith(".0.mixer.in_proj.weight") else s) for n, d, s in policy.full]
    )
    assert code == "MDL013" and "refuses the push" in text


def test_what_does_not_fit_a_gpu_is_found(built: Built) -> None:
    plan, policy, engine = built
    [(code, text)] = codes((replace(plan, gpu_bytes=64 * 2.0**30), policy, engine))
    assert code == "MDL014" and "policy worker" in text


def test_the_command_finds_nothing_wrong_with_a_stage_and_too_few_nodes_of_another(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key not in ("MODEL_PATH", "SCALE")}
    command = [sys.executable, "-m", "tools.dev.rehearse", *STAGE]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env | {"SBATCH_NUM_NODES": "20"},
        capture_output=True,
        text=True,
        timeout=patiently(400),
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "all nodes join: goes on with 27" in done.stdout
    assert "another one all of them: begins with" in done.stdout or "another one all of them: given up" in done.stdout
    assert "WRONG" not in done.stdout and "DIFFER" not in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ALC001") and "20" in last
