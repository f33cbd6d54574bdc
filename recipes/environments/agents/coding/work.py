"""One agent at work in its container: model calls and tool calls in turn, until it ends; then its patch.

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
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from recipes.environments.agents.coding.calls import read_call
from recipes.environments.agents.coding.editor import Editor
from recipes.environments.agents.coding.harness import Harness, HarnessTool
from recipes.environments.agents.coding.terminal import Terminal
from recipes.environments.agents.conversation import Conversation
from recipes.environments.contract.responses import Item
from recipes.environments.contract.tools import read_arguments
from recipes.environments.swe.contract import AgentEnd, ContainerEnd, ContainerEndedError

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


async def work(said: Conversation, bench: Workbench, *, max_turns: int, seconds: float) -> AgentEnd:
    """Let the model and the tools take turns and return how the work ended.

    Raises `EndedError` for a rollout that has no reward, `ContainerEndedError` for a container that was ended from
    outside, and what the model client raises.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await _turns(said, bench, max_turns)
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


async def _turns(said: Conversation, bench: Workbench, max_turns: int) -> AgentEnd:
    repetition = _Repetition()
    while True:
        calls = await said.next_turn()
        if said.is_cut:
            return AgentEnd.CONTEXT
        if not calls and bench.harness.without_call is None:
            return AgentEnd.FINISHED
        texts = [f"{call['name']} {call['arguments']}" for call in calls]
        for call in calls:
            text = await bench.answer(call)
            said.add_answer(text, call_id=call["call_id"])
            texts.append(text)
            if bench.is_finished:
                return AgentEnd.FINISHED
        if not calls:
            said.add_message(bench.harness.without_call or "")
        if len(said.turns) >= max_turns:
            return AgentEnd.MAX_TURNS
        if repetition.is_stuck(texts):
            return AgentEnd.STUCK
