"""Random batches for the tests of the policy; needs torch only."""

from __future__ import annotations

import torch

from recipes.types import TrainBatch


def random_batch(num_rows: int, *, seed: int = 1, width: int = 40, vocab: int = 96) -> TrainBatch:
    """Return rows of different lengths with random masks, advantages and plausible log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(5, width + 1, (num_rows,), generator=generator)
    inside_BS = torch.arange(width) < lengths_B[:, None]
    ids_BS = torch.randint(0, vocab, (num_rows, width), generator=generator) * inside_BS
    mask_BS = ((torch.rand(num_rows, width, generator=generator) < 0.7) & inside_BS).float()
    mask_BS[:, :2] = 0.0
    sample_mask_B = torch.ones(num_rows)
    sample_mask_B[num_rows // 2] = 0.0
    return TrainBatch(
        input_ids_BS=ids_BS,
        input_lengths_B=lengths_B,
        token_mask_BS=mask_BS,
        sample_mask_B=sample_mask_B,
        generation_logprobs_BS=-torch.rand(num_rows, width, generator=generator) * 6 * mask_BS,
        advantages_BS=torch.randn(num_rows, 1, generator=generator).expand(-1, width).contiguous(),
        rewards_B=torch.zeros(num_rows, dtype=torch.float64),
        group_B=torch.arange(num_rows) // 2,
    )
