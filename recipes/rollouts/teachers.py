"""Teachers of on-policy distillation: each is asked how likely it finds the tokens that the policy has sampled.

A teacher is a model server of the configuration, and is asked as a judge is: at its address, or on engines that the run
starts. A row's agent decides which teacher is asked. The whole sequence goes out as token ids, so teacher and policy
must have one vocabulary; back comes the log-probability of every token. A rollout about which no answer comes ends
without a verdict, and so without a part in the loss: an answer that is missing is no judgement.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.config.keys.derive import MODELS, TEACHER_OF_ALL, servers
from recipes.config.tree import Config
from recipes.environments.contract.http import JsonClient, RefusedError
from recipes.environments.scoring.judge import JudgeClient, JudgeFailedError
from recipes.environments.scoring.judge_servers import server_of
from recipes.types import Rollout, RolloutStatus, Row, Turn

MOST_AT_ONCE = 64  # sequences of one copy of a teacher, from all rollout workers


@dataclass(frozen=True, slots=True)
class Teacher:
    """One teacher, at its servers."""

    client: JudgeClient

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after those before it, 0 for the first.

        Raises `JudgeFailedError`.
        """
        return await self.client.within_time(lambda: self._ask(token_ids))

    async def _ask(self, token_ids: Sequence[int]) -> list[float]:
        asked = {
            "model": self.client.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            **self.client.extra,
        }
        return read_logprobs(await self.client.post("completions", asked), token_ids)


def read_logprobs(body: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Return what a completion says of the tokens of its prompt; raises `RefusedError` where it does not."""
    try:
        entries = body["choices"][0]["prompt_logprobs"]
        pairs = zip(entries[1:], token_ids[1:], strict=True)
        found = [0.0, *(float(one[str(token)]["logprob"]) for one, token in pairs)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RefusedError(f"no log-probability of every token in its reply ({error!r})") from error
    if not all(map(math.isfinite, found)):
        raise RefusedError("a log-probability in its reply is not finite")
    return found


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of all agents."""

    by_agent: Mapping[str, Teacher]

    @classmethod
    def from_config(cls, config: Config, *, num_sharers: int = 1) -> Teachers | None:
        """Return the teachers that `grpo.adv_estimator.teachers` names; None where it names none.

        `num_sharers` processes ask the same teachers: each asks its share of what may be asked at once.
        """
        named = config.grpo.adv_estimator.teachers
        if not named:
            return None
        http, made = JsonClient(), {}
        for name, _, settings in servers(config, MODELS):
            if name in named.values():
                server = server_of(name, settings)
                server = replace(server, max_concurrency=MOST_AT_ONCE * max(len(server.urls), 1))
                made[name] = Teacher(server.shared_by(num_sharers).client(http, seconds=config.deadlines.rollout))
        return cls({agent: made[name] for agent, name in named.items()})

    def ask_at(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Ask teachers, by name, at these addresses from the next sequence on."""
        for teacher in self.by_agent.values():
            teacher.client.ask_at(addresses)

    async def score(self, row: Row, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Return the rollouts with the log-probabilities of the teacher of their row."""
        agent = row.get("agent_ref", {}).get("name", "")
        teacher = self.by_agent.get(agent) or self.by_agent.get(TEACHER_OF_ALL)
        if teacher is None:
            return tuple(without_teacher(one, f"no teacher for rows of {agent}") for one in rollouts)
        return tuple(await asyncio.gather(*(_scored(teacher, one) for one in rollouts)))


async def _scored(teacher: Teacher, rollout: Rollout) -> Rollout:
    if not rollout.is_valid:
        return rollout
    try:
        turns, *branches = [await _sequence(teacher, own) for own in (rollout.turns, *rollout.branches)]
    except JudgeFailedError as error:
        return without_teacher(rollout, f"teacher {error}")
    return replace(rollout, turns=turns, branches=tuple(branches))


async def _sequence(teacher: Teacher, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    ids = [token for turn in turns for token in (*turn.prompt_token_ids, *turn.token_ids)]
    values, place, found = await teacher.logprobs(ids) if ids else [], 0, []
    for turn in turns:
        place += len(turn.prompt_token_ids)
        found.append(replace(turn, teacher_logprobs=tuple(values[place : place + len(turn.token_ids)])))
        place += len(turn.token_ids)
    return tuple(found)


def without_teacher(rollout: Rollout, reason: str) -> Rollout:
    """Return a rollout that has no verdict, since no teacher has answered."""
    return replace(rollout, status=RolloutStatus.JUDGE_FAILED, reason=reason, reward=None)
