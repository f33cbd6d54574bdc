"""Rollouts of agent programs: a program beside the task's container, the policy behind its rollout's own model server.

    start the container, take out what the agent must not see, keep the state of the repository
    -> the program asks the model server, and runs commands in the container (`process.py`) -> read the patch
    -> run the hidden tests in a fresh container -> the verdict

Every call is captured and trained once, as for an agent by URL; the verdict is that of our own agent's rollouts. A
program that fails, that never asks the policy, or whose last question no engine has answered, gives no verdict.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.environments.agents.by_url.agent import MAX_LOST, UrlAgents, no_answer, sequences_in, session_metrics
from recipes.environments.agents.by_url.session import MODEL, RolloutSession, SessionLimits
from recipes.environments.agents.coding.agent import ENTER_SECONDS, MAX_SHOWN, Backend, SetUpError, end_of_container
from recipes.environments.agents.coding.outcome import Work, verdict_on
from recipes.environments.agents.coding.patches import NoPatchError, begin, read_patch
from recipes.environments.agents.coding.programs import AgentProgram
from recipes.environments.agents.coding.settings import CodingSettings
from recipes.environments.agents.conversation import Episode, scored, unscored
from recipes.environments.agents.programs.process import Bridge, Ended, bridge_to, run_program
from recipes.environments.chat.codec import row_template_kwargs
from recipes.environments.contract.verifier import NoVerdict
from recipes.environments.swe.containers.places import home
from recipes.environments.swe.contract import (
    AgentEnd,
    Container,
    ContainerEndedError,
    ContainerFailedError,
    SweTask,
)
from recipes.types import Rollout, RolloutStatus

ADDRESS = "127.0.0.1"  # programs run on this machine


class ProgramFailedError(Exception):
    """A program failed without a result."""


@dataclass(slots=True, kw_only=True)
class _ProgramAttempt:
    """What has come of a rollout so far."""

    work: Work = field(default_factory=lambda: Work(end=AgentEnd.OTHER))
    metrics: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0  # seconds in containers and tests


async def program_rollout(
    episode: Episode, task: SweTask, settings: CodingSettings, backend: Backend, servers: UrlAgents
) -> Rollout:
    """Run one rollout of a task by the program of the settings; raises `EngineError` when no engine is left."""
    start, attempt = time.monotonic(), _ProgramAttempt()
    session = RolloutSession(
        codec=episode.codec,
        model=episode.model,
        patterns=episode.patterns,
        limits=SessionLimits(max_tokens=episode.max_tokens, num_calls=settings.max_turns),
        template_kwargs=row_template_kwargs(episode.params),
    )
    server = await servers.server_for(ADDRESS)
    failed = ""
    async with server.serving(session) as base_url:
        try:
            await _edit(attempt, session, task, settings, backend, base_url)
        except (SetUpError, ContainerFailedError, ContainerEndedError, ProgramFailedError, OSError) as error:
            failed = str(error)
    if session.engine_failure is not None:
        raise session.engine_failure
    if not failed and not session.failure and attempt.work.patch:
        tests = time.monotonic()
        evaluation = await backend.evaluator(task, attempt.work.patch)
        attempt.work = replace(attempt.work, evaluation=evaluation)
        attempt.metrics["tests/seconds"] = time.monotonic() - tests
        attempt.waited += time.monotonic() - tests
    return _rollout(session, attempt, failed, seconds=time.monotonic() - start)


async def _edit(
    attempt: _ProgramAttempt,
    session: RolloutSession,
    task: SweTask,
    settings: CodingSettings,
    backend: Backend,
    base_url: str,
) -> None:
    """Let the program work in a container of the task, and note its patch."""
    start = time.monotonic()
    container = await backend.runtime.start(task.image, backend.limits)
    try:
        await backend.prepare(container, task)
        try:
            beginning = await begin(container, task.workspace)
        except NoPatchError as error:
            raise SetUpError(f"{task.id}: {error}") from error
        async with _bridge(container, task, settings, backend) as bridge, _directory() as directory:
            attempt.metrics["container_seconds"] = time.monotonic() - start
            asked = _request(task, settings, bridge, base_url)
            assert settings.program is not None
            end = await _work(settings.program, asked, directory, bridge, session)
            names = ("num_commands", "num_late", "num_dropped")
            attempt.metrics |= {f"program/{name}": float(getattr(bridge, name)) for name in names}
        attempt.work = Work(end=end)
        if end not in (AgentEnd.TIME, AgentEnd.MEMORY, AgentEnd.OTHER):
            try:
                attempt.work = Work(end=end, patch=await read_patch(container, beginning))
            except NoPatchError as error:
                attempt.work = Work(end=end, no_patch=str(error))
            except ContainerEndedError as error:
                attempt.work = Work(end=end_of_container(error))
    finally:
        attempt.metrics["agent/peak_memory_mib"] = container.peak_memory_mib
        await container.close()
        attempt.waited += time.monotonic() - start


@asynccontextmanager
async def _bridge(
    container: Container, task: SweTask, settings: CodingSettings, backend: Backend
) -> AsyncIterator[Bridge]:
    shell = await container.open_shell()
    words = [*([backend.enter] if backend.enter else []), f"cd -- {shlex.quote(task.workspace)}"]
    entered = await shell.enter("; ".join(words), seconds=ENTER_SECONDS)
    if entered.status != 0:
        output = entered.output.strip()[-MAX_SHOWN:]
        raise SetUpError(f"{task.id}: the shell could not enter {task.workspace}: {output}")
    async with bridge_to(shell, seconds=settings.command_seconds) as bridge:
        yield bridge


@asynccontextmanager
async def _directory() -> AsyncIterator[Path]:
    """Make a directory for the files of one program."""
    path = home() / f"program-{secrets.token_hex(6)}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _request(task: SweTask, settings: CodingSettings, bridge: Bridge, base_url: str) -> dict[str, Any]:
    """Return what the program reads: nothing of a task but what agents may see."""
    return {
        "instance_id": task.id,
        "problem": task.problem,
        "workspace": task.workspace,
        "max_turns": settings.max_turns,
        "command_seconds": settings.command_seconds,
        "seconds": settings.agent_seconds,
        "model_server": {"base_url": base_url, "model": MODEL},
        "container": bridge.descriptor,
    }


async def _work(
    program: AgentProgram, asked: Mapping[str, Any], directory: Path, bridge: Bridge, session: RolloutSession
) -> AgentEnd:
    """Run the program; return how its work ended, by what was seen of it before what it says."""

    async def until() -> None:
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(session.engine_failed.wait()), bridge.ended]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting[0].cancel()

    ended = await run_program(program, asked, directory, descriptor=bridge.descriptor, until=until())
    if session.engine_failure is not None:
        return AgentEnd.OTHER  # the run ends
    if bridge.ended.done():
        return end_of_container(bridge.ended.result())
    if ended.status is None:
        return AgentEnd.TIME
    if session.is_full:
        return AgentEnd.CONTEXT
    return _end_of(program, ended, is_spent=session.is_spent)


def _end_of(program: AgentProgram, ended: Ended, *, is_spent: bool) -> AgentEnd:
    end = ended.result.get("end")
    if end == AgentEnd.FINISHED:
        return AgentEnd.FINISHED
    if is_spent:
        return AgentEnd.MAX_TURNS
    if end not in tuple(AgentEnd):
        raise ProgramFailedError(
            f"the agent program {program.name} ended with status {ended.status} without a result: "
            f"{ended.stderr or 'it said nothing'}"
        )
    return AgentEnd(end)


def _rollout(session: RolloutSession, attempt: _ProgramAttempt, failed: str, *, seconds: float) -> Rollout:
    """Return the rollout: its calls as sequences, and the verdict."""
    kept = sequences_in(session)
    turns = kept.turns(0) if kept.paths else ()
    metrics = {**attempt.metrics, **session_metrics(session, kept)}
    text = session.codec.decode(turns[-1].token_ids, prompt_ids=turns[-1].prompt_token_ids).text if turns else ""
    verdict = None if failed else verdict_on(attempt.work)
    if session.failure:  # what a program leaves then is not its own work
        rollout = unscored(turns, RolloutStatus.ABORTED, no_answer(session), seconds=seconds)
    elif verdict is None:
        rollout = unscored(turns, RolloutStatus.ENV_FAILED, failed, seconds=seconds)
    elif not turns:
        what = "took no answer that can be trained" if session.num_calls else "made no model call"
        rollout = unscored((), RolloutStatus.ABORTED, f"the agent program {what}", seconds=seconds)
    elif isinstance(verdict, NoVerdict):
        rollout = unscored(turns, verdict.status, verdict.reason, seconds=seconds)
    else:
        is_cut = attempt.work.end is AgentEnd.CONTEXT or turns[-1].finish_reason == "length"
        rollout = scored(turns, verdict, is_cut=is_cut, seconds=seconds)
    is_lost = kept.lost_share > MAX_LOST or session.counts["suffix_mismatches"] > 0
    return replace(
        rollout,
        branches=kept.branches(),
        is_flagged=rollout.is_flagged or (rollout.reward is not None and is_lost),
        metrics={**rollout.metrics, **metrics},
        output_text=text,
        env_seconds=attempt.waited,
    )
