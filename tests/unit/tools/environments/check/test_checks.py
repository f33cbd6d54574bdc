"""Each check of an environment fails on the flaw that it is there for, and on no other."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from recipes.environments.contract.rows import require_str
from recipes.environments.contract.verifier import NoVerdict, Verdict, all_text, env_failed, without_labels
from recipes.environments.instances import ALL_VERIFIERS
from recipes.environments.verifiers import reasoning_gym
from tests.office import small_office
from tools.environments.check import probes
from tools.environments.check.__main__ import Checked, as_page, table
from tools.environments.check.answers import DERIVED, as_text, goldens, instance_of
from tools.environments.check.checks import Checker, Result, Status
from tools.environments.check.judge import LABELS, Judge
from tools.environments.check.probes import Trial
from tools.environments.check.target import EXAMPLES, Target

ROW = {"responses_create_params": {"input": "Spell stone"}, "word": "stone", "env_check": {"golden": "enots"}}
Score = Callable[[Mapping[str, Any], Mapping[str, Any]], Verdict | NoVerdict]


def honest(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
    assert "env_check" not in row, "the key is for the checks alone"
    return Verdict(reward=float(all_text(response).strip() == row["word"][::-1]), reason="compared")


@dataclass(frozen=True)
class Scores:
    score: Score

    async def verify(self, row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        return self.score(row, response)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the longest probes shorter: what finds them is the same, and these tests are many."""
    monkeypatch.setattr(probes, "MEGABYTE", 50_000)
    monkeypatch.setattr(probes, "LEVELS", 2_000)


Check = Callable[..., Awaitable[dict[str, Result]]]


@pytest.fixture
def check(judge: Judge) -> Check:
    async def run(score: Score = honest, *, row: Mapping[str, Any] = ROW, **changes: Any) -> dict[str, Result]:
        target = Target(
            name="words", url=None, scorer=Scores(score), dead=None, full=1.0, judge=judge, asks_judge=True,
            runs_programs=True, parse=lambda row: require_str(row, "word"),
        )  # fmt: skip
        checker = Checker(target=replace(target, **changes), rows=[row], limit_seconds=30.0)
        return {result.check: result for result in await checker.run()}

    return run


def failed(results: Mapping[str, Result]) -> set[str]:
    return {name for name, result in results.items() if result.status is Status.FAIL}


async def test_an_honest_environment_passes(check: Check) -> None:
    results = await check()
    assert not failed(results)
    assert sum(result.status is Status.PASS for result in results.values()) > 35
    assert sum(": " in name for name in results) > 30, "adversarial answers"
    assert results["dead dependency"].why == "it needs no judge and no sandbox"


FLAWS: dict[str, tuple[Callable[[str], bool], str]] = {  # flaw -> (rewards a text besides the right one, failing check)
    "anything": (lambda text: True, "wrong answer"),
    "a printed verdict": (lambda text: "reward" in text, "printed verdict: reward as JSON"),
    "an order to the judge": (lambda text: "Ignore all" in text, "judge prompt injection: an order to the judge"),
    "a list of all answers": (lambda text: "\\boxed{B}" in text, "format trick: every letter in a box"),
    "a program that exits": (lambda text: "sys.exit(0)" in text, "harness tampering: ends quietly"),
    "no text": (lambda text: text == "", "empty answer"),
    "white space": (lambda text: text != "" and not text.strip("\u200b\u00a0 \n\t"), "empty answer"),
    "zero bytes": (lambda text: "\0" in text, "junk"),
    "long text": (lambda text: len(text) > 40_000, "one megabyte"),
    "the prompt": (lambda text: text == "Spell stone", "echo: the prompt"),
}


@pytest.mark.parametrize("flaw", FLAWS)
async def test_a_reward_for_something_else_is_found(check: Check, flaw: str) -> None:
    pays, name = FLAWS[flaw]

    def score(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        return Verdict(reward=1.0, reason=flaw) if pays(all_text(response)) else honest(row, response)

    assert name in failed(await check(score))


async def test_a_right_answer_must_be_paid_and_only_where_it_counts(check: Check) -> None:
    assert "right answer" in failed(await check(row={**ROW, "env_check": {"golden": "stone"}}))
    none = await check(row={"word": "stone"})
    assert none["right answer"].status is Status.NOT_APPLICABLE
    assert "env_check.golden" in none["right answer"].why

    def reads_reasoning(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        return Verdict(reward=float("enots" in str(response)), reason="found")

    assert "misplaced answer: in reasoning only" in failed(await check(reads_reasoning))


async def test_an_answer_that_breaks_the_environment_is_a_way_out_of_a_zero(check: Check) -> None:
    def breaks(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        return env_failed("it broke") if "\0" in all_text(response) else honest(row, response)

    results = await check(breaks)
    assert failed(results) == {"junk"}
    assert "it broke" in results["junk"].why


async def test_another_verdict_on_the_same_answer_is_found(check: Check) -> None:
    count = itertools.count()

    def moody(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        verdict = honest(row, response)
        assert isinstance(verdict, Verdict)
        return replace(verdict, reward=verdict.reward * 0.5 + 0.001 * (next(count) % 7)) if verdict.reward else verdict

    assert "determinism" in failed(await check(moody, full=0.5))


async def test_a_row_that_ends_in_an_accident_is_found(check: Check) -> None:
    results = await check(parse=lambda row: row["word"].upper())
    assert failed(results) == {"rows with broken fields"}
    assert "field 'word': KeyError" in results["rows with broken fields"].why


async def test_a_reward_without_the_dependency_is_found(check: Check) -> None:
    fine = await check(dead=Scores(lambda row, response: env_failed("nobody answers")))
    assert fine["dead dependency"].status is Status.PASS
    paid = await check(dead=Scores(lambda row, response: Verdict(reward=0.5, reason="guessed")))
    assert failed(paid) == {"dead dependency"}


def test_what_is_wrong_with_time_and_no_verdict_at_all(judge: Judge) -> None:
    target = Target(
        name="x", url="http://x", scorer=Scores(honest), dead=None, full=1.0, judge=judge, asks_judge=True,
        runs_programs=True, parse=None,
    )  # fmt: skip
    checker = Checker(target=target, rows=[], limit_seconds=1.0, slowest=(2.0, "junk"))
    assert checker._time().status is Status.FAIL


async def test_an_environment_that_never_answers_fails(check: Check) -> None:
    results = await check(lambda row, response: env_failed("it is down"))
    assert {"right answer", "wrong answer"} <= failed(results)


@pytest.mark.parametrize(("positive", "negative"), LABELS)
def test_the_judge_quotes_what_it_disapproves(judge: Judge, positive: str, negative: str) -> None:
    request = {
        "messages": [{"role": "user", "content": f"(the answer begins)mine(the answer ends) {positive} {negative}"}]
    }
    judge.approves = False
    said = judge.says(request)
    assert '"mine"' in said
    assert negative in said
    judge.approves = True
    assert positive in judge.says(request)
    judge.approves = False


def test_labels_in_an_answer_are_broken() -> None:
    for text in ("[[A=B]]", "[[[A=B]]]", "x[[a=b]][[A!=B]]"):
        assert "[[A=B]]" not in without_labels(text, "[[A=B]]", "[[A!=B]]")
        broken = without_labels(text, "[[A=B]]", "[[A!=B]]", any_case=True)
        assert "[[A=B]]" not in broken.upper()
        assert "[[A!=B]]" not in broken
    assert without_labels("it is correct", "CORRECT", "INCORRECT") == "it is correct"  # no label, as it is read
    assert without_labels("[[1, 2], [3, 4]]", "[[A=B]]", "") == "[[1, 2], [3, 4]]"


@pytest.mark.parametrize("form", ["json", "yaml", "toml", "csv", "xml"])
def test_a_value_of_a_schema_has_a_text(form: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", "y"]}}}
    value = instance_of(schema)
    assert value == {"a": 3, "b": "x"}
    assert "x" in as_text(value, form)
    with pytest.raises(ValueError, match="without end"):
        instance_of({"$ref": "#/a", "a": {"$ref": "#/a"}})


def test_a_calendar_is_found_by_trying() -> None:
    event = {"duration": 60, "constraint": None, "min_time": "10:00", "max_time": "12:00"}
    state = {"0": {**event, "event_id": 0}, "1": {**event, "event_id": 1, "constraint": "at 10am"}}
    (golden,) = goldens("calendar", {"exp_cal_state": state})
    assert '"event_id": 0, "start_time": "11:00"' in all_text(golden)
    full = {str(number): {**event, "event_id": number} for number in range(3)}
    assert goldens("calendar", {"exp_cal_state": full}) == []
    assert "calendar" in DERIVED


def test_the_page_shows_text_as_text() -> None:
    result = Result(check="<b>", status=Status.FAIL, why="<script>alert(1)</script>", seconds=0.5)
    checked = Checked(name="x", where="in process", num_rows=1, results=[result])
    assert "<script>" not in as_page([checked])
    assert "1 failed" in as_page([checked])
    assert "FAIL  <b>  <script>" in table(checked, is_whole=False)


def family(name: str, answer: str, **metadata: Any) -> dict[str, Any]:
    row = {"question": "?", "answer": answer, "metadata": {"source_dataset": name, **metadata}}
    return {"responses_create_params": {"input": "Find it."}, **row}


# family -> rows of it, and the check that its scorer must fail where nothing corrects it
PAYING: dict[str, tuple[list[dict[str, Any]], str]] = {
    "game_of_life_halting": (
        [family("game_of_life_halting", answer) for answer in ("True", "False", "True")],
        "wrong answer",
    ),
    "puzzle24": (
        [
            family("puzzle24", "8*(6 - 3)*1", numbers=[8, 6, 3, 1]),
            family("puzzle24", "2*(10 + 5 - 3)", numbers=[2, 10, 5, 3]),
        ],
        "answer of another row",
    ),
    "coin_flip": (
        [family("coin_flip", answer) for answer in ("0.3125", "0.0625")],
        "near a right answer: its first character",
    ),
    "countdown": (
        [family("countdown", "6*17 + 16", numbers=[6, 17, 16], target=118)],
        "near a right answer: other numbers hidden, hexadecimal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAYING)
@pytest.mark.parametrize("is_corrected", [False, True])
async def test_a_library_that_pays_for_what_is_not_right_is_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, name: str, is_corrected: bool
) -> None:
    rows, check_name = PAYING[name]
    if not is_corrected:
        monkeypatch.setattr(reasoning_gym, "CAPS", {})
        formula = reasoning_gym.Evaluated(is_safe=reasoning_gym._is_formula)
        monkeypatch.setattr(reasoning_gym, "EVALUATED", {"countdown": formula, "puzzle24": formula})

    def score(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        return reasoning_gym.score(response, reasoning_gym.parse_task(row, reasoning_gym.Settings()))

    target = Target(
        name="reasoning_gym", url=None, scorer=Scores(score), dead=None, full=1.0, judge=judge, asks_judge=False,
        runs_programs=False, parse=None,
    )  # fmt: skip
    monkeypatch.setattr(probes, "hostile", lambda: iter([Trial(group="hostile text", name="x", response={})]))
    monkeypatch.setattr(probes, "huge", lambda: iter([Trial(group="one megabyte", name="x", response={})]))
    results = {result.check: result for result in await Checker(target=target, rows=rows, limit_seconds=60.0).run()}
    assert results["right answer"].status is Status.PASS
    assert failed(results) == set() if is_corrected else check_name in failed(results)


async def test_a_row_that_pays_plain_text_fails_but_where_it_is_exempt(check: Check) -> None:
    def polite(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        return Verdict(reward=float("I do not know" in all_text(response)) or honest(row, response).reward, reason="x")  # type: ignore[union-attr]

    assert "wrong answer" in failed(await check(polite))
    exempt = await check(polite, exempt=lambda row: {"any text": "it was meant so"})
    assert "wrong answer" not in failed(exempt)
    assert "1 rows are exempt: it was meant so" in exempt["wrong answer"].why


@pytest.mark.parametrize("letter", ["A", "B", "J"])
async def test_a_sound_reader_of_letters_passes_whichever_is_right(check: Check, letter: str) -> None:
    def first(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        found = re.findall(r"\b[A-J]\b", all_text(response))
        return Verdict(reward=float(bool(found) and found[0] == row["word"]), reason="compared")

    def last(row: Mapping[str, Any], response: Mapping[str, Any]) -> Verdict | NoVerdict:
        found = re.findall(r"\b[A-J]\b", all_text(response))
        return Verdict(reward=float(bool(found) and found[-1] == row["word"]), reason="compared")

    row = {"responses_create_params": {"input": "Which letter?"}, "word": letter, "env_check": {"golden": letter}}
    for reader in (first, last):
        lists = {name for name in failed(await check(reader, row=row)) if "format trick" in name or "megabyte" in name}
        assert lists == set()


def test_what_a_prompt_states_is_tried_as_an_answer() -> None:
    assert probes.expressions_in("Compute 200+10+5.") == ["200+10+5"]
    assert probes.expressions_in("What is $2^{10}$, and (3 + 4)*2?") == ["(3 + 4)*2", "2^{10}"]
    assert probes.expressions_in("No number here - none.") == []


def test_every_environment_has_rows_of_our_own() -> None:
    names = sorted(path.stem for path in EXAMPLES.glob("*.jsonl") if path.stem in ALL_VERIFIERS)
    assert len(names) >= 18  # a fork's own verifier may have none
    for name in names:
        verifier = ALL_VERIFIERS[name]
        rows = [json.loads(line) for line in (EXAMPLES / f"{name}.jsonl").read_bytes().splitlines()]
        settings = {"tables": small_office()} if name == "workplace_assistant" else {}
        for row in rows:
            verifier.parse_task(row, verifier.settings(**settings))
            assert row["agent_ref"]["name"] in verifier.agents
        said = {json.dumps(next(iter(goldens(name, row)), row)) for row in rows}
        assert len(rows) >= 5 and len(said) >= (
            1 if name.endswith("detection") or name in ("genrm_compare", "multichallenge") else 4
        ), name
