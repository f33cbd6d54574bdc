"""How the work on a task becomes a verdict, and which verdicts are kept out of the loss.

    hidden tests pass                                  1.0
    the same, but the agent ran out of turns or room   1.0, kept out of the loss: it did not know that it was done
    the agent, or the tests, ran out of time or memory 0.0, kept out of the loss
    the tests fail, there is no patch, a loop          0.0
    a container or the tests themselves failed         no verdict

These are NeMo Gym's rules, of its agent `swe_agents`.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.environments.contract.verdict import NoVerdict, Verdict, env_failed
from recipes.environments.swe.contract import AgentEnd, Evaluation

_OUT_OF_MEANS = (AgentEnd.MAX_TURNS, AgentEnd.CONTEXT)
_MASKED = {AgentEnd.TIME: "the agent ran out of its time", AgentEnd.MEMORY: "the agent used too much memory"}
_MARKS = (
    ("maximum iteration", AgentEnd.MAX_TURNS),
    ("contextwindow", AgentEnd.CONTEXT),
    ("stuck in a loop", AgentEnd.STUCK),
    ("stuckinloop", AgentEnd.STUCK),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an agent left when its work ended."""

    end: AgentEnd
    patch: str = ""
    no_patch: str = "the agent changed nothing"  # why there is no patch
    evaluation: Evaluation | None = None  # None: nothing was tested


def error_kind(error: str | None) -> AgentEnd | None:
    """Return the kind of an error that an agent elsewhere reports as text; None without one."""
    if not error:
        return None
    text = error.lower()
    spaceless = text.replace(" ", "")
    return next((kind for mark, kind in _MARKS if mark in text or mark in spaceless), AgentEnd.OTHER)


def verdict_on(work: Work) -> Verdict | NoVerdict:
    """Return the verdict on a piece of work, with its metrics."""
    found = work.evaluation
    if found is not None and found.failed:
        return env_failed(f"the evaluation failed: {found.failed}")
    metrics = metrics_of(work)
    if work.end in _MASKED:
        return Verdict(reward=0.0, reason=_MASKED[work.end], is_flagged=True, metrics=metrics)
    if found is None:
        return Verdict(reward=0.0, reason=f"no patch: {work.no_patch}", metrics=metrics)
    if found.is_late or found.out_of_memory:
        what = "ran out of their time" if found.is_late else "used too much memory"
        reason = f"the hidden tests {what}: {found.reason}"
        return Verdict(reward=0.0, reason=reason, is_flagged=True, metrics=metrics)
    if not found.resolved:
        return Verdict(reward=0.0, reason=found.reason or "the hidden tests fail", metrics=metrics)
    is_flagged = work.end in _OUT_OF_MEANS
    reason = f"resolved, but the agent ended by {work.end}" if is_flagged else "resolved"
    return Verdict(reward=1.0, reason=reason, is_flagged=is_flagged, metrics=metrics)


def metrics_of(work: Work) -> dict[str, float]:
    """Return 0 or 1 per kind of end and of evaluation, so that their means are shares."""
    found = work.evaluation
    return {
        **{f"ended/{kind}": float(work.end is kind) for kind in AgentEnd},
        "has_patch": float(bool(work.patch)),
        "resolved": float(found is not None and found.resolved),
        "tests/late": float(found is not None and found.is_late),
        "tests/oom": float(found is not None and found.out_of_memory),
        "tests/peak_memory_mib": found.peak_memory_mib if found is not None else 0.0,
    }
