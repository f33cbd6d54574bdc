"""Fixtures of the tests that start something real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster
from speed import patiently

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the tests of this folder time by the speed of the machine."""
    for item in items:
        if HERE in item.path.parents:
            marker = item.get_closest_marker("timeout")
            seconds = float(marker.args[0] if marker else config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(patiently(seconds)), append=False)


@pytest.fixture(scope="module")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster of two nodes with one fake GPU each, which sees every temporary directory of the tests."""
    with Cluster(shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster
