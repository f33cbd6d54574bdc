"""Checksums of tensors, computed where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # words: what is computed with takes eight bytes for each


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return the sum over the tensor's 16-bit words, each times its place from 1, modulo 2**64.

    The result is an int64 without dimensions on the tensor's device. It does not depend on the order of the additions,
    so devices agree. Another bit or another order of words changes it.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(torch.int16 if flat.element_size() % 2 == 0 else torch.int8)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        total += (part * torch.arange(start + 1, start + 1 + len(part), device=words.device)).sum()
    return total
