"""Checksums of tensors: every bit and every place counts, and large tensors are summed in parts."""

from __future__ import annotations

import pytest
import torch

from recipes import checksums
from recipes.checksums import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_another_bit_and_another_order_are_seen(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 25).to(dtype).view(4, 6)
    expected = int(checksum(tensor))
    assert int(checksum(tensor.clone())) == expected
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    swapped = tensor[[1, 0, 2, 3]]
    assert expected not in (int(checksum(changed)), int(checksum(swapped)))


def test_the_sum_is_that_of_the_words_times_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.tensor([3, -2, 0, 7, 11], dtype=torch.int16)
    assert int(checksum(tensor)) == 3 * 1 - 2 * 2 + 7 * 4 + 11 * 5
    monkeypatch.setattr(checksums, "_CHUNK", 2)
    assert int(checksum(tensor)) == 3 * 1 - 2 * 2 + 7 * 4 + 11 * 5


def test_views_scalars_and_parameters_have_a_checksum() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert int(checksum(whole.t())) == int(checksum(whole.t().contiguous()))
    assert int(checksum(torch.tensor(1.5))) == int(checksum(torch.tensor([1.5]))) != 0
    assert int(checksum(torch.nn.Parameter(whole))) == int(checksum(whole))
    assert int(checksum(torch.empty(0))) == 0
