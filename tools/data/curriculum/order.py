"""The order of training, and the choice of rows to edit: pure functions of profiled rows and a seed.

Which rows are edited depends on the seed and the row ids, never on the places of rows in the file. At any point of the
order, the number of rows of a domain differs from its share by less than one row.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipes.errors import DataError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRow:
    """What the curriculum needs to know about one row."""

    index: int  # place in the file, from 0
    row_id: str
    domain: str
    pass_rate: float | None
    has_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRateSchedule:
    """The pass rates to draw: a normal distribution whose mean moves linearly from the first step to the last."""

    prompts_per_step: int
    first_mean: float
    last_mean: float
    std: float

    def mean(self, step: int, num_steps: int) -> float:
        """Return the mean pass rate in `step`, which counts from 0."""
        done = step / (num_steps - 1) if num_steps > 1 else 0.0
        return self.first_mean + done * (self.last_mean - self.first_mean)


Pools = Mapping[str, list[ProfiledRow]]
"""Domain -> its rows."""


def without_solved(entries: Sequence[ProfiledRow], *, max_pass_rate: float) -> list[ProfiledRow]:
    """Return the rows with a pass rate below `max_pass_rate`, and those without a pass rate."""
    return [entry for entry in entries if entry.pass_rate is None or entry.pass_rate < max_pass_rate]


def gaussian_order(
    entries: Sequence[ProfiledRow], schedule: PassRateSchedule, *, shares: Mapping[str, float], seed: int
) -> list[ProfiledRow]:
    """Return the rows in training order: each step has fixed shares of domains and pass rates drawn from `schedule`.

    Without `shares` a domain's share is that of its rows, and every row is used. With `shares` the order ends with the
    last whole step before a domain runs out of rows. Rows are shuffled within a step. Raises `DataError` for rows
    without a pass rate and for shares that do not fit.
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
        pool.sort(key=lambda entry: entry.pass_rate or 0.0)  # a stable sort: rows of equal rates stay shuffled
    rates = {domain: [entry.pass_rate or 0.0 for entry in pool] for domain, pool in pools.items()}
    drawn = dict.fromkeys(shares, 0)
    order: list[ProfiledRow] = []
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


def _pools(entries: Sequence[ProfiledRow]) -> Pools:
    unrated: dict[str, int] = {}
    pools: dict[str, list[ProfiledRow]] = {}
    for entry in entries:
        pools.setdefault(entry.domain, []).append(entry)
        if entry.pass_rate is None:
            unrated[entry.domain] = unrated.get(entry.domain, 0) + 1
    if unrated:
        fix = "run `make profile` to the end (its file is --pass-rates), or remove those rows"
        raise DataError(
            [
                Problem(where=domain, wrong=f"{count} rows have no pass rate", fix=fix)
                for domain, count in sorted(unrated.items())
            ]
        )
    return dict(sorted(pools.items()))


def _check_shares(
    pools: Mapping[str, Sequence[ProfiledRow]], shares: Mapping[str, float], prompts_per_step: int
) -> int:
    """Return how many rows fit into whole steps."""
    if unknown := sorted(shares.keys() - pools.keys()):
        got, expected = ", ".join(unknown), f"domains of {', '.join(pools)}"
        raise DataError(Problem(where="shares", got=got, expected=expected, fix="correct the names"))
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) <= 0:
        got, fix = f"a sum of {sum(shares.values()):g}", "give each domain its part of a batch"
        raise DataError(Problem(where="shares", got=got, expected="positive numbers that sum to 1", fix=fix))
    num_steps = int(min(len(pools[domain]) / share for domain, share in shares.items()) / prompts_per_step + 1e-9)
    if num_steps < 1:
        counts = ", ".join(f"{domain} {len(pool)}" for domain, pool in pools.items())
        wrong = f"there are too few rows for one step of {prompts_per_step} ({counts})"
        fix = "lower gaussian.prompts_per_step, or change shares"
        raise DataError(Problem(where="shares", wrong=wrong, fix=fix))
    return num_steps * prompts_per_step


def _quotas(shares: Mapping[str, float], drawn: Mapping[str, int], total: int) -> dict[str, int]:
    """Return how many rows to draw from each domain so that `total` rows are drawn in all.

    Each row comes from the domain that is furthest below its share. Such a domain always has a row left: as long as
    rows are to be drawn, at least one domain is below its share.
    """
    quotas = dict.fromkeys(shares, 0)
    for _ in range(total - sum(drawn.values())):
        missing = {domain: round(share * total - drawn[domain] - quotas[domain], 9) for domain, share in shares.items()}
        quotas[max(missing, key=lambda domain: (missing[domain], domain))] += 1
    return quotas


def _nearest(ordered: Sequence[float], value: float) -> int:
    """Return the index of the value nearest to `value` in an ascending sequence that is not empty."""
    at = bisect_left(ordered, value)
    if at == len(ordered) or (at > 0 and value - ordered[at - 1] <= ordered[at] - value):
        return at - 1
    return at


def choose(entries: Sequence[ProfiledRow], count: int, *, seed: int, what: str) -> frozenset[int]:
    """Return the indices of `count` of the rows, chosen by the hash of seed, `what` and row id."""

    def rank(entry: ProfiledRow) -> tuple[bytes, int]:
        return hashlib.blake2b(f"{seed}:{what}:{entry.row_id}".encode(), digest_size=8).digest(), entry.index

    return frozenset(entry.index for entry in sorted(entries, key=rank)[:count])
