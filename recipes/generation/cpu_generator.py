"""A random generator for requests with a seed on CPU, where vLLM 0.32 lacks one half of what it expects.

vLLM samples a token also from a prompt of which it has computed only a part, drops the token, and takes the random
number back by the generator's offset. CPU generators have no offset, so the EngineCore process would end there.
"""

from __future__ import annotations

import torch


class RewindingGenerator(torch.Generator):
    """A generator that takes numbers back by starting again from its seed.

    Nothing has been sampled from a prompt that is not complete, so the number taken back is always the first. The one
    exception is a request that was preempted: its numbers are then those of its first tokens once more.
    """

    def get_offset(self) -> int:
        """Return 0: the offset of the start."""
        return 0

    def set_offset(self, _offset: int) -> torch.Generator:
        """Go back to the seed."""
        return self.manual_seed(self.initial_seed())


def install() -> None:
    """Have vLLM make such generators in this process."""
    torch.Generator = RewindingGenerator  # type: ignore[misc]
