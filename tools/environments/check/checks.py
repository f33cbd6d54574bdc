"""The checks of one environment, and what each of them came to."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from recipes.environments.contract.verifier import NoVerdict, Verdict, all_text, function_calls
from tools.environments.check import probes
from tools.environments.check.answers import KEY, goldens, is_said_in, value_of, wrongs
from tools.environments.check.probes import Trial
from tools.environments.check.target import Scorer, Target

NEARLY = 1e-6  # rewards that differ by less are equal
JUNK_VALUES: tuple[Any, ...] = (None, 5, -1.5, True, "x", "", [], {}, [None], [5], ["x"], {"a": None}, [{"a": [None]}])
ROW_KEYS = frozenset({"responses_create_params", "agent_ref", KEY})  # that every row has, whatever its environment
ONLY_OF = {"empty patch": "swerl_gen", "false proof": "math_formal_lean"}  # probes in the notation of one of ours
MAX_SHOWN = 150  # characters of a reason


class Status(StrEnum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_APPLICABLE = "n/a"
    KNOWN = "known"  # a weakness that is documented, and found again


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table."""

    check: str
    status: Status
    why: str
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class TriedRow:
    """One row, with what was found out about it."""

    row: Mapping[str, Any]
    full: float  # what a right answer earns
    golden: dict[str, Any] | None = None
    is_telling: bool = True  # whether a plain wrong answer earns less


@dataclass(slots=True, kw_only=True)
class Checker:
    """Checks one target on some rows."""

    target: Target
    rows: Sequence[Mapping[str, Any]]
    limit_seconds: float  # for one verdict
    slowest: tuple[float, str] = (0.0, "nothing was asked")
    cases: list[TriedRow] = field(default_factory=list)

    async def run(self) -> list[Result]:
        """Return the results of all checks, in the order of the table."""
        self.cases = [TriedRow(row=row, full=self.target.full) for row in self.rows]
        results = [await self._timed(check) for check in (self._golden, self._wrong, self._others)]
        for group in (probes.empty, probes.malformed, probes.junk, probes.hostile, probes.huge):
            results.append(await self._group(list(group())))
        results += await self._adversarial()
        for check in (self._determinism, self._broken_rows, self._dead):
            results.append(await self._timed(check))
        results.append(self._time())
        return results

    async def _timed(self, check: Callable[[], Any]) -> Result:
        start = time.monotonic()
        result: Result = await check()
        return replace(result, seconds=time.monotonic() - start)

    async def _ask(
        self, row: Mapping[str, Any], response: Mapping[str, Any], what: str, scorer: Scorer | None = None
    ) -> Verdict | NoVerdict:
        """Return the verdict on one answer, and remember the slowest."""
        sent = {key: value for key, value in row.items() if key != KEY}
        start = time.monotonic()
        verdict = await (scorer or self.target.scorer).verify(sent, response)
        self.slowest = max(self.slowest, (time.monotonic() - start, what))
        return verdict

    async def _golden(self) -> Result:
        """A right answer earns the full reward. What it earns is what other answers must stay below."""
        self.target.judge.approves = True
        check, reasons, found = "right answer", [], 0
        for case in self.cases:
            try:
                candidates = goldens(self.target.name, case.row)
            except Exception as error:  # the row, or its schema, is not of the form that the derivation knows
                reasons.append(f"no right answer could be derived: {type(error).__name__}: {error}")
                continue
            self.target.judge.passes_with_no = tuple(_passes_with_no(case.row))
            best: Verdict | None = None
            for candidate in candidates:
                verdict = await self._ask(case.row, candidate, check)
                if isinstance(verdict, NoVerdict):
                    reasons.append(f"no verdict: {verdict.reason}")
                elif best is None or verdict.reward > best.reward:
                    best, case.golden = verdict, candidate
                if best is not None and best.reward >= self.target.full - NEARLY:
                    break
            if best is not None and best.reward >= self.target.full - NEARLY:
                found, case.full = found + 1, best.reward
            elif candidates:
                case.golden = None
                reasons.append(f"reward {best.reward:g}: {best.reason}" if best else "no verdict")
        self.target.judge.approves = False
        return self._golden_result(check, found, reasons)

    def _golden_result(self, check: str, found: int, reasons: list[str]) -> Result:
        total = len(self.cases)
        if found == total:
            return Result(check=check, status=Status.PASS, why=f"full reward on {found} of {total} rows")
        if found and not reasons:
            why = f"full reward on {found} of {total} rows, none could be derived for the others"
            return Result(check=check, status=Status.PASS, why=why)
        if not reasons:
            why = f"none can be derived from a row; give it as {KEY}.golden"
            return Result(check=check, status=Status.NOT_APPLICABLE, why=why)
        is_missing = found == 0 and all("no verdict" in reason or "derived" in reason for reason in reasons)
        status = Status.NOT_APPLICABLE if is_missing and self.target.dead is not None else Status.FAIL
        if found and all("derived" in reason for reason in reasons):
            status = Status.PASS
        return Result(check=check, status=status, why=_cut(f"full reward on {found} of {total} rows; {reasons[0]}"))

    async def _wrong(self) -> Result:
        """A wrong answer earns less than a right one. Rows that are exempt from that are left out from here on."""
        check, without, reason = "wrong answer", 0, ""
        judged, paid, exempt = 0, list[str](), list[str]()
        for case in self.cases:
            rewards = []
            for number, answer in enumerate(wrongs(case.row)):
                verdict = await self._ask(case.row, answer, check)
                if isinstance(verdict, NoVerdict):
                    reason = f"no verdict: {verdict.reason}"
                    continue
                rewards.append(verdict.reward)
                if number == 0 and verdict.reward >= case.full - NEARLY:
                    case.is_telling = False
                    why = self._exempt(case).get("any text")
                    (exempt if why else paid).append(why or verdict.reason)
            judged += bool(rewards)
            if rewards and min(rewards) >= case.full - NEARLY:
                without, reason = without + 1, f"a wrong answer earned {min(rewards):g}"
        note = f"; {len(exempt)} rows are exempt: {exempt[0]}" if exempt else ""
        if not judged:
            status = Status.NOT_APPLICABLE if self.target.dead is not None else Status.FAIL
            return Result(check=check, status=status, why=_cut(reason))
        if without == judged and not exempt:
            return Result(check=check, status=Status.FAIL, why=_cut(reason))
        if paid:
            why = f"plain text earned all on {len(paid)} of {judged} rows, which are not exempt: {paid[0]}"
            return Result(check=check, status=Status.FAIL, why=_cut(why))
        return Result(check=check, status=Status.PASS, why=f"less on {judged - without} of {judged} rows{note}")

    def _exempt(self, case: TriedRow) -> Mapping[str, str]:
        try:
            return self.target.exempt(case.row)
        except Exception:  # a row that cannot be read; the checks say so
            return {}

    async def _others(self) -> Result:
        """A right answer to one row is none to another one, on half of the pairs at least."""
        check, num_paid, reason = "answer of another row", 0, ""
        told = [case for case in self.cases if case.is_telling and "another row" not in self._exempt(case)]
        goldens = [case.golden for case in self.cases if case.golden is not None]
        pairs = [(case, golden) for case in told for golden in goldens if not _is_equal(golden, case.golden)]
        for case, golden in pairs:
            verdict = await self._ask(case.row, golden, check)
            if isinstance(verdict, Verdict) and verdict.reward >= case.full - NEARLY:
                num_paid, reason = num_paid + 1, verdict.reason
        if not pairs:
            why = "no two rows with right answers that differ"
            return Result(check=check, status=Status.NOT_APPLICABLE, why=why)
        status = Status.FAIL if num_paid * 2 > len(pairs) else Status.PASS
        return Result(check=check, status=status, why=_cut(f"paid on {num_paid} of {len(pairs)} pairs {reason}"))

    async def _adversarial(self) -> list[Result]:
        """Return one result per probe, over all rows that tell."""
        names: dict[tuple[str, str], list[tuple[TriedRow, Trial]]] = {}
        for case in (case for case in self.cases if case.is_telling):
            for probe in probes.adversarial(case.row, case.golden):
                if not _is_by_chance(case, probe) and not (
                    probe.name == "said twice" and probe.name in self._exempt(case)
                ):
                    names.setdefault((probe.group, probe.name), []).append((case, probe))
        results = []
        for (group, name), pairs in names.items():
            check = f"{group}: {name}"
            if why := self._unfit(group):
                results.append(Result(check=check, status=Status.NOT_APPLICABLE, why=why))
            else:
                results.append(await self._below_full(check, pairs))
        if not results:
            why = "every row rewards any text" if self.cases else "there is no row"
            results.append(Result(check="adversarial answers", status=Status.NOT_APPLICABLE, why=why))
        return results

    def _unfit(self, group: str) -> str:
        """Return why probes of a group try nothing here, "" when they do."""
        if group == "judge prompt injection" and not self.target.asks_judge:
            return "it asks no judge"
        if group == "harness tampering" and not self.target.runs_programs:
            return "it runs no program"
        if not self.target.url and group in ONLY_OF and self.target.name != ONLY_OF[group]:
            return f"it is no {ONLY_OF[group]}"
        return ""

    async def _group(self, given: Sequence[Trial]) -> Result:
        """Return the result of probes that do not depend on the row: on the first row that tells."""
        told = [case for case in self.cases if case.is_telling]
        check = given[0].group
        chosen = [(next((case for case in told if not _is_by_chance(case, probe)), None), probe) for probe in given]
        pairs = [(case, probe) for case, probe in chosen if case is not None]
        if not pairs:
            return Result(check=check, status=Status.NOT_APPLICABLE, why="every row rewards any text")
        return await self._below_full(check, pairs)

    async def _below_full(self, check: str, pairs: Sequence[tuple[TriedRow, Trial]]) -> Result:
        """Return whether every probe earned less than a right answer, and got a verdict at all."""
        start = time.monotonic()
        highest, without, problem = -float("inf"), 0, ""
        for case, probe in pairs:
            verdict = await self._ask(case.row, probe.response, f"{probe.group}: {probe.name}")
            if isinstance(verdict, NoVerdict):
                without += 1
                escapes = probe.group != "malformed response" and not self._has_no_dependency_here
                problem = problem or (f"{probe.name}: no verdict ({verdict.reason})" if escapes else "")
                continue
            highest = max(highest, verdict.reward)
            if verdict.reward >= case.full - NEARLY:
                problem = f"{probe.name}: reward {verdict.reward:g} ({verdict.reason})"
                break
        seconds = time.monotonic() - start
        if problem:
            return Result(check=check, status=Status.FAIL, why=_cut(problem), seconds=seconds)
        if without == len(pairs):
            status = Status.PASS if pairs[0][1].group == "malformed response" else Status.NOT_APPLICABLE
            return Result(check=check, status=status, why=f"no verdict on all {without}", seconds=seconds)
        told = f"at most {highest:g} of {max(case.full for case, _ in pairs):g} on {len(pairs)} answers"
        why = f"{told}, {without} without a verdict" if without else told
        return Result(check=check, status=Status.PASS, why=why, seconds=seconds)

    @property
    def _has_no_dependency_here(self) -> bool:
        """Whether no row got a verdict on a right answer: what the environment needs is not on this machine."""
        return self.target.dead is not None and all(case.golden is None for case in self.cases)

    async def _determinism(self) -> Result:
        """The same answer gets the same verdict again."""
        check, count = "determinism", 0
        for case in self.cases:
            answers = [*([case.golden] if case.golden else []), *wrongs(case.row)]
            texts = ("printed verdict", "format trick")
            answers += [probe.response for probe in probes.adversarial(case.row, None) if probe.group in texts]
            for answer in answers:
                first, second = [_told(await self._ask(case.row, copy.deepcopy(answer), check)) for _ in range(2)]
                count += 1
                if first != second:
                    return Result(check=check, status=Status.FAIL, why=_cut(f"{first}, then {second}"))
        return Result(check=check, status=Status.PASS, why=f"{count} answers, twice each")

    async def _broken_rows(self) -> Result:
        """A row with a field of a wrong type is refused by name, never with an accident."""
        check, count, refused = "rows with broken fields", 0, 0
        if self.target.parse is None:
            return Result(check=check, status=Status.NOT_APPLICABLE, why="only the server reads its rows")
        for case in self.cases:
            for field_name, row in _broken(case.row):
                count += 1
                try:
                    self.target.parse(row)
                except ValueError:
                    refused += 1
                except Exception as error:  # what is looked for
                    why = f"field '{field_name}': {type(error).__name__}: {error}, expected a ValueError"
                    return Result(check=check, status=Status.FAIL, why=_cut(why))
        return Result(check=check, status=Status.PASS, why=f"{refused} of {count} refused, none by accident")

    async def _dead(self) -> Result:
        """A judge or a sandbox that does not answer gives no verdict, and in time."""
        check = "dead dependency"
        if self.target.dead is None:
            why = "the server's own" if self.target.url else "it needs no judge and no sandbox"
            return Result(check=check, status=Status.NOT_APPLICABLE, why=why)
        asked, dead = 0, self.target.dead
        pairs = [
            (case.row, answer)
            for case in self.cases
            for answer in (*([case.golden] if case.golden else []), *wrongs(case.row)[:1])
        ]
        # All at once: each one waits for as long as a verifier looks for what is gone.
        verdicts = await asyncio.gather(*(self._ask(row, answer, check, dead) for row, answer in pairs))
        for (row, answer), verdict in zip(pairs, verdicts, strict=True):
            if isinstance(verdict, NoVerdict):
                asked += 1
                continue
            alive = await self._ask(row, answer, check)
            if not isinstance(alive, Verdict) or alive.reward != verdict.reward:
                return Result(check=check, status=Status.FAIL, why=_cut(f"reward {verdict.reward:g}"))
        if not asked:
            return Result(check=check, status=Status.NOT_APPLICABLE, why="no answer needed it")
        return Result(check=check, status=Status.PASS, why=f"no verdict on {asked} answers that needed it")

    def _time(self) -> Result:
        seconds, what = self.slowest
        status = Status.PASS if seconds <= self.limit_seconds else Status.FAIL
        why = f"slowest {seconds:.2f} s of {self.limit_seconds:g} s ({what})"
        return Result(check="bounded time", status=status, why=why)


def _is_by_chance(case: TriedRow, probe: Trial) -> bool:
    """Return whether a probe that does not depend on the row may be its right answer."""
    return not probe.holds_the_answer and is_said_in(value_of(case.row), all_text(probe.response))


def _is_equal(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Return whether two answers say and call the same."""
    seen = [
        (all_text(given), [(call.get("name"), call.get("arguments")) for call in function_calls(given)])
        for given in (one or {}, other or {})
    ]
    return seen[0] == seen[1]


def _told(verdict: Verdict | NoVerdict) -> str:
    if isinstance(verdict, NoVerdict):
        return f"no verdict ({verdict.status})"
    return f"reward {verdict.reward!r}"


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_SHOWN else f"{flat[: MAX_SHOWN - 3]}..."


def _passes_with_no(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the questions of a rubric that a right answer is denied on."""
    rubric = row.get("rubric")
    for item in rubric if isinstance(rubric, list) else ():
        if isinstance(item, Mapping) and str(item.get("pass_criteria", "")).strip().upper() == "NO":
            yield str(item.get("question"))


def _broken(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a field, and the row with a wrong value there, two levels deep."""
    for key, value in row.items():
        if key in ROW_KEYS:
            continue
        yield key, {name: kept for name, kept in row.items() if name != key}
        for junk in JUNK_VALUES:
            yield key, {**row, key: junk}
        for inner, broken in _broken_inside(value):
            yield f"{key}.{inner}", {**row, key: broken}
    for junk in JUNK_VALUES:
        yield "responses_create_params.input", {**row, "responses_create_params": {"input": junk}}


def _broken_inside(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in list(value)[:10]:
            yield from ((key, {**value, key: junk}) for junk in JUNK_VALUES)
    elif isinstance(value, list) and value:
        yield from (("0", [junk, *value[1:]]) for junk in JUNK_VALUES)
        yield from ((f"0.{name}", [broken, *value[1:]]) for name, broken in _broken_inside(value[0]))
