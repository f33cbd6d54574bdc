"""The order of training, and which rows are changed for it: pure functions over profiled rows, decided by a seed.

A choice depends on the seed and the rows' own ids, never on their place in the file. No domain ever gives a whole row
more than its share.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipes.errors import DataError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the curriculum needs to know of one row."""

    index: int  # place in the file, from 0
    row_id: str
    domain: str
    pass_rate: float | None
    has_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussian:
    """Pass rates aimed at: normal around a mean that moves linearly from the first step to the last."""

    prompts_per_step: int
    first_mean: float
    last_mean: float
    std: float

    def mean(self, step: int, num_steps: int) -> float:
        """Return the mean in `step`, from 0."""
        done = step / (num_steps - 1) if num_steps > 1 else 0.0
        return self.first_mean + done * (self.last_mean - self.first_mean)


def without_solved(entries: Sequence[Entry], *, max_pass_rate: float) -> list[Entry]:
    """Return the rows that are not always solved; a row without a pass rate stays."""
    return [entry for entry in entries if entry.pass_rate is None or entry.pass_rate < max_pass_rate]


def gaussian_order(
    entries: Sequence[Entry], schedule: Gaussian, *, shares: Mapping[str, float], seed: int
) -> list[Entry]:
    """Return the rows in training order: whole steps, fixed shares of domains, harder with time, mixed within a step.

    Without `shares` each domain gets its share of the rows, and every row is used. With them the last step is the one
    before a domain runs out. Raises `DataError` for rows without a pass rate and for shares that do not fit.
    """
    pools = _pools(entries)
    if not pools:
        return []
    total = _check_shares(pools, shares, schedule.prompts_per_step) if shares else len(entries)
    shares = shares or {domain: len(pool) / len(entries) for domain, pool in pools.items()}
    num_steps = -(-total // schedule.prompts_per_step)
    rng = random.Random(f"{seed}:order")
    for pool in pools.values():
        rng.shuffle(pool)
        pool.sort(key=lambda entry: entry.pass_rate or 0.0)  # stable: equal rates stay shuffled
    rates = {domain: [entry.pass_rate or 0.0 for entry in pool] for domain, pool in pools.items()}
    drawn = dict.fromkeys(shares, 0)
    order: list[Entry] = []
    for step in range(num_steps):
        mean = schedule.mean(step, num_steps)
        batch = []
        for domain, count in _quotas(shares, drawn, min(total, (step + 1) * schedule.prompts_per_step)).items():
            for _ in range(count):
                at = _nearest(rates[domain], rng.gauss(mean, schedule.std))
                rates[domain].pop(at)
                batch.append(pools[domain].pop(at))
                drawn[domain] += 1
        rng.shuffle(batch)
        order += batch
    return order


def _pools(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    unrated: dict[str, int] = {}
    pools: dict[str, list[Entry]] = {}
    for entry in entries:
        pools.setdefault(entry.domain, []).append(entry)
        if entry.pass_rate is None:
            unrated[entry.domain] = unrated.get(entry.domain, 0) + 1
    if unrated:
        fix = "run `make profile` to the end (its file is --pass-rates), or remove those rows"
        raise DataError(
            [
                Problem(where=domain, got=f"{count} rows without a pass rate", expected="one for every row", fix=fix)
                for domain, count in sorted(unrated.items())
            ]
        )
    return dict(sorted(pools.items()))


def _check_shares(pools: Mapping[str, Sequence[Entry]], shares: Mapping[str, float], prompts_per_step: int) -> int:
    """Return how many rows can be used in whole steps."""
    if unknown := sorted(shares.keys() - pools.keys()):
        got, expected = ", ".join(unknown), f"domains of {', '.join(pools)}"
        raise DataError(Problem(where="shares", got=got, expected=expected, fix="correct the names"))
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) <= 0:
        got, fix = f"a sum of {sum(shares.values()):g}", "give each domain its part of a batch"
        raise DataError(Problem(where="shares", got=got, expected="positive numbers that sum to 1", fix=fix))
    num_steps = int(min(len(pools[domain]) / share for domain, share in shares.items()) / prompts_per_step + 1e-9)
    if num_steps < 1:
        counts = ", ".join(f"{domain} {len(pool)}" for domain, pool in pools.items())
        expected, fix = f"rows for one step of {prompts_per_step}", "lower gaussian.prompts_per_step, or change shares"
        raise DataError(Problem(where="shares", got=f"too few rows ({counts})", expected=expected, fix=fix))
    return num_steps * prompts_per_step


def _quotas(shares: Mapping[str, float], drawn: Mapping[str, int], total: int) -> dict[str, int]:
    """Return how many rows each domain gives now, so that `total` are drawn: each goes where most is missing.

    What is missing of all together is at least that row, so the domain has less than its share and a row left.
    """
    quotas = dict.fromkeys(shares, 0)
    for _ in range(total - sum(drawn.values())):
        missing = {domain: round(share * total - drawn[domain] - quotas[domain], 9) for domain, share in shares.items()}
        quotas[max(missing, key=lambda domain: (missing[domain], domain))] += 1
    return quotas


def _nearest(ordered: Sequence[float], value: float) -> int:
    """Return the place of the value nearest to `value`."""
    at = bisect_left(ordered, value)
    if at == len(ordered) or (at > 0 and value - ordered[at - 1] <= ordered[at] - value):
        return at - 1
    return at


def choose(entries: Sequence[Entry], count: int, *, seed: int, what: str) -> frozenset[int]:
    """Return the indices of `count` of the rows, which the seed and their ids decide."""

    def rank(entry: Entry) -> tuple[bytes, int]:
        return hashlib.blake2b(f"{seed}:{what}:{entry.row_id}".encode(), digest_size=8).digest(), entry.index

    return frozenset(entry.index for entry in sorted(entries, key=rank)[:count])
