"""Checks of one row: its shape, its agent, the fields of its verifier, its request, its tools, its length in tokens.

Duplicate rows, and contamination: validation rows whose text also stands in a training row.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.messages import flat_text
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.contract.rows import schema_without_padding
from recipes.environments.contract.texts import OWN
from recipes.environments.contract.verifier import Agent
from recipes.environments.environments import Environments
from recipes.environments.instances import agents_of, find_agent, reading_servers
from recipes.environments.verifiers import instruction_following, mcqa
from recipes.exact_json import dumps, loads
from recipes.grpo.data import check_line as check_shape
from recipes.types import Row

SHINGLE = 8  # words and signs in an n-gram
MAX_SHARING = 2  # an n-gram that more validation rows share belongs to a template
MIN_OWN = 8  # a row with fewer own n-grams is compared by its whole text only
NEAR = 0.8  # share of its own n-grams in one training row that makes a row contaminated

WORD = re.compile(r"\w+|[^\w\s]")


def request_key(row: Row) -> bytes:
    """Return a digest of agent and request, of a row that a table has padded with nulls as of the plain one."""
    content = dumps([row["agent_ref"]["name"], _unpadded(row["responses_create_params"])], sort_keys=True)
    return hashlib.blake2b(content, digest_size=16).digest()


def _unpadded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unpadded(inner) for key, inner in value.items() if inner is not None}
    return [_unpadded(one) for one in value] if isinstance(value, list) else value


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


FAILURES = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
)  # what code raises that expects a well-formed row


@dataclass(slots=True)
class RowChecker:
    """Checks rows one by one; with a codec it also counts their tokens.

    `instances` are the servers and agents of a configuration, and `judge_texts` says whose words it asks judges in;
    without them those that verifiers bring read the rows.
    """

    codec: ChatCodec | None
    instances: Mapping[str, Any] = field(default_factory=dict)
    judge_texts: str = OWN
    _environments: Environments = field(init=False)
    _agents: Mapping[str, Agent] = field(init=False)
    _known_tools: dict[bytes, str | None] = field(default_factory=dict)  # checked once: many rows share their tools

    def __post_init__(self) -> None:
        servers = reading_servers(self.instances, self.judge_texts)
        self._agents = agents_of(self.instances, servers)
        patterns = FlagPatterns(invalid_tool_call=(), thinking_tags=())
        codec = cast(ChatCodec, self.codec)  # without one no template is asked
        self._environments = Environments(codec, servers=servers, agents=self._agents, patterns=patterns)

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Path | None, instances: Mapping[str, Any] | None = None, judge_texts: str = OWN
    ) -> RowChecker:
        """Return a checker with the codec of a Hugging Face directory, or without one; raises `ConfigError`."""
        return cls(ChatCodec(tokenizer) if tokenizer else None, instances or {}, judge_texts)

    def check(self, line: bytes) -> tuple[Row | None, list[tuple[str, str]]]:
        """Return the row of a line and its problems as (kind, text); None for a line without the shape of a row."""
        if not line.strip():
            return None, [("shape", "an empty line")]
        if wrong := check_shape(line, _nothing):
            return None, [("shape", text) for text in wrong]
        row: Row = loads(line)
        try:
            found = [("environment", text) for text in self._environments.check_row(row)]
        except FAILURES as error:
            found = [("environment", f"a row that cannot be read ({type(error).__name__}: {error})")]
        if not found and (text := unrewardable(row, self._agents)):
            found = [("reward", text)]
        return row, found + [("tools", text) for text in self._check_tools(row["responses_create_params"])]

    def num_tokens(self, row: Row) -> int:
        """Return the number of tokens of the first prompt; raises whatever the chat template raises."""
        assert self.codec is not None
        return len(self.codec.encode(row["responses_create_params"]))

    def _check_tools(self, params: Mapping[str, Any]) -> Iterator[str]:
        tools = params.get("tools")
        for position, tool in enumerate(tools if isinstance(tools, list) else ()):
            if not isinstance(tool, Mapping) or "parameters" not in tool:
                continue  # the check of the environment reports a malformed tool
            key = dumps(tool["parameters"])
            if key not in self._known_tools:
                self._known_tools[key] = schema_problem(tool["parameters"])
            if problem := self._known_tools[key]:
                yield f"tool {position} ({tool.get('name')}): parameters are no JSON Schema of an object: {problem}"


def _nothing(_row: Row) -> list[str]:
    return []


def unrewardable(row: Row, agents: Mapping[str, Agent]) -> str | None:
    """Return why no answer to a well-typed row can earn a reward, or None; the verifier itself would only give 0."""
    verifier = find_agent(row["agent_ref"]["name"], agents).server
    if verifier == "mcqa":
        return mcqa.unsolvable(row)
    if verifier == "instruction_following":
        return instruction_following.unanswerable(
            instruction_following.parse_task(row, instruction_following.Settings())
        )
    if verifier == "structured_outputs":
        try:
            loads(row["schema_str"])
        except ValueError as error:
            return f"field 'schema_str': got no JSON ({error})"
    return None


def schema_problem(schema: object) -> str | None:
    """Return why `schema` cannot be the parameters of a tool, or None. A schema of null means no parameters."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    if schema is None:
        return None
    schema = schema_without_padding(schema)
    if not isinstance(schema, Mapping):
        return f"got {schema!r}"
    if schema.get("type", "object") != "object":
        return f"type is {schema['type']!r}"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message}"
    return None
