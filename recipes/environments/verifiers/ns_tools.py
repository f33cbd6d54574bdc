"""Mathematics with Python at hand: the model runs cells, then answers. Reward 1.0 when the answer is right, else 0.0.

The answer is scored as `math_with_judge` does, under the settings and with the judge of the server that `verifiers`
names for it. The tool `stateful_python_code_exec` runs a cell in a Python session of the rollout's own in a sandbox,
which keeps variables from cell to cell and has no network; the session ends with the verdict.

The model is shown what the cell printed, and what it wrote to standard error after that, each cut after 1000
characters; also when the cell failed or ran out of time. A session whose process ended begins anew without its
variables, and the model is told so (`disable_session_restore`; the reference can also run the earlier cells again). A
sandbox that does not answer fails the rollout; the reference shows that to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import orjson
from annotated_types import Ge

from recipes.environments.contract import (
    NOT_SET,
    Agent,
    Cell,
    Entry,
    NotAKey,
    OneValue,
    Response,
    Row,
    SandboxSettings,
    Scoring,
    Text,
    Tools,
    Unit,
    Verdict,
    Verifier,
    one_of,
    shown,
)
from recipes.environments.verifiers import math_with_judge

TOOL = "stateful_python_code_exec"
DELEGATE = "math_with_judge"
MAX_STEPS = 50  # model calls of a rollout, where the agent's configuration names no other number
MAX_CHARACTERS = 1000  # of each of what a cell printed and what it wrote to standard error
LOST = "Warning: the Python session has begun anew, and its variables are lost.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(SandboxSettings):
    """Mathematics with Python in the sandbox."""

    default_verifier: Text = DELEGATE
    """verifier of rows that name none: a key of verifiers"""
    verifiers: Annotated[Mapping[str, Any], Entry("server_references")] = NOT_SET
    """verifiers by the name rows give them"""
    scores_as: Annotated[math_with_judge.Settings, NotAKey()] = field(default_factory=math_with_judge.Settings)
    """the settings of that verifier's server"""
    nemo_skills_tools: tuple[Text, ...] = ()
    """tools of NeMo Skills that rows may call"""
    nemo_skills_tool_overrides: Mapping[str, Any] | None = None
    """settings of those tools, by tool"""
    disable_session_restore: Annotated[bool, OneValue()] = True
    """do not replay a session's history when its sandbox worker has died"""
    python_tool_port: Annotated[int, Ge(1), Unit("TCP port"), OneValue()] = NOT_SET
    """port of NeMo Skills' older Python tool"""
    verbose_tool_logging: Annotated[bool, OneValue()] = NOT_SET
    """log every tool call"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(math_with_judge.Task):
    """One question's known answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """The state of the tool: how long a cell may take, and whether the session has variables to lose."""

    seconds: float
    has_begun: bool = False


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `question` and `expected_answer`; `verifier_type` must be the one that is built."""
    one_of("verifier_type", row.get("verifier_type") or settings.default_verifier, (DELEGATE,))
    task = math_with_judge.parse_task(row, settings.scores_as)
    return Task(**{each.name: getattr(task, each.name) for each in fields(task)})


def score(response: Response, task: Task) -> Verdict | Scoring:
    """Compare the answer with the expected one."""
    return math_with_judge.score(response, task)


def _start(settings: Settings) -> Python:
    overrides = (settings.nemo_skills_tool_overrides or {}).get("DirectPythonTool") or {}
    return Python(seconds=float(overrides.get("exec_timeout_s", 10)))


def _call(python: Python, name: str, arguments: Mapping[str, Any]) -> tuple[Python, str | Cell]:
    code = arguments.get("code")
    if name != TOOL:
        return python, _error(f"Unknown tool: {name}")
    if not isinstance(code, str):
        return python, _error(f"argument 'code': got {shown(code)}, expected a string")
    return python, Cell(code=code, seconds=python.seconds, max_characters=MAX_CHARACTERS)


def _read(python: Python, reply: Mapping[str, Any]) -> tuple[Python, str]:
    """Show what a cell wrote, without the end of its last line."""
    text = f"{reply.get('stdout') or ''}{reply.get('stderr') or ''}".removesuffix("\n")
    is_lost = python.has_begun and bool(reply.get("new_session_created"))
    return Python(seconds=python.seconds, has_begun=True), LOST + text if is_lost else text


def _error(text: str) -> str:
    return orjson.dumps({"error": text}).decode()


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="NSToolsResourcesServer",
    agents={"ns_tools_simple_agent": Agent(kind="tool_loop", server="ns_tools", max_steps=MAX_STEPS)},
    settings=Settings,
    needs_judge=lambda settings: settings.scores_as.should_use_judge,
    needs_sandbox=True,
    tools=Tools(start=_start, call=_call, read=_read),
    imports=math_with_judge.VERIFIER.imports,
    prepare=math_with_judge.prepare,
)
