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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.config.keys.derive import derive
from recipes.errors import RunError
from recipes.grpo.batch import pad_turns
from recipes.grpo.rollout import gather_results
from recipes.types import Completion, PromptRef, TrainBatch

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
    futures = [
        run.collector.submit(run.collector.client(sampling, affinity=n).generate(probe.token_ids, max_tokens=_TOKENS))
        for n, probe in enumerate(probes)
    ]
    answers = gather_results(futures, deadline_seconds=cfg.deadlines.generation, what="the parity gate's prompts")
    sampled = [(probe, answer) for probe, answer in zip(probes, answers, strict=True) if answer.token_ids]
    if not sampled:
        logger.warning(
            "parity of engine and policy not checked: none of the first %d prompts has an answer", _PROMPTS_READ
        )
        return
    size = derive(cfg).data_parallel_size * cfg.policy.logprob_batch_size
    batch = probe_batch(
        sampled,
        num_rows=-(-len(sampled) // size) * size,
        pad_token_id=run.pad_token_id,
        divisible_by=cfg.policy.make_sequence_length_divisible_by,
    )
    errors = mult_prob_errors(batch, run.policy.logprobs(batch))[: len(sampled)].tolist()
    logger.info("engine and policy agree on %d prompts: mean probability ratio at most %.6f", len(errors), max(errors))
    wrong = [
        f"{probe}: {error:.4g}" for (probe, _), error in zip(sampled, errors, strict=True) if not error <= threshold
    ]
    if wrong:
        raise RunError(
            "engine and policy disagree on tokens that the engine has just sampled: mean probability ratio above "
            f"{threshold:g} (grpo.parity_error_threshold) for {'; '.join(wrong)}"
        )


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


def probe_batch(
    sampled: Sequence[tuple[Probe, Completion]], *, num_rows: int, pad_token_id: int, divisible_by: int
) -> TrainBatch:
    """Return a batch of `num_rows` rows, the samples in turn, as the policy's ranks share rows evenly."""
    rows = [sampled[n % len(sampled)] for n in range(num_rows)]
    ids_BS, lengths_B, mask_BS, logprobs_BS = pad_turns(
        [[(probe.token_ids, None), (answer.token_ids, answer.logprobs)] for probe, answer in rows],
        pad_token_id=pad_token_id,
        divisible_by=divisible_by,
    )
    return TrainBatch(
        input_ids_BS=ids_BS,
        input_lengths_B=lengths_B,
        token_mask_BS=mask_BS,
        sample_mask_B=torch.ones(num_rows),
        generation_logprobs_BS=logprobs_BS,
        advantages_BS=torch.zeros_like(mask_BS),
        rewards_B=torch.zeros(num_rows, dtype=torch.float64),
        group_B=torch.arange(num_rows),
    )


def mult_prob_errors(batch: TrainBatch, logprobs_BS: Tensor) -> Tensor:
    """Return per row the mean over sampled tokens of exp(|g - p|), [B]; NaN log-probabilities give NaN."""
    mask_BS = batch.token_mask_BS > 0
    gap_BS = torch.where(mask_BS, (batch.generation_logprobs_BS - logprobs_BS).abs(), 0.0)
    return torch.where(mask_BS, gap_BS.exp(), 0.0).sum(dim=1) / mask_BS.sum(dim=1)


def _candidates(run: Run) -> list[Probe]:
    """Return the prompts ahead that can be answered; rows whose agent writes the prompt have none yet."""
    longest = run.collector.settings.max_model_len
    found = []
    for ref, row in run.collector.prompts_ahead(_PROMPTS_READ):
        params: Mapping[str, object] = row["responses_create_params"]
        if params["input"]:
            ids = run.environments.codec.encode(params)
            if len(ids) < longest:
                found.append(Probe(prompt=ref, agent=row["agent_ref"]["name"], token_ids=ids))
    return found
