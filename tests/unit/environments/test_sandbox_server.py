"""The server that runs programs on this machine: how much memory one of them gets."""

from __future__ import annotations

import os

import pytest

from recipes.environments.sandbox.server import memory_mib


@pytest.mark.parametrize(
    ("total_gib", "places", "expected"), [(24, 4, 3072), (2048, 448, 2340), (256, 4, 4096), (4, 64, 1024)]
)
def test_programs_share_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, total_gib: int, places: int, expected: int
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": total_gib << 18}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert memory_mib(places) == expected
