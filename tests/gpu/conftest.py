"""The tests of one GPU: skipped where there is none, and a table of what they measured at the end.

`make test-gpu` runs them. On a machine without this project's environment they need torch, transformers, PyYAML, pytest
and a directory that holds megatron-core:

    PYTHONPATH=.:DIRECTORY python3 -m pytest -o addopts=--import-mode=importlib tests/gpu -m gpu

What needs vLLM is skipped where vLLM is missing. All together takes less than ten minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

FIGURES: list[tuple[str, str]] = []

Record = Callable[[str, str], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every recorded figure."""
    if not FIGURES:
        return
    width = max(len(name) for name, _ in FIGURES)
    terminalreporter.section(f"figures of {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, value in FIGURES:
        terminalreporter.write_line(f"{name:<{width}}  {value}")


@pytest.fixture
def record() -> Record:
    """Return a function that puts one measured figure, with its unit, into the table."""

    def add(name: str, value: str) -> None:
        FIGURES.append((name, value))

    return add
