"""The text that a command prints: its beginning and its end are kept, however much there is between them."""

from __future__ import annotations

import codecs
import re

from recipes.environments.swe.contract import KEPT_CHARACTERS

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
