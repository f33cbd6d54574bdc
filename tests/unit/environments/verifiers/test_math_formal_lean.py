"""Proofs in Lean: every recorded case, what each end of a compilation earns, and corrections by the agent."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.agents.conversation import corrected
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.contract.verifier import Execution, Verdict, advance, message_item
from recipes.environments.environments import Environments
from recipes.environments.verifiers.checks.lean import errors_in, feedback, proof_part, status_of, whole_proof
from recipes.environments.verifiers.math_formal_lean import VERIFIER
from recipes.types import Completion, Rollout, RolloutStatus, VersionSpan
from tests.configuration import environments as env_block
from tests.recorded import env_cases, recorded

ROW = {
    "header": "import Mathlib\n\n",
    "formal_statement": "theorem t : 1 = 1 := by\n",
    "responses_create_params": {"input": "Prove it.", "metadata": {"a": "b"}, "tools": []},
    "agent_ref": {"name": "math_formal_lean_refinement_agent"},
}
RIGHT = {"process_status": "completed", "stdout": "", "stderr": ""}
NO_AXIOM = "'t' does not depend on any axioms"
WRONG = {"process_status": "failed", "stdout": "", "stderr": "/lean4/my_project/x.lean:4:2: error: unsolved goals\n"}


@pytest.mark.parametrize("case", env_cases("lean_proof_assembly", "cases"))
def test_the_file_to_compile(case: dict[str, str]) -> None:
    assert whole_proof(case["generation"], case["header"], case["formal_statement"]) == case["proof"]


@pytest.mark.parametrize("case", env_cases("lean_proof_assembly", "status"))
def test_status(case: dict[str, Any]) -> None:
    assert status_of(case["compiler_output"]) == case["status"]


@pytest.mark.parametrize("case", env_cases("lean_proof_assembly", "feedback"))
def test_feedback(case: dict[str, Any]) -> None:
    assert feedback(case["compiler_output"], case["code"]) == case["feedback"]
    for error, parsed in zip(errors_in(case["compiler_output"]["stderr"]), case.get("parsed", ()), strict=False):
        assert (error.line, error.column, error.text) == (*parsed["pos"].values(), parsed["data"])


def test_every_real_row_is_read() -> None:
    for name in ("math_formal_lean", "math_formal_lean__minif2f_test"):
        path: Path = recorded("GYM_EXAMPLES_DIR", "gym_examples") / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines
        for line in lines:
            assert VERIFIER.parse_task(json.loads(line), VERIFIER.settings()).statement.rstrip().endswith(":= by")


def to_its_end(execution: Execution, axioms: str = NO_AXIOM) -> str:
    """Return what the compiler prints for the commands after a proof."""
    first, last = re.findall('#print "([0-9a-f]{32})"', execution.code)
    return f"{first}\n{axioms}\n{last}\n"


def scored(text: str, *replies: dict[str, Any]) -> Verdict | list[Any]:
    response = {"output": [message_item(text)]}
    return advance(
        VERIFIER.score(response, VERIFIER.parse_task(ROW, VERIFIER.settings())), [[reply] for reply in replies]
    )


def verdict_of(text: str, *replies: dict[str, Any]) -> Verdict:
    verdict = scored(text, *replies)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize("sign", ["\v", "\f", "\x1c", "\x1e", "\x85", "\u2028", "\u2029"])
def test_only_what_ends_a_line_of_lean_ends_one(sign: str) -> None:
    assert proof_part(f"theorem t : 1 = 1 := by\r\n  -- a{sign}b\r\n  rfl") == f"  -- a{sign}b\n  rfl"


def test_only_the_proof_of_an_answer_is_compiled() -> None:
    (execution,) = scored("```lean4\naxiom no : False\ntheorem t : 1 = 2 := by\n  exact no.elim\n```")  # type: ignore[misc]
    assert isinstance(execution, Execution)
    code = "import Mathlib\n\ntheorem t : 1 = 1 := by\n  exact no.elim"
    report = '#print "[0-9a-f]{32}"\n\n#print axioms _root_.t\n\n#print "[0-9a-f]{32}"\n'
    assert re.fullmatch(re.escape(f"{code}\n\n") + report, execution.code)
    assert (execution.language, execution.seconds) == ("lean4", 30.0)


@pytest.mark.parametrize(
    ("reply", "reward", "status"),
    [
        (RIGHT, 1.0, "completed"),
        (WRONG, 0.0, "failed"),
        ({"process_status": "timeout"}, 0.0, "timeout"),
        ({**RIGHT, "stdout": "x.lean:3:0: warning: declaration uses 'sorry'"}, 0.0, "has_sorry"),
        ({**RIGHT, "stdout": "a" * 200_000 + "<output cut>"}, 0.0, "failed"),  # the warning may be what was cut away
        ({**RIGHT, "stdout": "a" * 100_000 + "declaration uses 'sorry'"}, 0.0, "has_sorry"),
    ],
)
def test_reward(reply: dict[str, Any], reward: float, status: str) -> None:
    (execution,) = scored("```lean4\nrfl\n```")  # type: ignore[misc]
    printed = to_its_end(execution) if reply["process_status"] == "completed" else ""
    verdict = verdict_of("```lean4\nrfl\n```", {**reply, "stdout": printed + reply.get("stdout", "")})
    assert (verdict.reward, verdict.details["proof_status"]) == (reward, status)
    assert ("correction_prompt" in verdict.details) is (reward == 0.0)
    assert len(verdict.details.get("error_feedback") or "") < 3000


@pytest.mark.parametrize(
    ("axioms", "reward"),
    [
        (NO_AXIOM, 1.0),
        ("'t' depends on axioms: [propext,\n Classical.choice,\n Quot.sound]", 1.0),
        ("'t' depends on axioms: [propext, Lean.ofReduceBool]", 0.0),
        ("'t' depends on axioms: [sorryAx]", 0.0),
        ("", 0.0),
    ],
)
def test_a_theorem_uses_no_axiom_of_its_own(axioms: str, reward: float) -> None:
    (execution,) = scored("rfl")  # type: ignore[misc]
    assert verdict_of("rfl", {**RIGHT, "stdout": to_its_end(execution, axioms)}).reward == reward


def test_a_file_that_is_not_compiled_to_its_end_earns_nothing() -> None:
    (execution,) = scored("rfl")  # type: ignore[misc]
    (other,) = scored("exact rfl")  # type: ignore[misc]
    report = to_its_end(execution)
    for printed in ("", NO_AXIOM, to_its_end(other), report.split("\n")[0] + NO_AXIOM, report.split("\n")[-2]):
        verdict = verdict_of("rfl", {**RIGHT, "stdout": printed})
        assert (verdict.reward, verdict.details["proof_status"]) == (0.0, "failed")
        assert "did not come to the end" in str(verdict.details["error_feedback"])


@pytest.mark.parametrize(
    "proof",
    [
        "run_tac do (IO.Process.exit 0 : IO Unit)",
        "sorry\n#eval IO.Process.exit 0",
        "sorry\n#eval! x",
        "sorry\nopen Nat -- a, b:\n  «IO»\n#x Process.exit 0",
        "sorry\nnamespace Lean\nx",
        'sorry\nmacro "#print" : command => x',
        'simp [include_str "a"]',
        "sorry\ndef f : Lean.Elab.Tactic.TacticM Unit := g",
        "simp -- a comment\n#eval x -- another",
        'have : "--" = "--" := rfl; run_tac x',
        'notation "a--" => 1\ntheorem u : a-- = 1 := rfl #eval x',
        "exact «--».elim #eval x",
        "/- -- -/ #eval x",
        "/-\n--\n-/ #eval x",
    ],
)
def test_a_proof_that_runs_code_of_its_own_is_not_compiled(proof: str) -> None:
    verdict = verdict_of(f"```lean4\n{proof}\n```")
    assert verdict.reward == 0.0
    assert "must not run code of its own" in str(verdict.details["error_feedback"])


@pytest.mark.parametrize(
    "proof",
    [
        *("-- In Lean 4 this is simple. IO is a line.\nrfl", "open Nat in simp", "nlinarith [h]"),
        "simp -- initialize the sum; this is an unsafe step of a macro",
        "-- the set is open\n-- Lean, or a System of equations, needs a hint: see Meta.x\nrfl",
    ],
)
def test_a_proof_without_code_of_its_own_is_compiled(proof: str) -> None:
    assert not isinstance(scored(f"```lean4\n{proof}\n```"), Verdict)


@pytest.mark.parametrize("reply", [{}, {"process_status": "error", "stderr": "Sandbox 502 error"}])
def test_a_sandbox_that_does_not_compile_gives_no_verdict(reply: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="the sandbox did not compile"):
        scored("rfl", reply)


@pytest.mark.parametrize("text", ["set_option warn.sorry false in sorry", "set_option debug.«skipKernelTC» true in x"])
def test_a_proof_that_turns_a_check_off_is_not_compiled(text: str) -> None:
    assert verdict_of(text).details["proof_status"] == "failed"


def test_an_empty_answer_is_not_compiled_and_can_be_corrected() -> None:
    verdict = verdict_of(" \n")
    assert (verdict.reward, verdict.details["proof_status"]) == (0.0, "empty_generation")
    assert "empty" in str(verdict.details["correction_prompt"])


def test_a_correction_shows_the_attempt_and_its_errors() -> None:
    prompt = str(verdict_of("my {error_message} attempt", WRONG).details["correction_prompt"])
    assert "my {error_message} attempt" in prompt  # what an answer says is no place to fill
    assert "Error Message: unsolved goals" in prompt


class Compiler:
    """A sandbox in which the proof `rfl` compiles."""

    async def run(self, executions: Sequence[Execution]) -> list[dict[str, Any]]:
        return [
            {**RIGHT, "stdout": to_its_end(execution)} if "\nrfl\n" in execution.code else WRONG
            for execution in executions
        ]


class Scripted:
    """A policy that says one text per call, and keeps its prompts."""

    max_model_len = 5000

    def __init__(self, codec: ChatCodec, *says: str) -> None:
        self.codec, self.says, self.prompts = codec, list(says), []

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        self.prompts.append(self.codec._tokenizer.decode(list(prompt_token_ids), skip_special_tokens=False))
        ids = self.codec._tokenize(f"so</think>{self.says.pop(0)}<|im_end|>")
        span = VersionSpan(version=0, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(span,), finish_reason="stop")


async def proven(codec: ChatCodec, *says: str, corrections: int | None = None) -> tuple[Rollout, Scripted]:
    agent = {"max_correction_turns": corrections, "resources_server": {"name": "math_formal_lean"}}
    configured = {"math_formal_lean_refinement_agent": {"responses_api_agents": {"proof_refinement_agent": agent}}}
    patterns: dict[str, Any] = {"invalid_tool_call_patterns": (), "thinking_tags": ()}
    instances = {} if corrections is None else configured
    config = env_block(instances=instances, **patterns)
    environments, policy = Environments.from_config(config, codec), Scripted(codec, *says)
    object.__setattr__(environments._clients["math_formal_lean"], "sandbox", Compiler())
    rollout = await environments.run(ROW, policy, max_tokens=500)
    environments.close()
    return rollout, policy


async def test_a_correction_is_a_conversation_of_its_own(codec: ChatCodec) -> None:
    rollout, policy = await proven(codec, "no", "rfl")
    assert (rollout.status, rollout.reward, rollout.metrics["num_attempts"]) == (RolloutStatus.COMPLETED, 1.0, 2.0)
    assert "Prove it." not in policy.prompts[1]
    assert "unsolved goals" in policy.prompts[1]
    (turn,) = rollout.turns  # only the last attempt is trained
    assert codec._tokenizer.decode(list(turn.prompt_token_ids), skip_special_tokens=False) == policy.prompts[1]


@pytest.mark.parametrize(("corrections", "calls"), [(None, 3), (2, 3), (0, 1)])
async def test_corrections_end(codec: ChatCodec, corrections: int | None, calls: int) -> None:
    rollout, policy = await proven(codec, *["no"] * 5, corrections=corrections)
    assert (rollout.reward, len(policy.prompts)) == (0.0, calls)


async def test_an_attempt_stands_whose_correction_leaves_no_room(codec: ChatCodec) -> None:
    rollout, policy = await proven(codec, "no", f"no {'and ' * 8000}", "rfl")
    assert (rollout.status, rollout.reward, rollout.metrics["num_attempts"]) == (RolloutStatus.COMPLETED, 0.0, 2.0)
    assert len(policy.prompts) == 2 and len(rollout.turns) == 1


def test_a_correction_keeps_the_rows_sampling_only() -> None:
    assert corrected({**ROW["responses_create_params"], "top_p": 1.0}, "p") == {  # type: ignore[dict-item]
        "metadata": {"a": "b"},
        "top_p": 1.0,
        "input": [{"role": "user", "content": "p"}],
    }
