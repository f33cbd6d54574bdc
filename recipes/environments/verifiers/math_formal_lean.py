"""Statements in Lean 4 to be proven. Reward 1.0 when the compiler accepts the proof without a gap, else 0.0.

`checks/lean.py` says what is taken from an answer and compiled. The compiler runs in the sandbox, where that has Lean:
the image of NeMo-Skills does. A sandbox without Lean, or one that fails, gives no verdict.

A failed proof's verdict carries a prompt that asks to correct it (`correction_prompt`): the agent of refinement
(`agents/conversation.py`) begins a new conversation with it. An answer without text earns 0 and is not compiled; it can
be corrected too. Decided as the reference has it: the word "sorry" anywhere in what the compiler says is a gap.
Decided otherwise: a proof that turns that warning or the kernel's check off, or prints so much that the warning could
be cut away, earns 0. So does one that the compiler does not read to its end, that uses an axiom beyond those of Lean's
own library (`native_decide` does), or that runs code of its own while it is compiled (`#eval`, `run_tac`, ...). The
last is told by words: a proof that got such code in by words unknown here could read the words of the report at the
file's end, and forge it. To keep that out, the kernel would have to check what the compiler wrote in a process apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from recipes.environments.contract import (
    NOT_SET,
    Agent,
    Execution,
    NotAKey,
    OneValue,
    PublishedText,
    Response,
    Row,
    SandboxSettings,
    Scoring,
    Unit,
    Verdict,
    Verifier,
    all_text,
    filled,
    require_str,
)
from recipes.environments.verifiers.checks.lean import (
    COMPLETED,
    HAS_SORRY,
    TIMEOUT,
    check_turned_off,
    code_run,
    end_fault,
    feedback,
    is_whole,
    shown,
    status_of,
    whole_proof,
    with_end,
)

EMPTY, FAILED = "empty_generation", "failed"
REASONS = {
    EMPTY: "the answer is empty",
    FAILED: "the compiler does not accept the proof",
    HAS_SORRY: "the proof has a gap (sorry)",
    TIMEOUT: "compiling the proof takes too long",
}
MAX_CHARACTERS = 200_000  # of each of the compiler's streams; the model is shown less
MAX_STEPS = 3  # an attempt and two corrections, where the agent's configuration names no other number
PROMPT = """This attempt to prove a theorem in Lean 4 does not compile.

{proof_attempt}

The compiler's answer:

{error_message}

Find out what each error means and how to mend it, then write the whole theorem with a proof that compiles. End with
one block that starts with ```lean4 and ends with ```, and write nothing after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(SandboxSettings):
    """A proof in Lean 4, compiled in the sandbox."""

    compilation_timeout: Annotated[float, Gt(0), Unit("seconds")] = 30.0
    """limit of one compilation"""
    refinement_prompt_template: str | None = None
    """prompt after a failed attempt; null = as env.judge_texts says"""
    empty_feedback: Annotated[str | None, NotAKey()] = None
    """what is said of an attempt without text; null = as env.judge_texts says"""
    silent_feedback: Annotated[str | None, NotAKey()] = None
    """what is said when the compiler says nothing; null = as env.judge_texts says"""
    extract_code_mode: Annotated[Literal["last", "first"], OneValue()] = NOT_SET
    """which code block is the proof"""
    max_output_characters: Annotated[int, Ge(1), Unit("characters"), OneValue()] = NOT_SET
    """compiler output that is kept"""
    restate_formal_statement: Annotated[bool, OneValue()] = NOT_SET
    """compile the row's own statement with the proof put under it"""
    strip_theorem_from_proof: Annotated[bool, OneValue()] = NOT_SET
    """drop a repeated statement from the answer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One statement, and what stands before it in its file."""

    header: str
    statement: str
    seconds: float  # for a compilation, on the clock
    prompt: str
    empty_feedback: str
    silent_feedback: str


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `header` and `formal_statement`, which ends where the proof begins."""
    return Task(
        header=require_str(row, "header"),
        statement=require_str(row, "formal_statement"),
        seconds=settings.compilation_timeout,
        prompt=settings.refinement_prompt_template or PROMPT,
        empty_feedback=settings.empty_feedback or "The attempt was empty: it held no proof.",
        silent_feedback=settings.silent_feedback or "The compiler did not accept the proof, and did not say why.",
    )


def score(response: Response, task: Task) -> Verdict | Scoring:
    """Compile the proof of an answer."""
    answer = all_text(response)
    if not answer.strip():
        return _failed(EMPTY, "(empty)", task.empty_feedback, task)
    return _score_by_compiling(answer, task)


def _score_by_compiling(answer: str, task: Task) -> Scoring:
    code = whole_proof(answer, task.header, task.statement)
    if option := check_turned_off(code):
        return _failed(FAILED, answer, f"A proof must not set the option {option}.", task)
    given = f"{task.header}{task.statement}"
    if word := code_run(code.removeprefix(given)):
        return _failed(FAILED, answer, f"A proof must not run code of its own: {word}.", task)
    compiled = with_end(code, given)
    execution = Execution(language="lean4", code=compiled, seconds=task.seconds, max_characters=MAX_CHARACTERS)
    (reply,) = yield [execution]
    status = status_of(reply)
    if status == COMPLETED and not is_whole(reply):
        return _failed(FAILED, answer, "The proof prints too much.", task)
    if status == COMPLETED and (fault := end_fault(reply, code, given)):
        return _failed(FAILED, answer, fault, task)
    if status == COMPLETED:
        return Verdict(reward=1.0, reason="the compiler accepts the proof", details={"proof_status": status})
    if status not in (HAS_SORRY, TIMEOUT, FAILED):
        raise RuntimeError(f"the sandbox did not compile: {status}: {str(reply.get('stderr'))[:200]}")
    return _failed(status, answer, feedback(shown(reply), code) or task.silent_feedback, task)


def _failed(status: str, answer: str, errors: str, task: Task) -> Verdict:
    prompt = filled(task.prompt, {"proof_attempt": answer, "error_message": errors})
    return Verdict(
        reward=0.0,
        reason=REASONS[status],
        details={"proof_status": status, "error_feedback": errors, "correction_prompt": prompt},
        is_flagged=status == TIMEOUT,  # a limit on the clock, which a busy machine meets, too
    )


TEXTS = {
    setting: PublishedText(side="math_formal_lean", file="app.py", at=name)
    for setting, name in (
        ("refinement_prompt_template", "REFINEMENT_PROMPT_TEMPLATE"),
        ("empty_feedback", "MathFormalLeanResourcesServer.verify.error_msg"),
        ("silent_feedback", "format_error_feedback"),
    )
}
VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    agents={
        "math_formal_lean_refinement_agent": Agent(kind="refinement", server="math_formal_lean", max_steps=MAX_STEPS)
    },
    settings=Settings,
    texts=lambda _settings: TEXTS,
    needs_sandbox=True,
)
