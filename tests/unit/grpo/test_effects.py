"""What a key of the algorithm changes in what is learned: the real formulas, on a policy of a few numbers.

The policy answers a prompt with one of `ANSWERS`. It chooses with the first token of the answer, and the others follow
from that choice. So a rollout has a length, a verdict and one log-probability that is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recipes.config.load import load_config, require_valid
from recipes.config.tree import Config
from recipes.grpo.advantage import add_advantages
from recipes.grpo.batch import build_batch
from recipes.grpo.loss import grpo_loss
from recipes.grpo.reward import collect_rewards
from recipes.grpo.setup import teaches as is_drawn_for
from recipes.types import Group, LossInputs, Rollout, RolloutStatus, Turn
from tests.groups import group_of

TINY = Path(__file__).resolve().parents[3] / "configs" / "tiny" / "stage1_rlvr.yaml"
MARKER = "{reasoning effort: low}"
G, STEPS = 8, 15


@dataclass(frozen=True)
class Answer:
    """What the policy may write."""

    length: int  # tokens
    reward: float = 1.0
    is_truncated: bool = False


LENGTHS = (Answer(1), Answer(2), Answer(4), Answer(8))
ONE_IS_RIGHT = (Answer(2, 0.0), Answer(2, 1.0), Answer(2, 0.0), Answer(2, 0.0))


def configured(*overrides: str) -> Config:
    return require_valid(load_config(TINY, ["grpo.num_prompts_per_step=2", "policy.model_name=m", *overrides]))


def sampled(
    prompt: str, answers: tuple[Answer, ...], logits_A: Tensor, generator: torch.Generator
) -> tuple[Group, Tensor]:
    """Return a group of the prompt, and the numbers of its answers."""
    chosen_G = torch.multinomial(logits_A.softmax(-1), G, replacement=True, generator=generator)
    rollouts = []
    for answer in (answers[choice] for choice in chosen_G.tolist()):
        turn = Turn(
            prompt_token_ids=(1,),
            token_ids=(2,) * answer.length,
            logprobs=(0.0,) * answer.length,
            versions=(),
            finish_reason="length" if answer.is_truncated else "stop",
        )
        status = RolloutStatus.TRUNCATED if answer.is_truncated else RolloutStatus.COMPLETED
        rollouts.append(Rollout(turns=(turn,), status=status, reason="", reward=answer.reward))
    return group_of(rollouts, prompt_text=prompt), chosen_G


def train_step(
    config: Config, groups: list[Group], chosen_B: Tensor, logits: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Take one optimizer step, from rewards to gradients, as a run does."""
    rewards_B, _ = collect_rewards(groups, config)
    batch = build_batch(groups, rewards_B, overlong_filtering=config.grpo.overlong_filtering, mask_flagged=True)
    batch, _ = add_advantages(batch, groups, config)
    sizes_B = batch.lengths_B - 1
    mask_BT = (torch.arange(int(sizes_B.max()))[None, :] < sizes_B[:, None]).float()
    first_B = logits.log_softmax(-1)[batch.group_B, chosen_B]
    current_BT = torch.nn.functional.pad(first_B[:, None], (0, mask_BT.shape[1] - 1))
    inputs = LossInputs(
        token_mask_BT=mask_BT,
        sample_mask_B=batch.sample_mask_B,
        advantages_BT=batch.advantages_B[:, None].expand_as(mask_BT),
        rewards_B=batch.rewards_B,
        prev_logprobs_BT=current_BT.detach(),
        generation_logprobs_BT=current_BT.detach(),
    )
    sums = grpo_loss(current_BT, inputs, cfg=config.loss_fn, mismatch_threshold=None)
    optimizer.zero_grad()
    (sums.loss / sums.count.clamp(min=1)).backward()
    optimizer.step()


def learned(config: Config, prompts: dict[str, tuple[Answer, ...]], *, steps: int = STEPS) -> list[Tensor]:
    """Train a policy that chooses evenly at first on the same prompts; return the probabilities of its answers."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(len(prompts), 4, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=4.0)
    for _ in range(steps):
        asked = enumerate(prompts.items())
        drawn = [sampled(prompt, answers, logits[row].detach(), generator) for row, (prompt, answers) in asked]
        train_step(config, [group for group, _ in drawn], torch.cat([own for _, own in drawn]), logits, optimizer)
    return list(logits.detach().softmax(-1))


def mean_length(probabilities_A: Tensor, answers: Iterable[Answer]) -> float:
    return float((probabilities_A * torch.tensor([float(answer.length) for answer in answers])).sum())


VARIANTS = {
    "as configured": [],
    "mean baseline": ["grpo.adv_estimator.use_leave_one_out_baseline=false"],
    "not normalised": ["grpo.adv_estimator.normalize_rewards=false"],
    "Reinforce++": ["grpo.adv_estimator.name=reinforce_plus_plus"],
    "sequence ratios": ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
    "CISPO": ["loss_fn.force_on_policy_ratio=false", "loss_fn.use_cispo=true"],
    "REINFORCE": ["loss_fn.force_on_policy_ratio=false", "loss_fn.disable_ppo_ratio=true"],
    "icepop": [
        "loss_fn.truncated_importance_sampling_type=icepop",
        "loss_fn.truncated_importance_sampling_ratio_min=0.5",
    ],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_the_loss_learns_the_right_answer(name: str) -> None:
    [probabilities_A] = learned(configured(*VARIANTS[name]), {"prompt": ONE_IS_RIGHT})
    assert probabilities_A[1] > 0.8


def test_effort_shaping_shortens_the_answers_of_marked_prompts_and_of_no_others() -> None:
    prompts = {f"question {MARKER}": LENGTHS, "question": LENGTHS}
    effort = "env.nemo_gym.effort_levels"
    on = configured(f"{effort}.low_weight=0.5", f"{effort}.low_string='{MARKER}'", f"{effort}.low_ub=4")
    marked_A, other_A = learned(on, prompts)
    assert mean_length(marked_A, LENGTHS) < 2.0 < mean_length(other_A, LENGTHS) == 3.75
    assert [mean_length(own, LENGTHS) for own in learned(configured(), prompts)] == [3.75, 3.75]


def test_length_shaping_shortens_answers_that_come_close_to_the_limit() -> None:
    shaping = ["enabled=true", "max_response_length=8", "overlong_buffer_length=4", "overlong_buffer_penalty=1.0"]
    [shaped_A] = learned(configured(*(f"grpo.reward_shaping.{one}" for one in shaping)), {"prompt": LENGTHS})
    assert shaped_A[3] < 0.05 and shaped_A[:3].min() > 0.2  # below the buffer nothing is penalised


def test_a_factor_on_truncated_answers_teaches_to_stop() -> None:
    answers = (Answer(1), Answer(2), Answer(4), Answer(8, is_truncated=True))
    factor = ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=0.5"]
    [shaped_A] = learned(configured(*factor), {"prompt": answers})
    [plain_A] = learned(configured(), {"prompt": answers})
    assert shaped_A[3] < 0.05 < plain_A[3] == 0.25


def test_the_overlong_filter_takes_truncated_answers_out_of_the_gradient() -> None:
    """The cut answers are wrong and the others right: with the filter nothing is left to compare."""
    answers = (Answer(1), Answer(2), Answer(4), Answer(8, 0.0, is_truncated=True))
    [filtered_A] = learned(configured("grpo.overlong_filtering=true"), {"prompt": answers})
    [all_A] = learned(configured("grpo.overlong_filtering=false"), {"prompt": answers})
    assert filtered_A.tolist() == [0.25] * 4
    assert all_A[3] < 0.05


def steps_until_learned(config: Config, *, teaches: Callable[[Group], bool]) -> int:
    """Return the optimizer steps until the one prompt of eight that is not solved yet is answered well.

    The prompts come in turn, and a step has two groups of those that teach.
    """
    generator, right = torch.Generator().manual_seed(1), (Answer(2),) * 4
    prompts = [right] * 7 + [ONE_IS_RIGHT]
    logits = torch.zeros(len(prompts), 4, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=4.0)
    position = 0
    for step in range(1, 500):
        groups, chosen, rows = list[Group](), list[Tensor](), list[int]()
        for _ in range(2 * config.grpo.dynamic_sampling_max_gen_batches):
            row = position % len(prompts)
            position += 1
            group, own_G = sampled("prompt", prompts[row], logits[row].detach(), generator)
            if teaches(group):
                groups.append(group)
                chosen.append(own_G)
                rows.append(row)
            if len(groups) == 2:
                break
        train_step(config, groups, torch.cat(chosen), logits[torch.tensor(rows)], optimizer)
        if logits[-1].softmax(-1)[1] > 0.7:
            return step
    return 500


def test_dynamic_sampling_needs_fewer_optimizer_steps_for_the_same_reward() -> None:
    config = configured("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=16")
    without = steps_until_learned(config, teaches=lambda _group: True)
    with_it = steps_until_learned(config, teaches=lambda group: is_drawn_for(group, config))
    assert with_it * 2 < without < 500


@pytest.mark.parametrize(
    ("override", "kept_out"),
    [
        ("grpo.overlong_filtering", {"is_truncated": True}),
        ("env.should_mask_flagged_samples", {"is_flagged": True}),
    ],
)
def test_dynamic_sampling_counts_no_answer_that_stays_out_of_the_loss(override: str, kept_out: dict[str, bool]) -> None:
    """DAPO filters both: a group whose only other reward is filtered would fill its place without a gradient."""
    verdicts = [("right", 1.0, {}), ("right", 1.0, {}), ("wrong", 0.0, kept_out)]
    rollouts = [
        Rollout(
            turns=(Turn(prompt_token_ids=(1,), token_ids=(2,), logprobs=(0.0,), versions=(), finish_reason="stop"),),
            status=RolloutStatus.TRUNCATED if marks.get("is_truncated") else RolloutStatus.COMPLETED,
            reason=reason,
            reward=reward,
            is_flagged=marks.get("is_flagged", False),
        )
        for reason, reward, marks in verdicts
    ]
    group = group_of(tuple(rollouts), prompt_text="prompt")
    for is_on in (True, False):
        config = configured(f"{override}={str(is_on).lower()}")
        rewards_B, _ = collect_rewards([group], config)
        batch = build_batch(
            [group],
            rewards_B,
            overlong_filtering=config.grpo.overlong_filtering,
            mask_flagged=config.env.should_mask_flagged_samples,
        )
        final, _ = add_advantages(batch, [group], config)
        assert bool(final.advantages_B.any()) == is_drawn_for(group, config) == (not is_on)


def test_a_prompt_is_no_longer_learned_once_its_verdicts_are_scaled_to_one_number() -> None:
    scaling = ["enabled=true", "source_min=1.0", "source_max=2.0"]  # wrong and right answers are both at the lower end
    config = configured(*(f"grpo.reward_scaling.{one}" for one in scaling))
    assert learned(config, {"prompt": ONE_IS_RIGHT})[0].tolist() == [0.25] * 4
    wider = replace(config.grpo.reward_scaling, source_min=0.0)
    wide = replace(config, grpo=replace(config.grpo, reward_scaling=wider))
    assert learned(wide, {"prompt": ONE_IS_RIGHT})[0][1] > 0.8
