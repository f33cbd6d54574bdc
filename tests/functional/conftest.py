"""Fixtures of the tests that start something real."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster
from speed import patiently

from recipes.cluster.tuning import worker_environment

os.environ.update(worker_environment(1))  # for each `ray.init`, which would wait for workers that nothing here uses

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the tests of this folder time by the speed of the machine, and put the files that take longest first.

    Of the processes that take file after file, some would otherwise wait long for the last file of another.
    """
    allowed: defaultdict[Path, float] = defaultdict(float)  # seconds of a file's longest test
    for item in items:
        if HERE in item.path.parents:
            marker = item.get_closest_marker("timeout")
            seconds = float(marker.args[0] if marker else config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(patiently(seconds)), append=False)
            allowed[item.path] = max(allowed[item.path], seconds)
    items.sort(key=lambda item: -allowed[item.path])


@pytest.fixture(scope="module")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster of two nodes with one fake GPU each, which sees every temporary directory of the tests."""
    with Cluster(shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster
