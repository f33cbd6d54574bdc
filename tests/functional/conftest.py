"""Fixtures of the tests that start something real."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from slurm.cluster import Cluster, turn
from speed import patiently

from recipes.cluster.tuning import worker_environment
from tests.scheduling import starts_slurm

os.environ.update(worker_environment(1))  # for each `ray.init`, which would wait for workers that nothing here uses

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(trylast=True)  # after those that leave tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of Slurm first, which one process runs, then those whose tests may take longest.

    Of the processes that take file after file, some would otherwise wait long for the last file of another.
    """
    allowed: defaultdict[Path, float] = defaultdict(float)  # seconds of a file's longest test
    for item in items:
        if HERE in item.path.parents:
            allowed[item.path] = max(allowed[item.path], allowed_seconds(item))
    of_slurm = {path for path in allowed if starts_slurm(path)}
    longest = sorted(allowed, key=lambda path: (path not in of_slurm, -allowed[path]))
    places = {path: place for place, path in enumerate(longest)}
    items.sort(key=lambda item: places.get(item.path, len(items)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give a test of this folder time by the speed that the machine has when it starts; it may wait for its turn."""
    if HERE not in item.path.parents:
        return (yield)
    with turn() if starts_slurm(item.path) else nullcontext():
        item.add_marker(pytest.mark.timeout(patiently(allowed_seconds(item))), append=False)
        return (yield)


def allowed_seconds(item: pytest.Item) -> float:
    """Return the time that a test may take on a quiet machine."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


@pytest.fixture(scope="module")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster of two nodes with one fake GPU each, which sees every temporary directory of the tests."""
    with Cluster(shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster
