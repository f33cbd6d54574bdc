"""The coding agent: one rollout on a repository, from its container to the verdict of the hidden tests.

    start the task's container, take out what the agent must not see, keep the state of the repository
    -> the model and the tools take turns (`work`) -> read the patch by a fresh shell -> close the container
    -> run the hidden tests in a fresh container -> the verdict (`outcome.py`)

The container is closed however the rollout ends. A container, an image or a repository that fails before the agent
begins gives no verdict; the reason says which.

All coding agents of a process: they share the runtime of containers, and each runs its share of tasks at once.

A task waits for its place before its rollout begins, where this machine has no room for another container.

One agent at work in its container: model calls and tool calls in turn, until it ends; then its patch.

The work ends

    finished      the model called the tool that finishes, or answered without a call where its harness lets it
    max turns     `max_turns` model calls were made; the calls of the last one have been run
    context       a turn was cut off, or the context has no room for another
    stuck         the same turn with the same answers REPEATS times, or two turns in alternation ALTERNATIONS times
    time, memory  the agent's limits

A container that was ended from outside raises `ContainerEndedError`, an engine that failed its own error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from recipes.environments.agents.coding.calls import offered_names, read_call, request_tools
from recipes.environments.agents.coding.editor import Editor
from recipes.environments.agents.coding.harness import Harness, HarnessTool
from recipes.environments.agents.coding.outcome import Work, note_trajectory, verdict_on
from recipes.environments.agents.coding.patches import Beginning, NoPatchError, begin, read_patch
from recipes.environments.agents.coding.settings import CodingSettings, HarnessChoice
from recipes.environments.agents.coding.terminal import Terminal
from recipes.environments.agents.conversation import Conversation, EndedError, Episode, scored, unscored
from recipes.environments.chat.codec import row_template_kwargs
from recipes.environments.contract.verifier import Item, NoVerdict, read_arguments
from recipes.environments.swe.containers.admission import Admission, num_containers
from recipes.environments.swe.contract import (
    AgentEnd,
    Container,
    ContainerEnd,
    ContainerEndedError,
    ContainerFailedError,
    ContainerLimits,
    Evaluation,
    Evaluator,
    Runtime,
    SweTask,
)
from recipes.environments.swe.evaluation import PreparationError, TestRun, prepare
from recipes.environments.swe.hidden_tests import ENTER
from recipes.environments.swe.task import MissingImageError, parse_task
from recipes.errors import RequestError
from recipes.types import Rollout, RolloutStatus, Row

NO_LIMIT_MIB = 1 << 20  # of a container whose memory is not limited: more than a node has


@dataclass(slots=True, kw_only=True, eq=False)
class CodingAgents:
    """Runs the rollouts of coding agents, each by the settings of its name."""

    settings: Mapping[str, CodingSettings]  # name of an agent -> its settings
    num_sharers: int = 1  # processes that together run `concurrency` tasks at once
    find_runtime: Callable[[], Runtime]
    """Return the program that runs containers on this machine; raises `ContainerFailedError` where there is none."""
    _runtime: Runtime | None = None
    _admissions: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Admission]] = field(
        default_factory=WeakKeyDictionary
    )

    def row_problems(self, name: str, row: Row) -> list[str]:
        """Return what is wrong with a row of an agent: its task, and where the settings name images, its image."""
        params = row.get("responses_create_params")
        if isinstance(params, Mapping) and params.get("input"):
            return ["field 'input': got a prompt, expected an empty list: the agent writes the prompt itself"]
        try:
            task = parse_task(row)
            settings = self.settings.get(name)
            if settings is not None and settings.program is not None and (missing := settings.program.missing()):
                return [missing]
            if settings is not None and settings.images is not None:
                settings.images.with_image(task)
        except (ValueError, MissingImageError) as error:
            return [str(error)]
        return []

    def work_of(self, name: str, episode: Episode) -> tuple[SweTask, CodingSettings, Backend]:
        """Return what a rollout works on and with; raises `ValueError`, `MissingImageError`, `ContainerFailedError`."""
        settings = self.settings.get(name)
        if settings is None or settings.images is None:
            raise MissingImageError(f"agent '{name}' has no container_formatter, so that no task has an image")
        if settings.program is not None and (missing := settings.program.missing()):
            raise ContainerFailedError(missing)
        task = settings.images.with_image(parse_task(episode.row))
        return task, settings, self._backend(settings)

    @asynccontextmanager
    async def reserve(self, name: str, *, seconds: float) -> AsyncIterator[None]:
        """Hold room for one rollout of an agent; raises `RequestError` when none is free within `seconds`."""
        async with AsyncExitStack() as held:
            settings = self.settings.get(name)
            if settings is not None:
                try:
                    await held.enter_async_context(self._admission(name, settings).reserve(seconds=seconds))
                except ContainerFailedError as error:
                    raise RequestError(str(error)) from error
            yield

    def _backend(self, settings: CodingSettings) -> Backend:
        if self._runtime is None:
            self._runtime = self.find_runtime()
        limits = _limits_of(settings)
        tests = TestRun(runtime=self._runtime, limits=limits, seconds=settings.tests_seconds)
        return Backend(runtime=self._runtime, limits=limits, prepare=_prepare, enter=ENTER, evaluator=tests)

    def _admission(self, name: str, settings: CodingSettings) -> Admission:
        known = self._admissions.setdefault(asyncio.get_running_loop(), {})
        if name not in known:
            share = math.ceil(settings.concurrency / self.num_sharers)
            room = num_containers(_limits_of(settings)) if settings.memory_mib else settings.concurrency
            known[name] = Admission(room, own=share)
        return known[name]


def _limits_of(settings: CodingSettings) -> ContainerLimits:
    return ContainerLimits(memory_mib=settings.memory_mib or NO_LIMIT_MIB)


async def _prepare(container: Container, task: SweTask) -> None:
    try:
        await prepare(container, task)
    except PreparationError as error:
        raise SetUpError(str(error)) from error


REPEATS = 4
ALTERNATIONS = 3
FINISHED = "The work is done."  # what a call that finishes is answered, when other calls of its turn follow


@dataclass(slots=True, kw_only=True)
class Workbench:
    """The tools of one rollout, by the names that the model sees."""

    harness: Harness
    offered: Mapping[str, HarnessTool]
    terminal: Terminal
    editor: Editor
    is_finished: bool = False
    num_errors: int = 0  # calls whose answer says what is wrong with them
    seconds: float = 0.0  # in tools

    async def answer(self, call: Item) -> str:
        """Run one call and return what the model is shown; raises `ContainerEndedError`."""
        start = time.monotonic()
        try:
            text = await self._run(call)
        except ValueError as error:
            self.num_errors += 1
            text = self.harness.answers["error"].format(error=error)
        finally:
            self.seconds += time.monotonic() - start
        return text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair has no ids

    @property
    def metrics(self) -> dict[str, float]:
        """What the log shows of the tools."""
        return {
            "num_commands": float(self.terminal.num_commands),
            "num_late_commands": float(self.terminal.num_late),
            "num_dropped_characters": float(self.terminal.num_dropped),
            "num_tool_errors": float(self.num_errors),
        }

    async def _run(self, call: Item) -> str:
        tool = self.offered.get(call["name"])
        if tool is None:
            raise ValueError(f"there is no tool {call['name'][:100]}; the tools are: {', '.join(self.offered)}")
        asked = read_call(tool, read_arguments(call["arguments"]))
        if asked.primitive == "shell":
            return await self.terminal.run(asked.arguments)
        if asked.primitive == "note":
            return self.harness.answers["noted"]
        if asked.primitive == "finish":
            self.is_finished = True
            return FINISHED
        return await self.editor.run(asked.primitive, asked.arguments)


@dataclass(slots=True)
class _Repetition:
    """Digests of the last turns, each with its answers."""

    digests: list[str] = field(default_factory=list)

    def is_stuck(self, texts: list[str]) -> bool:
        """Add a turn and return whether the last turns repeat."""
        joined = "\0".join(texts).encode("utf-8", "replace")
        self.digests = [*self.digests, hashlib.sha256(joined).hexdigest()][-2 * max(REPEATS, ALTERNATIONS) :]
        last = self.digests[-REPEATS:]
        pairs = self.digests[-2 * ALTERNATIONS :]
        repeats = len(last) == REPEATS and len(set(last)) == 1
        return repeats or (len(pairs) == 2 * ALTERNATIONS and len({*zip(pairs[::2], pairs[1::2], strict=True)}) == 1)


async def work(conversation: Conversation, bench: Workbench, *, max_turns: int, seconds: float) -> AgentEnd:
    """Let the model and the tools take turns and return how the work ended.

    Raises `EndedError` for a rollout that has no reward, `ContainerEndedError` for a container that was ended from
    outside, and what the model client raises.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await _turns(conversation, bench, max_turns)
    except TimeoutError:
        if not limit.expired():
            raise
        return AgentEnd.TIME
    except ContainerEndedError as error:
        return end_of_container(error)


def end_of_container(error: ContainerEndedError) -> AgentEnd:
    """Return the end of an agent whose container has ended by its doing; raises the error otherwise."""
    if error.end is ContainerEnd.DIED:
        raise error
    return AgentEnd.MEMORY if error.end is ContainerEnd.MEMORY else AgentEnd.OTHER


async def _turns(conversation: Conversation, bench: Workbench, max_turns: int) -> AgentEnd:
    repetition = _Repetition()
    while True:
        calls = await conversation.next_turn()
        if conversation.is_cut:
            return AgentEnd.CONTEXT
        if not calls and bench.harness.without_call is None:
            return AgentEnd.FINISHED
        texts = [f"{call['name']} {call['arguments']}" for call in calls]
        for call in calls:
            text = await bench.answer(call)
            conversation.add_answer(text, call_id=call["call_id"])
            texts.append(text)
            if bench.is_finished:
                return AgentEnd.FINISHED
        if not calls:
            conversation.add_message(bench.harness.without_call or "")
        if len(conversation.turns) >= max_turns:
            return AgentEnd.MAX_TURNS
        if repetition.is_stuck(texts):
            return AgentEnd.STUCK


ENTER_SECONDS = 60.0  # to activate the environment of the image
MAX_SHOWN = 300  # characters of an output in a reason


class SetUpError(Exception):
    """The container could not be made ready for the agent; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What a rollout works with beside the model."""

    runtime: Runtime
    limits: ContainerLimits
    prepare: Callable[[Container, SweTask], Awaitable[None]]
    """Take out of a container what the agent must not see. Raises `SetUpError` and `ContainerEndedError`."""
    enter: str  # shell command by which a shell enters the environment and the directory of a task
    evaluator: Evaluator


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What has come of a rollout so far."""

    conversation: Conversation
    end: AgentEnd = AgentEnd.OTHER
    patch: str = ""
    no_patch: str = "the agent changed nothing"
    evaluation: Evaluation | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0  # seconds in the environment: containers, tools, tests


async def coding(episode: Episode, task: SweTask, settings: CodingSettings, backend: Backend) -> Rollout:
    """Run one rollout of a task; raises what the model client raises."""
    start = time.monotonic()
    choice = settings.choose(task.id)
    seed = str(random.random()) if settings.is_random else task.id
    offered = offered_names(choice.harness, seed=seed, is_diverse=choice.is_diverse, is_camel=choice.is_camel)
    attempt = _Attempt(conversation=Conversation(episode, request_of(episode, task, choice, offered)))
    conversation = attempt.conversation
    try:
        if settings.tests_golden_patch:
            attempt.end, attempt.patch = AgentEnd.FINISHED, task.gold_patch
        else:
            await _edit(attempt, task, settings, backend, (choice, offered))
        if attempt.patch:
            await _test(attempt, task, backend)
    except EndedError as error:
        rollout = unscored((), error.status, str(error), seconds=time.monotonic() - start)
        metrics = {**attempt.metrics, **error.metrics}
        return _with_log(replace(rollout, metrics=metrics), attempt, task)
    except (SetUpError, ContainerFailedError, ContainerEndedError) as error:
        rollout = unscored(conversation.turns, RolloutStatus.ENV_FAILED, str(error), seconds=time.monotonic() - start)
        return _with_log(replace(rollout, metrics=attempt.metrics), attempt, task)
    verdict = verdict_on(
        Work(end=attempt.end, patch=attempt.patch, no_patch=attempt.no_patch, evaluation=attempt.evaluation)
    )
    seconds = time.monotonic() - start
    if isinstance(verdict, NoVerdict):
        rollout = unscored(conversation.turns, verdict.status, verdict.reason, seconds=seconds)
        metrics = attempt.metrics
    else:
        rollout = scored(conversation.turns, verdict, is_cut=conversation.is_cut, seconds=seconds)
        metrics = {**verdict.metrics, **attempt.metrics}
    return _with_log(replace(rollout, metrics=metrics), attempt, task)


def _with_log(rollout: Rollout, attempt: _Attempt, task: SweTask) -> Rollout:
    """Return a rollout with what its log shows: its last answer, its trajectory and the seconds of its environment."""
    conversation = attempt.conversation
    items = (*conversation.params["input"], *conversation.items)
    trajectory = note_trajectory(task.id, items, end=attempt.end, patch=attempt.patch, evaluation=attempt.evaluation)
    return replace(rollout, output_text=conversation.text, env_seconds=attempt.waited, trajectory=trajectory)


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
    attempt: _Attempt,
    task: SweTask,
    settings: CodingSettings,
    backend: Backend,
    tools: tuple[HarnessChoice, Mapping[str, HarnessTool]],
) -> None:
    """Let the agent work in a container of the task, and note its patch."""
    start = time.monotonic()
    container = await backend.runtime.start(task.image, backend.limits)
    try:
        await backend.prepare(container, task)
        beginning = await _begin(container, task)
        bench = await _workbench(container, task, settings, backend, tools)
        attempt.metrics["container_seconds"] = time.monotonic() - start
        attempt.waited += time.monotonic() - start
        try:
            attempt.end = await work(
                attempt.conversation, bench, max_turns=settings.max_turns, seconds=settings.agent_seconds
            )
        finally:
            attempt.waited += bench.seconds
            attempt.metrics |= bench.metrics
        if attempt.end not in (AgentEnd.TIME, AgentEnd.MEMORY, AgentEnd.OTHER):
            await _read_patch(attempt, container, beginning)
    finally:
        attempt.metrics["agent/peak_memory_mib"] = container.peak_memory_mib
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
    backend: Backend,
    tools: tuple[HarnessChoice, Mapping[str, HarnessTool]],
) -> Workbench:
    """Return the tools of the rollout, with their shell in the repository."""
    choice, offered = tools
    harness = choice.harness
    shell = await container.open_shell()
    enter = f"{backend.enter}; cd -- {shlex.quote(task.workspace)}" if backend.enter else f"cd -- {task.workspace}"
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


async def _read_patch(attempt: _Attempt, container: Container, beginning: Beginning) -> None:
    start = time.monotonic()
    try:
        attempt.patch = await read_patch(container, beginning)
    except NoPatchError as error:
        attempt.no_patch = str(error)
    except ContainerEndedError as error:
        attempt.end = end_of_container(error)
    attempt.waited += time.monotonic() - start


async def _test(attempt: _Attempt, task: SweTask, backend: Backend) -> None:
    start = time.monotonic()
    attempt.evaluation = await backend.evaluator(task, attempt.patch)
    attempt.metrics["tests/seconds"] = time.monotonic() - start
    attempt.waited += time.monotonic() - start
