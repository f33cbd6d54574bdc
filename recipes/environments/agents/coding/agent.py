"""The coding agent: one rollout on a repository, from its container to the verdict of the hidden tests.

    start the task's container, take out what the agent must not see, keep the state of the repository
    -> the model and the tools take turns (`work.py`) -> read the patch by a fresh shell -> close the container
    -> run the hidden tests in a fresh container -> the verdict (`outcome.py`)

The container is closed however the rollout ends. A container, an image or a repository that fails before the agent
begins gives no verdict; the reason says which.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipes.environments.agents.coding.calls import offered_names, request_tools
from recipes.environments.agents.coding.editor import Editor
from recipes.environments.agents.coding.harness import HarnessTool
from recipes.environments.agents.coding.outcome import Work, verdict_on
from recipes.environments.agents.coding.patches import Beginning, NoPatchError, begin, read_patch
from recipes.environments.agents.coding.settings import CodingSettings, HarnessChoice
from recipes.environments.agents.coding.terminal import Terminal
from recipes.environments.agents.coding.trajectory import note_trajectory
from recipes.environments.agents.coding.work import Workbench, end_of_container, work
from recipes.environments.agents.conversation import Conversation, EndedError
from recipes.environments.agents.episode import Episode, scored, unscored
from recipes.environments.chat.codec import row_template_kwargs
from recipes.environments.contract.verdict import NoVerdict
from recipes.environments.swe.contract import (
    AgentEnd,
    Container,
    ContainerEndedError,
    ContainerFailedError,
    ContainerLimits,
    Evaluation,
    Evaluator,
    Runtime,
    SweTask,
)
from recipes.types import Rollout, RolloutStatus

ENTER_SECONDS = 60.0  # to activate the environment of the image
MAX_SHOWN = 300  # characters of an output in a reason


class SetUpError(Exception):
    """The container could not be made ready for the agent; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a rollout works with beside the model."""

    runtime: Runtime
    limits: ContainerLimits
    prepare: Callable[[Container, SweTask], Awaitable[None]]
    """Take out of a container what the agent must not see. Raises `SetUpError` and `ContainerEndedError`."""
    enter: str  # shell command by which a shell enters the environment and the directory of a task
    evaluator: Evaluator


@dataclass(slots=True, kw_only=True)
class _Course:
    """What has come of a rollout so far."""

    said: Conversation
    end: AgentEnd = AgentEnd.OTHER
    patch: str = ""
    no_patch: str = "the agent changed nothing"
    evaluation: Evaluation | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0  # seconds in the environment: containers, tools, tests


async def coding(episode: Episode, task: SweTask, settings: CodingSettings, means: Means) -> Rollout:
    """Run one rollout of a task; raises what the model client raises."""
    start = time.monotonic()
    choice = settings.choose(task.id)
    seed = str(random.random()) if settings.is_random else task.id
    offered = offered_names(choice.harness, seed=seed, is_diverse=choice.is_diverse, is_camel=choice.is_camel)
    course = _Course(said=Conversation(episode, request_of(episode, task, choice, offered)))
    said = course.said
    try:
        if settings.tests_golden_patch:
            course.end, course.patch = AgentEnd.FINISHED, task.gold_patch
        else:
            await _edit(course, task, settings, means, (choice, offered))
        if course.patch:
            await _test(course, task, means)
    except EndedError as error:
        rollout = unscored((), error.status, str(error), seconds=time.monotonic() - start)
        metrics = {**course.metrics, **error.metrics}
        return _noted(replace(rollout, metrics=metrics), course, task)
    except (SetUpError, ContainerFailedError, ContainerEndedError) as error:
        rollout = unscored(said.turns, RolloutStatus.ENV_FAILED, str(error), seconds=time.monotonic() - start)
        return _noted(replace(rollout, metrics=course.metrics), course, task)
    verdict = verdict_on(
        Work(end=course.end, patch=course.patch, no_patch=course.no_patch, evaluation=course.evaluation)
    )
    seconds = time.monotonic() - start
    if isinstance(verdict, NoVerdict):
        rollout = unscored(said.turns, verdict.status, verdict.reason, seconds=seconds)
        metrics = course.metrics
    else:
        rollout = scored(said.turns, verdict, is_cut=said.is_cut, seconds=seconds)
        metrics = {**verdict.metrics, **course.metrics}
    return _noted(replace(rollout, metrics=metrics), course, task)


def _noted(rollout: Rollout, course: _Course, task: SweTask) -> Rollout:
    """Return a rollout with what its log shows: its last answer, its trajectory and the seconds of its environment."""
    said = course.said
    items = (*said.params["input"], *said.items)
    trajectory = note_trajectory(task.id, items, end=course.end, patch=course.patch, evaluation=course.evaluation)
    return replace(rollout, output_text=said.text, env_seconds=course.waited, trajectory=trajectory)


def request_of(
    episode: Episode, task: SweTask, choice: HarnessChoice, offered: Mapping[str, HarnessTool]
) -> dict[str, Any]:
    """Return the request of a rollout: the prompts of the harness with the problem, and its tools.

    Of the row's own request only the template's arguments stay: its metadata hold the solution.
    """
    harness = choice.harness
    text = harness.task.format(workspace=task.workspace, problem=task.problem)
    request: dict[str, Any] = {
        "input": [{"role": "system", "content": harness.system.strip()}, {"role": "user", "content": text.strip()}],
        "tools": request_tools(offered),
    }
    if kwargs := row_template_kwargs(episode.params):
        request["metadata"] = {"chat_template_kwargs": json.dumps(kwargs)}
    return request


async def _edit(
    course: _Course,
    task: SweTask,
    settings: CodingSettings,
    means: Means,
    tools: tuple[HarnessChoice, Mapping[str, HarnessTool]],
) -> None:
    """Let the agent work in a container of the task, and note its patch."""
    start = time.monotonic()
    container = await means.runtime.start(task.image, means.limits)
    try:
        await means.prepare(container, task)
        beginning = await _begin(container, task)
        bench = await _workbench(container, task, settings, means, tools)
        course.metrics["container_seconds"] = time.monotonic() - start
        course.waited += time.monotonic() - start
        try:
            course.end = await work(course.said, bench, max_turns=settings.max_turns, seconds=settings.agent_seconds)
        finally:
            course.waited += bench.seconds
            course.metrics |= bench.metrics
        if course.end not in (AgentEnd.TIME, AgentEnd.MEMORY, AgentEnd.OTHER):
            await _read_patch(course, container, beginning)
    finally:
        course.metrics["agent/peak_memory_mib"] = container.peak_memory_mib
        await container.close()


async def _begin(container: Container, task: SweTask) -> Beginning:
    try:
        return await begin(container, task.workspace)
    except NoPatchError as error:
        raise SetUpError(f"{task.id}: {error}") from error


async def _workbench(
    container: Container,
    task: SweTask,
    settings: CodingSettings,
    means: Means,
    tools: tuple[HarnessChoice, Mapping[str, HarnessTool]],
) -> Workbench:
    """Return the tools of the rollout, with their shell in the repository."""
    choice, offered = tools
    harness = choice.harness
    shell = await container.open_shell()
    enter = f"{means.enter}; cd -- {shlex.quote(task.workspace)}" if means.enter else f"cd -- {task.workspace}"
    entered = await shell.enter(enter, seconds=ENTER_SECONDS)
    if entered.status != 0:
        raise SetUpError(
            f"{task.id}: the shell could not enter {task.workspace}: {entered.output.strip()[-MAX_SHOWN:]}"
        )
    return Workbench(
        harness=harness,
        offered=offered,
        terminal=Terminal(
            shell=shell,
            answers=harness.answers,
            max_characters=harness.max_characters,
            seconds=settings.command_seconds,
        ),
        editor=Editor(
            container=container,
            workspace=task.workspace,
            answers=harness.answers,
            max_characters=harness.max_characters,
        ),
    )


async def _read_patch(course: _Course, container: Container, beginning: Beginning) -> None:
    start = time.monotonic()
    try:
        course.patch = await read_patch(container, beginning)
    except NoPatchError as error:
        course.no_patch = str(error)
    except ContainerEndedError as error:
        course.end = end_of_container(error)
    course.waited += time.monotonic() - start


async def _test(course: _Course, task: SweTask, means: Means) -> None:
    start = time.monotonic()
    course.evaluation = await means.evaluator(task, course.patch)
    course.metrics["tests/seconds"] = time.monotonic() - start
    course.waited += time.monotonic() - start
