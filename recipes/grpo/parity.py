"""The parity gate: before the first step of a start, engine and policy must agree on the same tokens.

Both hold the same weights then, so their log-probabilities of one token may differ by rounding only. When they differ
by more (another kernel, a wrongly loaded tensor), training would start with wrong importance weights and mask what it
should learn from. A few tokens of a few real prompts of each environment show it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recipes.config.keys.derive import derive
from recipes.errors import RequestError, RunError
from recipes.grpo.batch import build_batch
from recipes.grpo.rollout import gather_results
from recipes.rollouts.group import PolicyClient
from recipes.tokens import TokenStore, store_rollouts
from recipes.types import Completion, Group, PromptRef, Rollout, RolloutStatus, TrainBatch, Turn

if TYPE_CHECKING:
    from recipes.grpo.run import Run

logger = logging.getLogger(__name__)

_PROMPTS_READ = 256  # from where the run is in its data
_PROMPTS_PER_ENVIRONMENT = 3  # the shortest, the median, the longest
_TOKENS = 32  # sampled after each prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One prompt of the gate."""

    prompt: PromptRef
    agent: str
    token_ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.prompt.key} of {self.agent} ({len(self.token_ids)} prompt tokens)"


def check_parity(run: Run) -> None:
    """Sample a few prompts and compare the log-probabilities of both sides.

    Raises `RunError` naming every prompt above `grpo.parity_error_threshold`, the limit on the mean over its tokens of
    exp(|engine - policy log-probability|); null switches the gate off.
    """
    cfg = run.config
    threshold = cfg.grpo.parity_error_threshold
    if threshold is None or run.state.step >= run.num_steps:
        return
    probes = pick_probes(_candidates(run))
    sampling = replace(run.collector.settings.sampling, max_tokens=min(_TOKENS, cfg.policy.generation.max_new_tokens))
    length = run.collector.settings.max_model_len
    clients = [PolicyClient(run.generation, sampling, length, affinity=n, rollout=0) for n in range(len(probes))]
    futures = [run.collector.submit(_sample(client, probe)) for client, probe in zip(clients, probes, strict=True)]
    answers = gather_results(futures, deadline_seconds=cfg.deadlines.generation, what="the parity gate's prompts")
    sampled = [(probe, answer) for probe, answer in zip(probes, answers, strict=True) if answer and answer.token_ids]
    if not sampled:
        logger.warning(
            "parity of engine and policy not checked: none of the first %d prompts has an answer", _PROMPTS_READ
        )
        return
    size = derive(cfg).data_parallel_size * cfg.policy.logprob_batch_size
    batch = probe_batch(sampled, num_rows=-(-len(sampled) // size) * size, store=run.collector.token_store)
    errors = mult_prob_errors([answer for _, answer in sampled], run.policy.logprobs(batch)[: len(sampled)])
    logger.info("engine and policy agree on %d prompts: mean probability ratio at most %.6f", len(errors), max(errors))
    wrong = [
        f"{probe}: {error:.4g}" for (probe, _), error in zip(sampled, errors, strict=True) if not error <= threshold
    ]
    if wrong:
        raise RunError(
            "engine and policy disagree on tokens that the engine has just sampled: mean probability ratio above "
            f"{threshold:g} (grpo.parity_error_threshold) for {'; '.join(wrong)}"
        )


async def _sample(client: PolicyClient, probe: Probe) -> Completion | None:
    """Return an answer to the prompt; None when the request fails, which would cost a run one rollout only."""
    try:
        return await client.generate(probe.token_ids, max_tokens=_TOKENS)
    except RequestError as failure:
        logger.warning("parity of engine and policy not checked on %s: %s", probe, failure)
        return None


def pick_probes(candidates: Sequence[Probe]) -> list[Probe]:
    """Return the shortest, the median and the longest prompt of each environment."""
    by_agent: defaultdict[str, list[Probe]] = defaultdict(list)
    for probe in candidates:
        by_agent[probe.agent].append(probe)
    picked = []
    for _, probes in sorted(by_agent.items()):
        probes.sort(key=lambda probe: len(probe.token_ids))
        spread = _PROMPTS_PER_ENVIRONMENT - 1
        picked += [probes[index] for index in sorted({(len(probes) - 1) * n // spread for n in range(spread + 1)})]
    return picked


def probe_batch(sampled: Sequence[tuple[Probe, Completion]], *, num_rows: int, store: TokenStore) -> TrainBatch:
    """Return a batch of `num_rows` rows, the samples in turn, as the policy's ranks share rows evenly."""
    rows = [sampled[n % len(sampled)] for n in range(num_rows)]
    headers, tokens = store_rollouts([_as_rollout(probe, answer) for probe, answer in rows], store)
    group = Group(
        prompt=sampled[0][0].prompt,
        agent="",
        prompt_text="",
        target_step=0,
        version=0,
        rollouts=headers,
        tokens=tokens,
    )
    rewards_B = torch.zeros(num_rows, dtype=torch.float64)
    return build_batch([group], rewards_B, overlong_filtering=False, mask_flagged=False)


def _as_rollout(probe: Probe, answer: Completion) -> Rollout:
    turn = Turn(
        prompt_token_ids=probe.token_ids,
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        versions=answer.versions,
        finish_reason=answer.finish_reason,
        routes=answer.routes,
    )
    return Rollout(turns=(turn,), status=RolloutStatus.COMPLETED, reason="", reward=0.0)


def mult_prob_errors(answers: Sequence[Completion], logprobs: Sequence[Tensor]) -> list[float]:
    """Return per answer the mean over its tokens of exp(|g - p|); NaN log-probabilities give NaN.

    `logprobs` are the policy's, of the whole row; the answer is the end of it.
    """
    gaps = [
        torch.tensor(answer.logprobs) - own[-len(answer.logprobs) :]
        for answer, own in zip(answers, logprobs, strict=True)
    ]
    return [float(gap.abs().exp().mean()) for gap in gaps]


def _candidates(run: Run) -> list[Probe]:
    """Return the prompts ahead that can be answered. Rows whose agent writes the prompt give the text of their task."""
    longest = run.collector.settings.max_model_len
    found, failures = [], []
    for ref, row in run.collector.prompts_ahead(_PROMPTS_READ):
        params: Mapping[str, object] = row["responses_create_params"]
        try:
            ids = run.environments.codec.encode(params if params["input"] else _with_task(params))
        except Exception as error:  # a template refuses a row as it likes; its rollouts will fail, and are counted
            failures.append(f"{ref.key}: {type(error).__name__}: {error}")
            continue
        if not params["input"]:
            ids = ids[: longest // 2]  # a task may be longer than a prompt can be; any tokens show a difference
        if len(ids) < longest:
            found.append(Probe(prompt=ref, agent=row["agent_ref"]["name"], token_ids=ids))
    if failures:
        logger.warning("%d prompts ahead cannot be rendered, the first: %s", len(failures), failures[0])
    return found


def _with_task(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of a row whose agent writes the prompt, with the text of its task in place of that prompt."""
    metadata = params.get("metadata")
    task = metadata.get("problem_statement") if isinstance(metadata, Mapping) else None
    task = task if isinstance(task, str) and task else "Repair the program."
    return {**params, "input": [{"role": "user", "content": task}]}
