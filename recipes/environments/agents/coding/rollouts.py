"""All coding agents of a process: they share the runtime of containers, and each runs its share of tasks at once.

A task waits for its place before its rollout begins, where this machine has no room for another container.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from recipes.environments.agents.coding.agent import Means, SetUpError
from recipes.environments.agents.coding.settings import CodingSettings
from recipes.environments.agents.episode import Episode
from recipes.environments.swe.containers.admission import Admission, num_places
from recipes.environments.swe.contract import Container, ContainerFailedError, ContainerLimits, Runtime, SweTask
from recipes.environments.swe.evaluation import PreparationError, TestRun, prepare
from recipes.environments.swe.hidden_tests import ENTER
from recipes.environments.swe.task import MissingImageError, parse_task
from recipes.errors import RequestError
from recipes.types import Row

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
                settings.images.place(task)
        except (ValueError, MissingImageError) as error:
            return [str(error)]
        return []

    def work_of(self, name: str, episode: Episode) -> tuple[SweTask, CodingSettings, Means]:
        """Return what a rollout works on and with; raises `ValueError`, `MissingImageError`, `ContainerFailedError`."""
        settings = self.settings.get(name)
        if settings is None or settings.images is None:
            raise MissingImageError(f"agent '{name}' has no container_formatter, so that no task has an image")
        if settings.program is not None and (missing := settings.program.missing()):
            raise ContainerFailedError(missing)
        task = settings.images.place(parse_task(episode.row))
        return task, settings, self._means(settings)

    @asynccontextmanager
    async def place(self, name: str, *, seconds: float) -> AsyncIterator[None]:
        """Hold a place for one rollout of an agent; raises `RequestError` when none is free within `seconds`."""
        async with AsyncExitStack() as held:
            settings = self.settings.get(name)
            if settings is not None:
                try:
                    await held.enter_async_context(self._admission(name, settings).place(seconds=seconds))
                except ContainerFailedError as error:
                    raise RequestError(str(error)) from error
            yield

    def _means(self, settings: CodingSettings) -> Means:
        if self._runtime is None:
            self._runtime = self.find_runtime()
        limits = _limits_of(settings)
        tests = TestRun(runtime=self._runtime, limits=limits, seconds=settings.tests_seconds)
        return Means(runtime=self._runtime, limits=limits, prepare=_prepare, enter=ENTER, evaluator=tests)

    def _admission(self, name: str, settings: CodingSettings) -> Admission:
        known = self._admissions.setdefault(asyncio.get_running_loop(), {})
        if name not in known:
            share = math.ceil(settings.concurrency / self.num_sharers)
            places = num_places(_limits_of(settings)) if settings.memory_mib else settings.concurrency
            known[name] = Admission(places, own=share)
        return known[name]


def _limits_of(settings: CodingSettings) -> ContainerLimits:
    return ContainerLimits(memory_mib=settings.memory_mib or NO_LIMIT_MIB)


async def _prepare(container: Container, task: SweTask) -> None:
    try:
        await prepare(container, task)
    except PreparationError as error:
        raise SetUpError(str(error)) from error
