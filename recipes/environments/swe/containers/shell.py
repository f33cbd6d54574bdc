"""A bash in a container that keeps its directory and variables from command to command.

A command is a line of input of an interactive bash: after an interrupt such a bash goes on with its next line. That
line prints a random mark on a pipe that programs of the command do not inherit, so what a command prints cannot end
it. Whoever runs commands in a shell controls that shell: one who means to can end a command early by writing to the
shell's own descriptors, and deceives only whoever reads that output. Hidden tests run in another container.

The text that a command prints: its beginning and its end are kept, however much there is between them.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable

from recipes.environments.swe.containers.program import ContainerState, Known, Program
from recipes.environments.swe.contract import KEPT_CHARACTERS, CommandResult

# What an interactive bash without a terminal says when a program was killed by a signal.
NO_TERMINAL = re.compile(r"^bash: \[[0-9: ()]{1,40}\] tcsetattr: Inappropriate ioctl for device\n", re.MULTILINE)


class CommandOutput:
    """Bytes of a stream, decoded as UTF-8 with replacement as they come; takes memory for `KEPT_CHARACTERS` twice."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head: list[str] = []
        self._head_room = KEPT_CHARACTERS
        self._tail: list[str] = []
        self._tail_characters = 0
        self._characters = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes; empty ones end the text."""
        text = self._decoder.decode(data, final=not data)
        self._characters += len(text)
        if self._head_room:
            taken = text[: self._head_room]
            self._head.append(taken)
            self._head_room -= len(taken)
            text = text[len(taken) :]
        if text:
            self._tail.append(text)
            self._tail_characters += len(text)
            if self._tail_characters > 2 * KEPT_CHARACTERS:
                self._tail = ["".join(self._tail)[-KEPT_CHARACTERS:]]
                self._tail_characters = KEPT_CHARACTERS

    def text(self, max_characters: int) -> tuple[str, int]:
        """Return the text, and how many characters were cut out of its middle; a line says so where they were."""
        head, kept = "".join(self._head), "".join((*self._head, *self._tail))
        if len(kept) == self._characters <= max_characters:
            return NO_TERMINAL.sub("", kept), 0
        num_head = min((max_characters + 1) // 2, KEPT_CHARACTERS)
        num_tail = min(max_characters // 2, KEPT_CHARACTERS)
        dropped = self._characters - num_head - num_tail
        end = kept[-num_tail:] if num_tail else ""
        text = f"{head[:num_head]}\n[{dropped} characters left out]\n{end}"
        return NO_TERMINAL.sub("", text), dropped


GRACE_SECONDS = 2.0  # from the interrupt to the kill of what a command has started
KILL_STEPS, INTERRUPTS, INTERRUPT_SECONDS = 15, 5, 0.02
LATE_STATUS = 130  # as after an interrupt
ENTER_SECONDS = 60.0  # for a new bash to come to where the last one was
MAX_ENTER = 1000  # characters of what entering printed
ENDED = "[the shell ended with status {}; a new one was opened in the same directory, without its variables]\n"
STUCK = "[the shell could not be interrupted; a new one was opened in the same directory, without its variables]\n"


class BashShell:
    """See `contract.Shell`. Of several commands at once each waits for the one before it."""

    def __init__(self, state: ContainerState, start: Callable[[str], Awaitable[Program]]) -> None:
        """`start` starts a program of a kind in the container."""
        self._state, self._start = state, start
        self._program: Program | None = None
        self._output = CommandOutput()
        self._lock = asyncio.Lock()
        self._entering = ""  # command by which each bash enters its environment
        self._directory: str | None = None  # in which the last command began

    async def open(self) -> Program:
        """Return its bash, a new one where the last has ended; that enters the environment and the directory again."""
        if self._program is not None and not self._program.ended.done():
            return self._program
        self._forget()
        program = self._program = await self._start("shell")
        if self._directory is not None:
            await self._come_back(program, self._directory)
        program.channel.on_output = lambda data: self._output.feed(data)
        return program

    async def enter(self, command: str, *, seconds: float) -> CommandResult:
        """Run a command now, and first in every bash that takes the place of this one."""
        self._entering = command
        return await self.run(command, seconds=seconds, max_characters=MAX_ENTER)

    async def run(self, command: str, *, seconds: float, max_characters: int) -> CommandResult:
        """Run a command; see `contract.Shell`. What programs in the background print comes with the next command."""
        async with self._lock:
            program = await self.open()
            try:
                status, note = await self._run(program, command, seconds)
            except BaseException:  # also a cancelled caller: whatever runs there must not meet the next command
                self._forget()
                raise
            if note:
                self._output.feed(f"\n{note}".encode())
            text, num_dropped = self._output.text(max_characters)
            self._output = CommandOutput()
            return CommandResult(status=status, output=text, num_dropped=num_dropped)

    async def _run(self, program: Program, command: str, seconds: float) -> tuple[int | None, str]:
        """Return the status, and what is to be said of the shell."""
        before, result = program.known(), asyncio.get_running_loop().create_future()
        self._directory = program.directory or self._directory
        text = shlex.quote(command.replace("\0", ""))
        sending = self._send(program, result, f"{{ eval {text} ; }} </dev/null >&4 2>&1 3>&- 4>&-\n")
        status: int | None = None
        try:
            if await self._state.wait([result, program.ended], seconds):
                program.channel.drain()
                if not program.ended.done():
                    return result.result(), ""
                status, note = program.ended.result(), ENDED.format(program.ended.result())
            elif await self._interrupt(program, result, before):
                program.channel.drain()
                if not program.ended.done():
                    return None, ""
                note = ENDED.format(program.ended.result())
            else:
                note = STUCK
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            program.forget_marks()
        self._forget()
        await self.open()
        return status, note

    async def _come_back(self, program: Program, directory: str) -> None:
        """Let a new bash enter the environment and a directory; one that does not in time takes commands as it is."""
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        text = shlex.quote(f"{self._entering or ':'}\nbuiltin cd -- {shlex.quote(directory)}")
        sending = self._send(program, result, f"{{ eval {text} ; }} </dev/null >/dev/null 2>&1 3>&- 4>&-\n")
        try:
            await self._state.wait([result, program.ended], ENTER_SECONDS)
            program.channel.drain()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            program.forget_marks()

    def _send(self, program: Program, result: asyncio.Future[int], line: str) -> asyncio.Future[None]:
        """Send a line and, after it, one that prints a mark, which sets the result."""
        mark = secrets.token_hex(16)
        program.expect(mark, result)
        text = f"{line}\\builtin echo {mark} $? >&3\n"
        return asyncio.ensure_future(program.channel.send(text.encode(errors="surrogateescape")))

    async def _interrupt(self, program: Program, result: asyncio.Future[int], before: Known) -> bool:
        """Stop what a command has started; return whether the bash takes commands again, or has ended.

        A program that ignores the interrupt is killed; until the bash is interrupted again, its command goes on.
        """
        program.interrupt_started(before)
        again = self._send(program, result, "\n")  # the interrupt may have met the line with the mark
        try:
            await self._state.wait([result, program.ended], GRACE_SECONDS)
            for _ in range(KILL_STEPS):
                left = program.kill_started(before)
                for _ in range(INTERRUPTS):  # at once, before its command goes on
                    if not left and (result.done() or program.ended.done()):
                        return True
                    if not result.done():
                        program.interrupt_started(before)
                    await asyncio.sleep(INTERRUPT_SECONDS)
                self._state.check()
            return False
        finally:
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)

    def _forget(self) -> None:
        if self._program is not None:
            self._program.end()
            self._program = None
