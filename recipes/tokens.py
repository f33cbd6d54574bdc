"""The tokens of a finished group as flat arrays, which lie in the object store, and the headers that the driver keeps.

Rollouts differ in length a hundredfold. So nothing is padded here: the rollouts of a group lie end to end in one array
per field, with offsets. What a rank trains on is cut out of them when its microbatch is due.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recipes.errors import TokensLostError
from recipes.types import NUM_FLAGS, Group, Rollout, RolloutHeader, Turn, TurnFlags

Array = NDArray[Any]
TextOf = Callable[[tuple[int, ...]], str]
_TOKENS_LOGGED = 2000  # of an answer: at most some 20 kB of a log
_MOST_JOINED = 8  # tokens that make one character
MOST_CHARACTERS = 2000  # of the reason in a header


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTokens:
    """A sequence of a rollout, cut out of its group: L tokens, N of them sampled, in U turns. The arrays are views."""

    token_ids: Array  # int32 [L], at least one
    sampled_logprobs: Array  # float32 [N]
    turns: Array  # int32 [U, 3], see `GroupTokens`; they cover the tokens
    routes: bytes = b""  # see `recipes.routes`
    sampled_teacher_logprobs: Array | None = None  # float32 [N]; None where no teacher was asked

    def token_mask(self) -> Array:
        """Return float32 [L], 1 on sampled tokens."""
        return self._spread(np.zeros(len(self.turns), np.float32), np.ones(len(self.turns), np.float32))

    def logprobs(self) -> Array:
        """Return float32 [L]: the engine's log-probability of sampled tokens, 0 elsewhere."""
        return self._on_sampled(self.sampled_logprobs)

    def teacher_logprobs(self) -> Array | None:
        """Return float32 [L]: the teacher's log-probability of sampled tokens, 0 elsewhere; None without a teacher."""
        own = self.sampled_teacher_logprobs
        return None if own is None else self._on_sampled(own)

    def _on_sampled(self, values_N: Array) -> Array:
        spread = np.zeros(len(self.token_ids), np.float32)
        spread[self.token_mask() > 0] = values_N
        return spread

    def advantages(self, advantage: float | Array, flag_advantages: Sequence[float | None]) -> Array:
        """Return float32 [L]: on sampled tokens the entry of `flag_advantages` for the flags of their turn.

        `flag_advantages` has an entry for each combination of `TurnFlags`. Where it is None, and on all other tokens,
        the result is `advantage`, a number or [L].
        """
        has_own = np.array([value is None for value in flag_advantages])[self.turns[:, 2]]
        by_flags = np.array([value or 0.0 for value in flag_advantages], np.float32)[self.turns[:, 2]]
        is_own_S = self._spread(np.ones(len(self.turns), np.bool_), has_own)
        flagged_S = self._spread(np.zeros(len(self.turns), np.float32), by_flags)
        return np.where(is_own_S, np.asarray(advantage, np.float32), flagged_S)

    def _spread(self, prompt_values: Array, sampled_values: Array) -> Array:
        """Repeat one value over the prompt, and one over the sampled tokens, of every turn."""
        values = np.stack([prompt_values, sampled_values], axis=1)
        return np.repeat(values.ravel(), self.turns[:, :2].ravel())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTokens:
    """Everything of a group's G rollouts that is as long as their tokens.

    A row is one sequence: the R rows are the sequences of the first rollout, main one first, then those of the second,
    and so on. `x_offsets` is int64 [R + 1]: row r owns the entries x_offsets[r] to x_offsets[r + 1] of `x`. Only texts
    and trajectories are one per rollout: text_offsets is [G + 1].
    """

    token_ids: Array  # int32, prompts and answers of all turns in order
    token_ids_offsets: Array
    logprobs: Array  # float32, natural log, of the sampled tokens
    logprobs_offsets: Array
    turns: Array  # int32 [U, 3]: new prompt tokens, sampled tokens, `TurnFlags`
    turns_offsets: Array
    versions: Array  # int32 [V, 2]: weight version, and how many sampled tokens in a row have it
    versions_offsets: Array
    text: Array  # uint8, the last answer in UTF-8, for logs and the report
    text_offsets: Array
    trajectories: Array = field(default_factory=lambda: np.zeros(0, np.uint8))  # JSON in ASCII, for the log
    trajectories_offsets: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # none in older checkpoints
    routes: Array = field(default_factory=lambda: np.zeros(0, np.uint8))  # of each row, see `recipes.routes`
    routes_offsets: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # none in older checkpoints
    teacher_logprobs: Array = field(default_factory=lambda: np.zeros(0, np.float32))  # as `logprobs`, or empty

    def row(self, row: int) -> RowTokens:
        """Return one row. One without any token has a single token 0 that is not sampled: a row is never empty."""
        token_ids = self._of(row, self.token_ids, self.token_ids_offsets)
        turns = self._of(row, self.turns, self.turns_offsets)
        return RowTokens(
            token_ids=token_ids if len(token_ids) else np.zeros(1, np.int32),
            sampled_logprobs=self._of(row, self.logprobs, self.logprobs_offsets),
            turns=turns if len(token_ids) else np.array([[1, 0, 0]], np.int32),
            routes=self._of(row, self.routes, self.routes_offsets).tobytes() if len(self.routes) else b"",
            sampled_teacher_logprobs=self._of(row, self.teacher_logprobs, self.logprobs_offsets)
            if len(self.teacher_logprobs)
            else None,
        )

    def output_text(self, member: int) -> str:
        """Return the decoded last answer of a rollout."""
        return str(self._of(member, self.text, self.text_offsets).tobytes(), "utf-8", "surrogatepass")

    def trajectory(self, member: int) -> Any:
        """Return what the agent of a rollout did, as it was noted; None where nothing was."""
        if member + 1 >= len(self.trajectories_offsets):
            return None
        return json.loads(self._of(member, self.trajectories, self.trajectories_offsets).tobytes() or b"null")

    def last_answer(self, row: int) -> tuple[Array, Array, list[tuple[int, int]]]:
        """Return the ids of a row's last turn, their log-probabilities, and runs of (weight version, tokens).

        All are empty for a row without any token.
        """
        turns = self._of(row, self.turns, self.turns_offsets)
        num = int(turns[-1][1]) if len(turns) else 0
        ids, logprobs = (
            self._of(row, self.token_ids, self.token_ids_offsets),
            self._of(row, self.logprobs, self.logprobs_offsets),
        )
        spans: list[tuple[int, int]] = []
        left = num
        for version, count in reversed(self._of(row, self.versions, self.versions_offsets).tolist()):
            if left:
                spans.insert(0, (version, min(count, left)))
                left -= spans[0][1]
        return ids[len(ids) - num :], logprobs[len(logprobs) - num :], spans

    @staticmethod
    def _of(number: int, values: Array, offsets: Array) -> Array:
        return values[offsets[number] : offsets[number + 1]]


class TokenStore(Protocol):
    """Where the arrays of groups lie, outside of the driver."""

    def put(self, tokens: GroupTokens) -> Any:
        """Store a group's arrays; returns the reference, which keeps them as long as someone holds it.

        Raises `RunError` when there is no room.
        """
        ...

    def get(self, references: Sequence[Any]) -> list[GroupTokens]:
        """Return the arrays, read-only.

        Raises `StalledError` when they do not come, `TokensLostError` when some are lost.
        """
        ...


def lost_groups(groups: Sequence[Group], store: TokenStore) -> list[Group]:
    """Return the groups whose arrays cannot be read any more. Each is fetched, so ask only when some are known lost."""
    return [group for group in groups if _read(group.tokens, store) is None]


def output_texts(places: Sequence[tuple[Group, int]], store: TokenStore) -> list[str]:
    """Return the decoded last answers of members of groups; "" where the arrays are lost."""
    found = [(_read(group.tokens, store), member) for group, member in places]
    return [tokens.output_text(member) if tokens else "" for tokens, member in found]


def trajectories(places: Sequence[tuple[Group, int]], store: TokenStore) -> list[Any]:
    """Return what the agents of members of groups did; None where nothing was noted or the arrays are lost."""
    found = [(_read(group.tokens, store), member) for group, member in places]
    return [tokens.trajectory(member) if tokens else None for tokens, member in found]


def last_answers(places: Sequence[tuple[Group, int]], store: TokenStore) -> list[Any]:
    """Return `GroupTokens.last_answer` of the main sequences of members of groups; None where the arrays are lost."""
    found = []
    for group, member in places:
        row = sum(1 + len(rollout.branches) for rollout in group.rollouts[:member])
        tokens = _read(group.tokens, store)
        found.append(tokens.last_answer(row) if tokens else None)
    return found


def characters_per_token(token_ids: Sequence[int], text_of: TextOf, text: str) -> list[int]:
    """Return how many characters of `text` each token gave; [] where its beginning is not the text of these tokens.

    A character that several tokens make together counts for the last of them.
    """
    pieces: list[str] = []
    joined: list[int] = []  # tokens that have not made a whole character
    for token in token_ids:
        joined.append(token)
        piece = text_of(tuple(joined))
        is_whole = not piece.endswith("\ufffd") or len(joined) >= _MOST_JOINED
        pieces.append(piece if is_whole else "")
        joined = [] if is_whole else joined
    together = "".join(pieces)
    if not (text.startswith(together) or (text and together.startswith(text))):  # an end token may have no text
        return []
    return [len(piece) for piece in pieces]


def token_record(text_of: TextOf, text: str, answer: Any) -> dict[str, Any] | None:
    """Return for the log the tokens of an answer, from its beginning; None where they do not give its text.

    `characters` has how many characters each token gave, `cost` -100 times its log-probability in the engine, and
    `versions` runs of (weight version, tokens).
    """
    ids, logprobs, spans = answer
    lengths = characters_per_token(ids[:_TOKENS_LOGGED].tolist(), text_of, text)
    costs = [min(round(-100 * value), 9999) if np.isfinite(value) else 9999 for value in logprobs[: len(lengths)]]
    return {"characters": lengths, "cost": costs, "versions": spans} if lengths else None


def _read(reference: Any, store: TokenStore) -> GroupTokens | None:
    """Return the arrays of a group; None where they are lost."""
    try:
        return store.get([reference])[0]
    except TokensLostError:
        return None


def pack_rollouts(rollouts: Sequence[Rollout]) -> tuple[tuple[RolloutHeader, ...], GroupTokens]:
    """Return the headers and the arrays of a group's rollouts; raises `OverflowError` for an id beyond 32 bits."""
    rows = [turns for rollout in rollouts for turns in (rollout.turns, *rollout.branches)]
    ids = [_flat((ids for turn in row for ids in (turn.prompt_token_ids, turn.token_ids)), "i4") for row in rows]
    logprobs = [_flat((turn.logprobs for turn in row), "f4") for row in rows]
    turns = [_table([_turn_entry(turn) for turn in row], 3) for row in rows]
    versions = [_table(_version_runs(row), 2) for row in rows]
    texts = [np.frombuffer(r.output_text.encode("utf-8", "surrogatepass"), np.uint8) for r in rollouts]
    noted = [b"" if r.trajectory is None else json.dumps(r.trajectory).encode() for r in rollouts]
    trajectories = [np.frombuffer(one, np.uint8) for one in noted]
    taught = [_flat((turn.teacher_logprobs or (0.0,) * len(turn.token_ids) for turn in row), "f4") for row in rows]
    is_taught = any(turn.teacher_logprobs for row in rows for turn in row)
    routes = [np.frombuffer(b"".join(turn.routes for turn in row), np.uint8) for row in rows]
    tokens = GroupTokens(
        token_ids=_joined(ids, "i4"),
        token_ids_offsets=_offsets(ids),
        logprobs=_joined(logprobs, "f4"),
        logprobs_offsets=_offsets(logprobs),
        turns=_joined([_table([], 3), *turns], "i4"),
        turns_offsets=_offsets(turns),
        versions=_joined([_table([], 2), *versions], "i4"),
        versions_offsets=_offsets(versions),
        text=_joined(texts, "u1"),
        text_offsets=_offsets(texts),
        trajectories=_joined(trajectories, "u1"),
        trajectories_offsets=_offsets(trajectories),
        routes=_joined(routes, "u1"),
        routes_offsets=_offsets(routes),
        teacher_logprobs=_joined(taught if is_taught else [], "f4"),
    )
    return tuple(_header(rollout) for rollout in rollouts), tokens


def store_rollouts(rollouts: Sequence[Rollout], store: TokenStore) -> tuple[tuple[RolloutHeader, ...], Any]:
    """Put a group's tokens where the policy fetches them; return the headers of its rollouts and the reference."""
    headers, tokens = pack_rollouts(rollouts)
    return headers, store.put(tokens)


def _header(rollout: Rollout) -> RolloutHeader:
    turns, generated, versions = [0] * NUM_FLAGS, [0] * NUM_FLAGS, Counter[int]()
    for turn in rollout.all_turns():
        turns[_flags(turn)] += 1
        generated[_flags(turn)] += len(turn.token_ids)
    for version, count in _version_runs(rollout.all_turns()):
        versions[version] += count
    lengths = [len(turn.token_ids) for turn in rollout.turns] or [0]
    branches = tuple(_sizes(turns) for turns in rollout.branches)
    calls, unknown = (sum(turn.tool_calls[n] for turn in rollout.all_turns()) for n in (0, 1))
    return RolloutHeader(
        status=rollout.status,
        reason=_short(rollout.reason),
        reward=rollout.reward,
        is_flagged=rollout.is_flagged,
        metrics=rollout.metrics,
        seconds=rollout.seconds,
        env_seconds=rollout.env_seconds,
        num_tokens=sum(tokens for tokens, _ in (_sizes(rollout.turns), *branches)),
        num_prompt_tokens=len(rollout.turns[0].prompt_token_ids) if rollout.turns else 0,
        first_answer_tokens=lengths[0],
        last_answer_tokens=lengths[-1],
        longest_answer_tokens=max((len(turn.token_ids) for turn in rollout.all_turns()), default=0),
        turns_by_flags=tuple(turns),
        generated_by_flags=tuple(generated),
        tokens_by_version=tuple(sorted(versions.items())),
        finish_reason=rollout.turns[-1].finish_reason if rollout.turns else None,
        branches=branches,
        tool_calls=(calls, unknown),
    )


def _short(reason: str) -> str:
    """Return the beginning of a reason, without what UTF-8 lacks: it may quote an answer, and the driver keeps it."""
    reason = reason.encode(errors="backslashreplace").decode()  # JSON text may hold half a surrogate pair
    left = len(reason) - MOST_CHARACTERS
    return f"{reason[:MOST_CHARACTERS]} ({left} characters more)" if left > 0 else reason


def _sizes(turns: Sequence[Turn]) -> tuple[int, int]:
    """Return the tokens of a sequence, and how many of them were sampled."""
    sampled = sum(len(turn.token_ids) for turn in turns)
    return sum(len(turn.prompt_token_ids) for turn in turns) + sampled, sampled


def _flags(turn: Turn) -> int:
    invalid = TurnFlags.INVALID_TOOL_CALL if turn.is_invalid_tool_call else 0
    return int(invalid | (TurnFlags.MALFORMED_THINKING if turn.has_malformed_thinking else 0))


def _turn_entry(turn: Turn) -> tuple[int, int, int]:
    return len(turn.prompt_token_ids), len(turn.token_ids), _flags(turn)


def _version_runs(turns: Iterable[Turn]) -> list[tuple[int, int]]:
    spans = (span for turn in turns for span in turn.versions)
    return [(span.version, span.end - span.start) for span in spans if span.end > span.start]


def _flat(parts: Iterable[Sequence[float]], dtype: str) -> Array:
    return _joined([np.asarray(part, dtype) for part in parts], dtype)


def _table(entries: Sequence[tuple[int, ...]], width: int) -> Array:
    return np.array(entries, "i4").reshape(-1, width)


def _joined(parts: Sequence[Array], dtype: str) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _offsets(parts: Sequence[Array]) -> Array:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
