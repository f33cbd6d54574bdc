"""Figures of our own making that every clone compares with: verdicts on example rows, losses of a random batch.

    python -m tests.expectations            compare; status 1 and the differences where something has changed
    python -m tests.expectations --update   write tests/golden/expectations.json; look at the difference

They say that a result is what it was, not that it is right: the other tests do, and the recorded outputs of the
reference.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from recipes.environments.contract.verifier import Verdict
from recipes.environments.instances import VERIFIERS, servers_of
from recipes.grpo.advantage import rollout_advantages
from recipes.grpo.loss import grpo_loss
from recipes.types import LossInputs
from tests.configuration import block
from tools.environments.check.answers import PLAIN_WRONG, goldens, said

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "golden" / "expectations.json"
EXAMPLES = ROOT / "configs" / "environments" / "examples"
ROUNDED = 5  # digits of a figure; sums differ beyond them from one processor to another
# Options of the loss, each with two values; every pair of them is tried together.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "token_level_loss": (True, False),
    "use_cispo": (False, True),
    "sequence_level_importance_ratios": (False, True),
    "ratio_clip_c": (None, 3.0),
    "truncated_importance_sampling_type": ("tis", "icepop"),
    "reference_policy_kl_penalty": (0.0, 0.1),
}


def verdicts() -> Iterator[tuple[str, Any]]:
    """Yield what each verifier that needs neither judge nor sandbox says of answers to its example rows."""
    servers = servers_of({})
    for name, verifier in sorted(VERIFIERS.items()):
        path = EXAMPLES / f"{name}.jsonl"
        if not path.exists() or verifier.needs_sandbox or verifier.tools is not None:
            continue
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for number, row in enumerate(rows):
            task = verifier.parse_task(row, servers[name].settings)
            answers = {"right": goldens(name, row)[:1], "plain": [said(PLAIN_WRONG)], "empty": [said("")]}
            answers["foreign"] = goldens(name, rows[number - 1])[:1]
            for kind, (answer,) in ((kind, found) for kind, found in answers.items() if found):
                if isinstance(verdict := verifier.score(answer, task), Verdict):
                    yield f"verdict {name} row {number + 1} {kind}", [round(verdict.reward, ROUNDED), verdict.reason]


def losses() -> Iterator[tuple[str, Any]]:
    """Yield loss and gradient of one random batch for every pair of options."""
    generator = torch.Generator().manual_seed(7)
    shape = (6, 9)
    mask = (torch.rand(shape, generator=generator) < 0.7).float()
    current = -torch.rand(shape, generator=generator)
    noise = {name: 0.2 * torch.randn(shape, generator=generator) for name in ("prev", "engine", "reference")}
    inputs = LossInputs(
        token_mask_BT=mask,
        sample_mask_B=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
        advantages_BT=torch.randn(6, 1, generator=generator).expand(shape).clone(),
        rewards_B=torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.25], dtype=torch.float64),
        prev_logprobs_BT=current + noise["prev"],
        generation_logprobs_BT=(current + noise["engine"]) * mask,
        reference_logprobs_BT=current + noise["reference"],
    )
    fixed = {"force_on_policy_ratio": False, "disable_ppo_ratio": False, "truncated_importance_sampling_ratio": 1.2}
    for first, second in itertools.combinations(OPTIONS, 2):
        chosen = {name: values[name in (first, second)] for name, values in OPTIONS.items()}
        logprobs = current.clone().requires_grad_()
        sums = grpo_loss(logprobs, inputs, cfg=block("loss_fn", **fixed, **chosen), mismatch_threshold=None)
        loss = sums.loss / sums.count
        (gradient,) = torch.autograd.grad(loss, logprobs)
        yield f"loss with {first}, {second}", [rounded(loss), rounded(gradient.abs().sum()), rounded(gradient.sum())]


def advantages() -> Iterator[tuple[str, Any]]:
    """Yield the advantages of one random batch for every estimator."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.5, 0.25, 1.0, 0.0], dtype=torch.float64)
    groups, valid = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([True] * 7 + [False])
    kinds = [field.name for field in fields(block("grpo.adv_estimator")) if field.type == "bool"]
    for name in ("grpo", "reinforce_plus_plus"):
        for chosen in itertools.product((False, True), repeat=len(kinds)):
            cfg = block("grpo.adv_estimator", name=name, **dict(zip(kinds, chosen, strict=True)))
            got = rollout_advantages(rewards, groups, valid, torch.full((8,), 3.0), cfg)
            yield f"advantages {name} {chosen}", [rounded(value) for value in got]


def rounded(value: torch.Tensor) -> float:
    """Return a number as it is written."""
    return round(float(value.detach()), ROUNDED)


def measured() -> dict[str, Any]:
    """Return all figures by name."""
    return dict(itertools.chain(advantages(), losses(), verdicts()))


def differences(known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return a line for each figure that is not what it was."""
    names = [name for name in {**known, **found} if not _is_same(known.get(name), found.get(name))]
    return [f"{name}: was {known.get(name)}, is {found.get(name)}" for name in names]


def _is_same(known: Any, found: Any) -> bool:
    if isinstance(known, float) and isinstance(found, float | int):
        return abs(known - found) <= 2 * 10**-ROUNDED * max(1.0, abs(known))
    if isinstance(known, list) and isinstance(found, list):
        return len(known) == len(found) and all(map(_is_same, known, found))
    return bool(known == found)


def main(arguments: list[str]) -> int:
    """Compare or write the figures; return the exit status."""
    found = measured()
    if arguments == ["--update"]:
        FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        return 0
    lines = differences(json.loads(FILE.read_text(encoding="utf-8")), found)
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
