"""The editor of a coding agent: it shows and changes files of the container, and can take back what it changed.

Paths and texts come from the model. What is wrong with them is a `ValueError` whose message the model is shown. No file
is read beyond MAX_FILE, so that no file takes the memory of this process.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.swe.contract import Container, Shell

MAX_FILE = 4 << 20  # bytes of a file that is shown or changed
MAX_PATH = 4096  # characters
MAX_UNDO = 32 << 20  # bytes kept to take changes back
MAX_LISTED = 400  # entries of a directory that is shown
LIST_SECONDS = 30.0
MAX_LINE = 4000  # characters shown of one line
AROUND = 4  # lines shown before and after a change
MAX_NAMED = 10  # places named where a text is not the only one


@dataclass(slots=True, kw_only=True)
class Editor:
    """The editor of one rollout."""

    container: Container
    workspace: str  # relative paths begin here
    answers: Mapping[str, str]  # the forms of the harness
    max_characters: int  # of one answer
    _shell: Shell | None = None  # lists directories
    _undo: list[tuple[str, bytes]] = field(default_factory=list)  # path and what the file was, the newest last

    async def run(self, primitive: str, arguments: Mapping[str, Any]) -> str:
        """Run one primitive and return what the model is shown; raises `ValueError` and `ContainerEndedError`."""
        does: Mapping[str, Callable[[str, Mapping[str, Any]], Awaitable[str]]] = {
            "view": self._view,
            "create": self._create,
            "write": self._write,
            "replace": self._replace,
            "insert": self._insert,
            "undo": self._take_back,
        }
        return await does[primitive](self._path(arguments["path"]), arguments)

    def _path(self, path: str) -> str:
        if not path or len(path) > MAX_PATH or "\0" in path:
            raise ValueError(f"the path must have 1 to {MAX_PATH} characters, none of them NUL")
        return posixpath.normpath(posixpath.join(self.workspace, path))

    async def _view(self, path: str, arguments: Mapping[str, Any]) -> str:
        try:
            content = await self.container.read_file(path, max_bytes=MAX_FILE + 1)
        except FileNotFoundError:
            return self.answers["view"].format(path=path, text=await self._listing(path))
        if b"\0" in content[:8192]:
            raise ValueError(f"{path} is a binary file")
        lines = _lines(content[:MAX_FILE].decode("utf-8", "replace")) or [""]
        first, last = _range(arguments, len(lines))
        text, shown = self._numbered(lines, first, last)
        notes = []
        if first + shown - 1 < last:
            notes.append(f"[lines {first + shown} to {last} are not shown: ask for a smaller range]")
        if len(content) > MAX_FILE:
            notes.append(f"[the file has more than {MAX_FILE} bytes; the rest can be read with a shell command]")
        return self.answers["view"].format(path=path, text="\n".join([text, *notes]))

    async def _listing(self, path: str) -> str:
        """Return the entries of a directory, two levels deep; raises `ValueError` for what is no directory."""
        self._shell = self._shell or await self.container.open_shell()
        quoted = shlex.quote(path)
        find = f"find {quoted} -mindepth 1 -maxdepth 2 -name '.*' -prune -o -mindepth 1 -print 2>/dev/null"
        command = f"[ -d {quoted} ] && {{ {find} | LC_ALL=C sort | head -n {MAX_LISTED}; }}"
        done = await self._shell.run(command, seconds=LIST_SECONDS, max_characters=self.max_characters)
        if done.status != 0:
            raise ValueError(f"there is no readable file or directory {path}")
        return done.output.rstrip("\n")

    def _numbered(self, lines: list[str], first: int, last: int) -> tuple[str, int]:
        """Return lines [first, last] with their numbers, and how many fit into one answer."""
        shown: list[str] = []
        room = self.max_characters
        for number in range(first, last + 1):
            line = lines[number - 1].removesuffix("\n")
            line = line if len(line) <= MAX_LINE else line[:MAX_LINE] + f"[{len(line) - MAX_LINE} characters more]"
            entry = self.answers["line"].format(number=number, text=line)
            room -= len(entry) + 1
            if room < 0 and shown:
                break
            shown.append(entry)
        return "\n".join(shown), len(shown)

    async def _create(self, path: str, arguments: Mapping[str, Any]) -> str:
        try:
            await self.container.read_file(path, max_bytes=1)
        except FileNotFoundError:
            await self._put(path, _encoded(arguments["text"]))
            return self.answers["written"].format(path=path)
        raise ValueError(f"{path} exists already; edit it instead")

    async def _write(self, path: str, arguments: Mapping[str, Any]) -> str:
        content = _encoded(arguments["text"])
        try:
            before = await self.container.read_file(path, max_bytes=MAX_FILE + 1)
        except FileNotFoundError:
            before = None
        await self._put(path, content)
        if before is not None and len(before) <= MAX_FILE:
            self._remember(path, before)
        return self.answers["written"].format(path=path)

    async def _replace(self, path: str, arguments: Mapping[str, Any]) -> str:
        old, new = arguments["old"], arguments["new"]
        if not old:
            raise ValueError("the text to replace is empty")
        if old == new:
            raise ValueError("the new text is the same as the old one")
        before = await self._content(path)
        text = _decoded(before)
        count = text.count(old)
        if count == 0:
            raise ValueError(f"the text to replace does not occur in {path}; it must match exactly, with its spaces")
        if count > 1 and not arguments.get("everywhere"):
            places = ", ".join(map(str, _line_numbers(text, old)))
            raise ValueError(f"the text to replace occurs {count} times in {path}, at lines {places}; make it unique")
        if len(text) + count * (len(new) - len(old)) > MAX_FILE:
            raise ValueError(f"the file would be longer than {MAX_FILE} characters")
        at = text.find(old)
        await self._put(path, _encoded(text.replace(old, new)))
        self._remember(path, before)
        changed = text[:at] + new + text[at + len(old) :]
        return self._edited(path, changed, at, len(new))

    async def _insert(self, path: str, arguments: Mapping[str, Any]) -> str:
        line, new = arguments["line"], arguments["new"]
        before = await self._content(path)
        lines = _lines(_decoded(before))
        if not 0 <= line <= len(lines):
            raise ValueError(f"the line must be from 0 to {len(lines)}, the number of lines of {path}")
        head = "".join(lines[:line])
        glue = "\n" if head and not head.endswith("\n") else ""
        new = glue + (new if new.endswith("\n") or line == len(lines) else new + "\n")
        text = head + new + "".join(lines[line:])
        await self._put(path, _encoded(text))
        self._remember(path, before)
        return self._edited(path, text, len(head) + len(glue), len(new) - len(glue))

    async def _take_back(self, path: str, _arguments: Mapping[str, Any]) -> str:
        for number in range(len(self._undo) - 1, -1, -1):
            if self._undo[number][0] == path:
                await self._put(path, self._undo[number][1])
                del self._undo[number]
                return self.answers["written"].format(path=path)
        raise ValueError(f"no change of {path} can be taken back")

    def _edited(self, path: str, text: str, start: int, length: int) -> str:
        """Return what the model is shown of a change: the lines around it."""
        first = text.count("\n", 0, start) + 1
        last = first + text.count("\n", start, start + length)
        lines = _lines(text) or [""]
        shown, _ = self._numbered(lines, max(first - AROUND, 1), min(last + AROUND, len(lines)))
        return self.answers["edited"].format(path=path, text=shown)

    async def _content(self, path: str) -> bytes:
        """Return the bytes of a text file that may be changed."""
        try:
            content = await self.container.read_file(path, max_bytes=MAX_FILE + 1)
        except FileNotFoundError:
            raise ValueError(f"there is no readable file {path}") from None
        if len(content) > MAX_FILE:
            raise ValueError(f"{path} has more than {MAX_FILE} bytes; change it with a shell command")
        if b"\0" in content:
            raise ValueError(f"{path} is a binary file")
        return content

    async def _put(self, path: str, content: bytes) -> None:
        try:
            await self.container.write_file(path, content)
        except OSError as error:
            raise ValueError(f"{path} could not be written: {error.strerror or error}") from None

    def _remember(self, path: str, before: bytes) -> None:
        self._undo.append((path, before))
        while len(self._undo) > 1 and sum(len(content) for _, content in self._undo) > MAX_UNDO:
            del self._undo[0]


def _lines(text: str) -> list[str]:
    """Return the lines of a text with their ends. Only "\\n" ends one, as in other programs: no form feed does."""
    *lines, last = text.split("\n")
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]


def _range(arguments: Mapping[str, Any], num_lines: int) -> tuple[int, int]:
    """Return the first and last line that a call asks for, counted from 1; raises `ValueError` for a wrong range."""
    first, last = 1, num_lines
    if "range" in arguments:
        asked = arguments["range"]
        if len(asked) != 2 or not all(isinstance(bound, int) for bound in asked):
            raise ValueError("the range of lines must be two integers: the first and the last line")
        first, last = asked
        last = num_lines if last == -1 else last
    if "first" in arguments:
        first = arguments["first"]
    if "count" in arguments:
        last = first + arguments["count"] - 1
    if not 1 <= first <= num_lines or last < first:
        raise ValueError(f"lines {first} to {last} are no range of the {num_lines} lines of the file")
    return first, min(last, num_lines)


def _line_numbers(text: str, part: str) -> list[int]:
    """Return the lines in which a text begins, the first MAX_NAMED of them."""
    found: list[int] = []
    at, number, counted = text.find(part), 1, 0
    while at >= 0 and len(found) < MAX_NAMED:
        number += text.count("\n", counted, at)
        counted = at
        found.append(number)
        at = text.find(part, at + len(part))
    return found


def _encoded(text: str) -> bytes:
    content = text.encode("utf-8", "surrogateescape")
    if len(content) > MAX_FILE:
        raise ValueError(f"the file would have {len(content)} bytes, more than {MAX_FILE}")
    return content


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")  # bytes that are no UTF-8 stay as they are
