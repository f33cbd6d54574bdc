"""Memory for copies is taken anew only where a tensor has another form than the one before it."""

from __future__ import annotations

import torch

from recipes.policy.host_copies import HostCopies


def test_a_later_copy_takes_the_memory_of_the_earlier_one() -> None:
    copies, tensor = HostCopies(), torch.arange(6.0).reshape(2, 3)
    first = copies.copy("weight", tensor)
    tensor += 1
    assert torch.equal(first, tensor - 1)
    second = copies.copy("weight", tensor)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second, tensor)


def test_other_keys_and_other_forms_have_memory_of_their_own() -> None:
    copies, tensor = HostCopies(), torch.ones(4)
    kept = copies.copy("weight", tensor)
    others = [copies.copy("bias", 2 * tensor)]
    others += [copies.copy("weight", form) for form in (2 * torch.ones(5), 2 * torch.ones(5, dtype=torch.float64))]
    assert torch.equal(kept, tensor)
    assert [(tuple(other.shape), other.dtype) for other in others[1:]] == [((5,), torch.float32), ((5,), torch.float64)]


def test_a_copy_of_a_view_holds_nothing_but_the_view() -> None:
    copied = HostCopies().copy("weight", torch.arange(12.0).reshape(3, 4).t()[1:3])
    assert copied.is_contiguous()
    assert copied.untyped_storage().nbytes() == 6 * 4
    assert torch.equal(copied, torch.tensor([[1.0, 5.0, 9.0], [2.0, 6.0, 10.0]]))
