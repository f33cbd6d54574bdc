"""Duplicate rows, and contamination: validation rows whose text also stands in a training row.

Within a split, two rows are duplicates when agent and request are equal. A validation row is contaminated when a
training row has the same text, apart from case, spacing and Unicode form, or when one training row holds most of its
own n-grams. An n-gram is a run of `SHINGLE` words and signs. It is a row's own when few validation rows share it, so
that instructions and templates do not count.
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

SHINGLE = 8  # words and signs in an n-gram
MAX_SHARING = 2  # an n-gram that more validation rows share belongs to a template
MIN_OWN = 8  # a row with fewer own n-grams is compared by its whole text only
NEAR = 0.8  # share of its own n-grams in one training row that makes a row contaminated

WORD = re.compile(r"\w+|[^\w\s]")


def request_key(row: Row) -> bytes:
    """Return a digest of agent and request."""
    content = orjson.dumps([row["agent_ref"]["name"], row["responses_create_params"]], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=16).digest()


def text_of(row: Row) -> str:
    """Return the text of all messages of a row, in lower case, with single spaces; "" when it has none.

    The rows of a SWE task hold no message, because the agent writes the prompt: their text is the id of the instance
    and its problem statement.
    """
    request = row["responses_create_params"]
    items, metadata = request["input"], request.get("metadata")
    if not items and isinstance(metadata, dict):
        items = "\n".join(str(metadata.get(key) or "") for key in ("instance_id", "problem_statement"))
    if not isinstance(items, str):
        items = "\n".join(flat_text(item["content"]) for item in items if isinstance(item.get("content"), str | list))
    return " ".join(unicodedata.normalize("NFKC", items).casefold().split())


def shingles(text: str) -> set[int]:
    """Return the hash of every n-gram of a text. The hashes differ from process to process."""
    words = WORD.findall(text)
    return set(map(hash, zip(*(words[at:] for at in range(SHINGLE)), strict=False)))


@dataclass(slots=True)
class ValidationTexts:
    """The texts of the validation rows, to compare each training row with. Memory grows with these rows only."""

    texts: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    own: dict[int, set[int]] = field(default_factory=dict)  # line -> its own n-grams
    _holders: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # n-gram -> lines
    _reported: set[int] = field(default_factory=set)  # lines

    @classmethod
    def of(cls, rows: Iterable[tuple[int, str]]) -> ValidationTexts:
        """Return the rows (line, text), each with the n-grams that are its own."""
        held_out = cls()
        for number, text in rows:
            held_out.texts[text_digest(text)].append(number)
            held_out.own[number] = shingles(text)
        sharing = Counter(ngram for ngrams in held_out.own.values() for ngram in ngrams)
        for number, ngrams in held_out.own.items():
            own = {ngram for ngram in ngrams if sharing[ngram] <= MAX_SHARING}
            held_out.own[number] = own
            if len(own) >= MIN_OWN:
                for ngram in own:
                    held_out._holders[ngram].append(number)
        return held_out

    def forget(self) -> None:
        """Forget which rows were reported."""
        self._reported.clear()

    def found_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield (line, what was found) for each validation row that a training row's text contains; each row once."""
        for number in self.texts.get(text_digest(text), ()):
            if number not in self._reported:
                self._reported.add(number)
                yield number, "the text also stands"
        if not self._holders:
            return
        shared = Counter(number for ngram in self._holders.keys() & shingles(text) for number in self._holders[ngram])
        for number, count in shared.items():
            share = count / len(self.own[number])
            if share >= NEAR and number not in self._reported:
                self._reported.add(number)
                yield number, f"{100 * share:.0f} % of its own n-grams also stand"


def text_digest(text: str) -> bytes:
    """Return a digest that equal texts share."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
