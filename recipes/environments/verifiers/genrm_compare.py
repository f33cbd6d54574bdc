"""Preference among the answers to one prompt: a generative reward model compares them in pairs.

The unit is the group. `pairs` names who is compared with whom, `question` what the model is asked, `read_comparison`
what it said, and `rewards` what follows: the mean of the scores that an answer received, where a tie is broken by the
ranking, plus small terms for short reasoning, short answers and plain style.

A comparison that fails gives no number: one that no reply came to, or whose replies cannot be read after
`genrm_parse_retries` further attempts (which follow at once: another reply is another sample). An answer keeps the mean
of the comparisons that it has; one that has none, like one that no other answer is there for, has no verdict.

Kept from the reference: lengths are characters; the shortest reasoning that is not empty earns the bonus only if its
score is among the best, by a threshold that is taken before any bonus; an answer without text counts as length 0 in the
length terms and is shown to the model as "None"; the reward is not clipped. Not kept: all comparisons are awaited,
where the reference may miss those that still run when the last answer arrives, and counts failed ones as ties; and the
model is shown every text of the conversation, where the reference leaves out what a user says in parts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from recipes.environments.contract import (
    NOT_SET,
    Agent,
    GroupScoring,
    GroupVerifier,
    JudgeQuestion,
    NoReply,
    NoVerdict,
    OneValue,
    PublishedText,
    Reference,
    Response,
    Sampling,
    Unit,
    Verdict,
    all_text,
    json_objects,
    last_message_text,
    optional_str,
    output_items,
    without_labels,
)
from recipes.types import RolloutStatus, Row

PRINCIPLE = """Be an impartial judge. First write your own answer to the request. Then compare the two responses with
it: correctness first, then how helpful, relevant and concise they are, then creativity where the request asks for it,
and what is missing. When the request is ambiguous, a response that asks for what is missing is better than a guess."""
NO_ANSWER = "None"
SCORES = ("score_1", "score_2", "ranking")  # of a reply
_FENCED = re.compile(r"```json(.*?)```", re.DOTALL | re.IGNORECASE)
_CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_MARKS = (
    re.compile(r"^#{1,6}\s", re.MULTILINE),  # headers
    re.compile(r"^[^\S\n]*(?:\d+\.|[-*+])\s", re.MULTILINE),  # list items
    re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__"),  # bold
    re.compile("[\U0001f300-\U0001faff\U0001f000-\U0001f2ff\u2600-\u27bf\ufe0f\u2b00-\u2bff]"),  # emoji
)


Place = tuple[int, int, int]
"""Of a comparison: who was first, who was second, and the number of the opinion on the pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Answers of a group, compared in pairs by a generative reward model."""

    genrm_model_server: Reference = NOT_SET
    """generative reward model that compares two answers"""
    genrm_responses_create_params: Sampling = NOT_SET
    """sampling of the reward model"""
    num_rollouts_per_prompt: Annotated[int, Ge(1), Unit("rollouts")] = NOT_SET
    """answers compared with each other; must be the group"""
    comparison_strategy: Literal["circular", "all_pairs"] = "circular"
    """circular: each with the next, N comparisons; all_pairs: N*(N-1)/2"""
    num_judges_per_comparison: Annotated[int, Ge(1), Unit("calls")] = 1
    """opinions on one pair"""
    use_principle: bool = True
    """give the reward model the principle by which to compare"""
    default_principle: str | None = None
    """principle of rows that bring none; null = as env.judge_texts says"""
    aggregator_method: Literal["simple_tiebreaker"] = "simple_tiebreaker"
    """how comparisons become a score"""
    reasoning_bonus: Annotated[float, Ge(0), Unit("reward")] = 0.5
    """for the shortest reasoning of the group, if its score is among the top ones"""
    answer_bonus: Annotated[float, Ge(0), Unit("reward")] = 0.5
    """for the shortest answer, likewise"""
    top_percentile: Annotated[float, Gt(0), Le(1), Unit("share")] = 0.2
    """share of the group that counts as top"""
    group_reasoning_length_penalty_coeff: Annotated[float, Ge(0), Unit("weight")] = 0.0
    """weight of the reasoning's length within the group"""
    group_answer_length_penalty_coeff: Annotated[float, Ge(0), Unit("weight")] = 0.0
    """weight of the answer's length within the group"""
    group_style_penalty_coeff: Annotated[float, Ge(0), Unit("weight")] = 0.0
    """weight of headings, lists, bold and emoji per character"""
    default_score: Annotated[float, Ge(1), Le(5), Unit("score")] = 3.0
    """score of a reply that leaves one out; 1 to 5"""
    default_ranking: Annotated[float, Ge(1), Le(6), Unit("ranking")] = 3.5
    """ranking of a reply that leaves it out; 1 to 6"""
    genrm_parse_retries: Annotated[int, Ge(0), Unit("attempts")] = 3
    """further attempts at a reply that cannot be read"""
    genrm_parse_retry_sleep_s: Annotated[float, Ge(0), Unit("seconds")] = 0.0
    """pause between them; the native engine makes none"""
    debug_logging: Annotated[bool, OneValue()] = NOT_SET
    """log every comparison"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt and how its answers are compared."""

    history: tuple[tuple[str, str], ...]  # (role, text) of the conversation
    principle: str | None
    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the model says about one pair."""

    score_1: float  # 1 to 5
    score_2: float
    ranking: float  # 1 = the first is much better, 6 = the second is

    @property
    def is_on_scale(self) -> bool:
        """Whether the numbers are ones that the model was asked for: an answer may talk it into any other."""
        return all(1 <= score <= 5 for score in (self.score_1, self.score_2)) and 1 <= self.ranking <= 6

    @property
    def is_tie(self) -> bool:
        """Whether only the ranking tells the two apart."""
        return self.score_1 == self.score_2


def parse_task(row: Row, settings: Settings) -> Task:
    """Read the conversation and the row's `principle`."""
    principle = optional_str(row, "principle") or settings.default_principle or PRINCIPLE
    params = row.get("responses_create_params")
    return Task(
        history=tuple(_history(params.get("input") if isinstance(params, Mapping) else None)),
        principle=principle if settings.use_principle else None,
        settings=settings,
    )


def pairs(num_answers: int, strategy: str) -> list[tuple[int, int]]:
    """Return who is compared with whom, the first member first; "circular": each answer is first once, second once."""
    if num_answers < 2:
        return []
    if strategy == "all_pairs":
        return list(itertools.combinations(range(num_answers), 2))
    return [(first, (first + 1) % num_answers) for first in range(num_answers)]


def score(responses: Sequence[Response], task: Task) -> GroupScoring:
    """Ask for all comparisons at once, again for those whose reply cannot be read, and return the verdicts."""
    chosen = pairs(len(responses), task.settings.comparison_strategy)
    asked = [
        (first, second, judge) for judge in range(task.settings.num_judges_per_comparison) for first, second in chosen
    ]
    compared: dict[Place, Comparison] = {}
    failed: dict[Place, str] = {}
    left = asked
    for _ in range(1 + task.settings.genrm_parse_retries):
        if not left:
            break
        replies = yield [question(task, responses[first], responses[second]) for first, second, _ in left]
        unread = []
        for place, reply in zip(left, replies, strict=True):
            if isinstance(reply, NoReply):
                failed[place] = reply.reason
                continue
            score_of_missing = task.settings.default_score
            found = read_comparison(
                last_message_text(reply), default_score=score_of_missing, default_ranking=task.settings.default_ranking
            )
            if found is None or not found.is_on_scale:
                failed[place] = "no scores in the reply of the reward model" if found is None else f"off scale: {found}"
                unread.append(place)
            else:
                failed.pop(place, None)
                compared[place] = found
        left = unread
    return verdicts(responses, compared, failed, task.settings)


def verdicts(
    responses: Sequence[Response],
    compared: Mapping[Place, Comparison],
    failed: Mapping[Place, str],
    weights: Settings,
) -> list[Verdict | NoVerdict]:
    """Return a verdict per answer; none for an answer without a comparison, which counts in no group term either."""
    places = [[place for place in compared if number in place[:2]] for number in range(len(responses))]
    scored = [number for number in range(len(responses)) if places[number]]
    order = {number: at for at, number in enumerate(scored)}
    among = {(order[first], order[second], judge): found for (first, second, judge), found in compared.items()}
    final, base = rewards([responses[number] for number in scored], among, weights)
    results: list[Verdict | NoVerdict] = []
    for number in range(len(responses)):
        reasons = Counter(reason for place, reason in failed.items() if number in place[:2])
        if number in order:
            at, ties = order[number], sum(compared[place].is_tie for place in places[number])
            results.append(
                Verdict(
                    reward=final[at],
                    reason=f"{base[at]:.2f} of {len(places[number])} comparisons, {final[at] - base[at]:+.2f} for "
                    "length and style",
                    metrics={
                        "comparison_score": base[at],
                        "tie_rate": ties / len(places[number]),
                        "num_failed_comparisons": float(reasons.total()),
                    },
                )
            )
        elif reasons:
            (reason, _), total = reasons.most_common(1)[0], reasons.total()
            results.append(
                NoVerdict(status=RolloutStatus.JUDGE_FAILED, reason=f"each of its {total} comparisons failed: {reason}")
            )
        else:
            results.append(NoVerdict(status=RolloutStatus.ABORTED, reason="there is no other answer to compare with"))
    return results


def question(task: Task, first: Response, second: Response) -> JudgeQuestion:
    """Return what the model is asked about a pair: the conversation, then the three roles of its chat template.

    Names of scores within an answer are broken: the model may quote it, and the quote must not be read as its scores.
    """
    principle = (("principle", task.principle),) if task.principle else ()
    names = [f'"{name}"' for name in SCORES]
    answers = [without_labels(shown_answer(response), *names) for response in (first, second)]
    shown = (("response_1", answers[0]), ("response_2", answers[1]))
    return JudgeQuestion(messages=(*task.history, *principle, *shown))


def shown_answer(response: Response) -> str:
    """Return the answer as the model sees it: its text without reasoning, "None" when there is none."""
    text = all_text(response)
    return text if text.strip() else NO_ANSWER


def read_comparison(text: str, *, default_score: float = 3.0, default_ranking: float = 3.5) -> Comparison | None:
    """Return the scores in a reply, None when there are none: the model must then be asked again.

    The first fenced JSON object that has a score or a ranking counts, also below `overall`; else the last such object
    of the text. A key that is missing has its default; a value that is no number makes the reply unusable.
    """
    candidates = [found for found in map(_scores_in, _FENCED.findall(text)) if found is not None]
    if not candidates:
        candidates = [found for found in map(_scores_in, reversed(list(json_objects(text)))) if found is not None]
    if not candidates:
        return None
    found = {"score_1": default_score, "score_2": default_score, "ranking": default_ranking} | candidates[0]
    try:
        values = [float(found[name]) for name in SCORES]
    except (TypeError, ValueError):
        return None
    if not all(math.isfinite(value) for value in values):
        return None
    return Comparison(score_1=values[0], score_2=values[1], ranking=values[2])


def rewards(
    responses: Sequence[Response], compared: Mapping[tuple[int, int, int], Comparison], weights: Settings
) -> tuple[list[float], list[float]]:
    """Return (rewards, scores before the group terms), one per answer; `compared` is keyed (first, second, judge)."""
    base = base_scores(len(responses), compared, default_score=weights.default_score)
    reasoning = [len(_reasoning_text(response).strip()) for response in responses]
    answers = [len(all_text(response).strip()) for response in responses]
    final = list(base)
    if base:
        threshold = sorted(base, reverse=True)[max(0, math.floor(len(base) * weights.top_percentile) - 1)]
        for lengths, bonus in ((reasoning, weights.reasoning_bonus), (answers, weights.answer_bonus)):
            shortest = min((n for n in range(len(lengths)) if lengths[n]), key=lambda n: lengths[n], default=None)
            if shortest is not None and final[shortest] >= threshold:
                final[shortest] += bonus
    terms = (
        (reasoning, weights.group_reasoning_length_penalty_coeff),
        (answers, weights.group_answer_length_penalty_coeff),
        ([style_density(all_text(response)) for response in responses], weights.group_style_penalty_coeff),
    )
    for values, coefficient in terms:
        if coefficient:
            final = [score + coefficient * share for score, share in zip(final, smaller_is_better(values), strict=True)]
    return final, base


def base_scores(
    num_answers: int, compared: Mapping[tuple[int, int, int], Comparison], *, default_score: float
) -> list[float]:
    """Return the mean of the scores that each answer received; the ranking moves equal scores apart."""
    received: list[list[float]] = [[] for _ in range(num_answers)]
    for (first, second, _), comparison in sorted(compared.items(), key=lambda entry: (entry[0][2], *entry[0][:2])):
        shift = 3.5 - comparison.ranking if comparison.is_tie else 0.0
        received[first].append(comparison.score_1 + shift)
        received[second].append(comparison.score_2 - shift)
    return [sum(scores) / len(scores) if scores else default_score for scores in received]


def smaller_is_better(values: Sequence[float]) -> list[float]:
    """Return, per value, 1 for the smallest down to 0 for the largest, minus the group's mean; 0 when all agree."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return [0.0] * len(values)
    shares = [1.0 - (value - low) / (high - low) for value in values]
    mean = sum(shares) / len(shares)
    return [share - mean for share in shares]


def style_density(text: str) -> float:
    """Return the number of headers, list items, bold spans and emoji per character, outside of code blocks."""
    plain = _CODE_BLOCK.sub("", text)
    num_chars = len(plain.strip())
    return sum(len(mark.findall(plain)) for mark in _MARKS) / num_chars if num_chars else 0.0


def _history(given: object) -> Iterator[tuple[str, str]]:
    if isinstance(given, str):
        yield "user", given
        return
    for item in given if isinstance(given, list) else []:
        role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
        if isinstance(role, str) and role:
            parts = [{"text": content}] if isinstance(content, str) else content if isinstance(content, list) else []
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
            yield role, "\n".join(text for text in texts if isinstance(text, str))


def _reasoning_text(response: Response) -> str:
    summaries = (item.get("summary") for item in output_items(response) if item.get("type") == "reasoning")
    parts = [part for given in summaries if isinstance(given, list) for part in given if isinstance(part, Mapping)]
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _scores_in(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    overall = found.get("overall") if isinstance(found, dict) else None
    scores = overall if isinstance(overall, dict) else found
    if not isinstance(scores, dict):
        return None
    # Spelled out: in what a judge quotes a name is broken, but not where an answer writes it with escapes.
    named = {name: scores[name] for name in SCORES if name in scores and f'"{name}"' in text}
    return named or None


TEXTS = {
    "default_principle": PublishedText(
        side="genrm_compare",
        file="stage3_rlhf.yaml",
        at="env.nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare.default_principle",
    )
}
VERIFIER = GroupVerifier(
    parse_task=parse_task,
    score=score,
    judge="genrm",
    agents={
        "genrm_simple_agent": Agent(kind="single_turn", server="genrm_compare"),
        "genrm_simple_agent_reasoning_off": Agent(
            kind="single_turn",
            server="genrm_compare",
            template_kwargs={"enable_thinking": False, "truncate_history_thinking": False},
        ),
    },
    seconds=3600.0,
    concurrency=256,
    settings=Settings,
    texts=lambda settings: TEXTS if settings.use_principle else {},
)
