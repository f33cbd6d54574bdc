"""Work is spread evenly over engines, siblings and turns stay together, and engines that are closed get nothing."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import pytest

from recipes.generation.clients import router as module
from recipes.generation.clients.router import Balance
from recipes.generation.serving.requests import Request
from recipes.types import Sampling

IDS = itertools.count()
GROUP = 16


def request(prompt: int, rollout: int = 0, turn: int = 0, *, num_prompt: int = 100, max_tokens: int = 900) -> Request:
    return Request(
        id=next(IDS),
        token_ids=b"",
        num_prompt_tokens=num_prompt,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=max_tokens),
        affinity=prompt,
        sample=(rollout, turn),
    )


def groups_per_engine(engine_of: dict[tuple[int, int], int | None], num_engines: int) -> list[int]:
    """Return how many groups each engine has; every group must lie on one engine."""
    by_group = defaultdict(set)
    for (prompt, _), engine in engine_of.items():
        by_group[prompt].add(engine)
    assert all(len(engines) == 1 for engines in by_group.values())
    counts = Counter(next(iter(engines)) for engines in by_group.values())
    return [counts[engine] for engine in range(num_engines)]


def test_256_groups_on_144_engines_differ_by_one_group_at_most() -> None:
    asked = [(prompt, rollout) for prompt in range(256) for rollout in range(GROUP)]
    balance = Balance(144)
    counts = groups_per_engine({key: balance.choose(request(*key), ()) for key in asked}, 144)
    assert sum(counts) == 256
    assert max(counts) - min(counts) <= 1


def test_groups_whose_siblings_come_one_by_one_stay_together_too() -> None:
    """A group counts by the siblings that have come, so the spread is larger; but no group is split."""
    asked = [(prompt, rollout) for prompt in range(256) for rollout in range(GROUP)]
    random.Random(0).shuffle(asked)
    balance = Balance(144)
    counts = groups_per_engine({key: balance.choose(request(*key), ()) for key in asked}, 144)
    assert sum(counts) == 256
    assert max(counts) - min(counts) <= 2


def test_uneven_groups_differ_by_the_largest_group_at_most() -> None:
    lengths = random.Random(1)
    balance, largest = Balance(24), 0
    for prompt in range(100):
        length = int(lengths.lognormvariate(8, 1.2))
        for rollout in range(GROUP):
            balance.choose(request(prompt, rollout, num_prompt=length), ())
        largest = max(largest, GROUP * (length + 900))
        assert max(balance.work) - min(balance.work) <= largest


def test_work_stays_even_while_answers_of_uneven_length_come_and_new_groups_follow() -> None:
    """An engine whose answers are short gets more groups: what counts is what is left, not what was given."""
    chance = random.Random(2)
    balance = Balance(12)
    open_requests: list[tuple[int, Request]] = []
    for prompt in range(400):
        while len(open_requests) > 24 * GROUP:  # two groups an engine; engine 0 answers three times as fast
            weights = [3 if engine == 0 else 1 for engine, _ in open_requests]
            [number] = chance.choices(range(len(open_requests)), weights)
            balance.release(*open_requests.pop(number))
        for rollout in range(GROUP):
            asked = request(prompt, rollout)
            engine = balance.choose(asked, ())
            assert engine is not None
            open_requests.append((engine, asked))
        assert max(balance.work) - min(balance.work) <= 2 * GROUP * 1000


def test_a_late_sibling_leaves_an_overloaded_engine_and_later_ones_follow_it() -> None:
    balance = Balance(3)
    first = balance.choose(request(0), ())
    assert first == 0 == balance.choose(request(0, 1), ())
    for prompt in (3, 6):  # other work comes to each engine, three times as much to the first
        balance.choose(request(prompt, num_prompt=2100), (1, 2))
    for prompt in (1, 2):
        balance.choose(request(prompt), ())
    moved = balance.choose(request(0, 2), ())
    assert moved in (1, 2)
    assert balance.choose(request(0, 3), ()) == moved


def test_a_group_alone_stays_together_beside_idle_engines() -> None:
    balance = Balance(8)
    assert {balance.choose(request(5, rollout), ()) for rollout in range(64)} == {5}


def test_turns_stay_with_their_session_also_when_its_engine_is_busy() -> None:
    balance = Balance(4)
    turn = request(0)
    assert balance.choose(turn, ()) == 0
    balance.release(0, turn)  # the agent runs a tool now
    for prompt in range(4, 40, 4):
        balance.choose(request(prompt), (1, 2, 3))
    assert balance.choose(request(0, 0, 1), ()) == 0
    assert balance.choose(request(0, 1), ()) != 0  # a new rollout of the same prompt is free to go


def test_a_closed_engine_gets_nothing_and_is_filled_first_when_it_is_back() -> None:
    balance = Balance(4)
    placed = [(balance.choose(asked, ()), asked) for asked in (request(prompt) for prompt in range(8))]
    lost = [asked for engine, asked in placed if engine == 1]
    for asked in lost:
        balance.release(1, asked)
    assert balance.work[1] == 0
    again = [balance.choose(asked, {1: "dead"}) for asked in lost]
    assert 1 not in again and len(again) == 2
    assert [balance.choose(request(1, 0, turn), {1: "dead"}) for turn in (1, 2)] == [again[0]] * 2  # its new session
    assert balance.choose(request(20), ()) == 1
    assert balance.choose(request(21), range(4)) is None


def test_nothing_is_left_when_all_is_answered() -> None:
    balance = Balance(5)
    open_requests = [(balance.choose(asked, ()), asked) for asked in (request(n % 7, n) for n in range(200))]
    for engine, asked in open_requests:
        assert engine is not None
        balance.release(engine, asked)
    assert balance.work == [0] * 5
    assert not balance._of_prompt


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_HOMES", 10)
    balance = Balance(2)
    for prompt in range(100):
        balance.choose(request(prompt), ())
    assert len(balance._homes) == 10


def spread(num_clients: int, *, tells: bool) -> float:
    """Let clients that share 12 engines work for a while; return the largest over the mean work, as a mean over time.

    Each group is some client's. Between two reports of the engines, each of them answers one request.
    """
    chance = random.Random(3)
    clients = [Balance(12) for _ in range(num_clients)]
    queues: list[list[tuple[int, Request]]] = [[] for _ in range(12)]
    prompts, spreads = itertools.count(), []
    while len(spreads) < 300:
        while sum(map(len, queues)) < 2 * GROUP * len(queues):
            prompt, client = next(prompts), chance.randrange(num_clients)
            for rollout in range(GROUP):
                asked = request(prompt, rollout)
                engine = clients[client].choose(asked, ())
                assert engine is not None
                queues[engine].append((client, asked))
        for engine, queue in enumerate(queues):
            if queue:
                client, done = queue.pop(chance.randrange(len(queue)))
                clients[client].release(engine, done)
        work = [sum(one.work[engine] for one in clients) for engine in range(len(queues))]
        spreads.append(max(work) * len(work) / sum(work))
        if tells:
            for one in clients:
                one.work_of_others = [every - own for every, own in zip(work, one.work, strict=True)]
    return sum(spreads) / len(spreads)


def test_clients_that_are_told_of_each_other_spread_their_work_like_one() -> None:
    single, told, alone = spread(1, tells=False), spread(16, tells=True), spread(16, tells=False)
    assert single < 1.3 and told < 1.05 * single
    assert alone > 1.3 * single, "what they are told must matter"


def test_what_others_do_keeps_a_new_group_away_but_never_a_session() -> None:
    balance = Balance(3)
    turn = request(0)
    assert balance.choose(turn, ()) == 0
    balance.release(0, turn)
    balance.work_of_others = [50_000, 10, 30_000]
    assert balance.choose(request(3), ()) == 1
    assert balance.choose(request(0, 0, 1), ()) == 0, "its turns are there"
    assert balance.choose(request(0, 1), ()) == 1, "a sibling leaves an overloaded engine"
