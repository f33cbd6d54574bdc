"""Rows that are there twice, and validation rows that training rows give away.

Within a split, two rows are the same when agent and request are equal. Across splits a validation row also counts as
known when its text differs only in case, spacing or Unicode form, or when most of what is its own - the runs of words
that few validation rows share, which leaves out instructions and templates - occurs in one training row.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import orjson

from recipes.environments.chat.messages import flat_text
from recipes.types import Row

SHINGLE = 8  # words and signs in a run
MAX_SHARING = 2  # validation rows that may share a run before it counts as a template
MIN_OWN = 8  # runs of its own that a row needs to be compared by them
NEAR = 0.8  # share of its own runs that makes a row known

WORD = re.compile(r"\w+|[^\w\s]")


def request_key(row: Row) -> bytes:
    """Return a digest of agent and request."""
    content = orjson.dumps([row["agent_ref"]["name"], row["responses_create_params"]], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=16).digest()


def text_of(row: Row) -> str:
    """Return all text that the row's user and system messages hold, in lower case, with single spaces.

    A SWE task has none, for its agent writes the prompt: its text is the instance with its problem.
    """
    request = row["responses_create_params"]
    items, metadata = request["input"], request.get("metadata")
    if not items and isinstance(metadata, dict):
        items = "\n".join(str(metadata.get(key) or "") for key in ("instance_id", "problem_statement"))
    if not isinstance(items, str):
        items = "\n".join(flat_text(item["content"]) for item in items if isinstance(item.get("content"), str | list))
    return " ".join(unicodedata.normalize("NFKC", items).casefold().split())


def shingles(text: str) -> set[int]:
    """Return the hashes of every run of `SHINGLE` words and signs."""
    words = WORD.findall(text)
    return set(map(hash, zip(*(words[at:] for at in range(SHINGLE)), strict=False)))


@dataclass(slots=True)
class HeldOut:
    """The validation rows, to be compared with each training row. Memory grows with them only."""

    texts: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    own: dict[int, set[int]] = field(default_factory=dict)  # line -> runs of its own
    _holders: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # run -> lines
    _known: set[int] = field(default_factory=set)  # lines reported already

    @classmethod
    def of(cls, rows: Iterable[tuple[int, str]]) -> HeldOut:
        """Return the rows (line, text) without what they share."""
        held_out = cls()
        for number, text in rows:
            held_out.texts[_digest(text)].append(number)
            held_out.own[number] = shingles(text)
        sharing = Counter(run for runs in held_out.own.values() for run in runs)
        for number, runs in held_out.own.items():
            own = {run for run in runs if sharing[run] <= MAX_SHARING}
            held_out.own[number] = own
            if len(own) >= MIN_OWN:
                for run in own:
                    held_out._holders[run].append(number)
        return held_out

    def forget(self) -> None:
        """Report every row again."""
        self._known.clear()

    def known_by(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield (validation line, how) for validation rows that a training row's text gives away, each once."""
        for number in self.texts.get(_digest(text), ()):
            if number not in self._known:
                self._known.add(number)
                yield number, "the text"
        if not self._holders:
            return
        shared = Counter(number for run in self._holders.keys() & shingles(text) for number in self._holders[run])
        for number, count in shared.items():
            share = count / len(self.own[number])
            if share >= NEAR and number not in self._known:
                self._known.add(number)
                yield number, f"{100 * share:.0f} % of what is its own"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
