"""What a rollout worker warns of, on its way to the driver."""

from __future__ import annotations

import logging

from recipes.rollouts.workers import MAX_WARNINGS, Warnings


def test_each_warning_is_taken_once_and_a_flood_is_cut() -> None:
    warnings, logger = Warnings(), logging.getLogger("recipes.test_of_warnings")
    logger.addHandler(warnings)
    logger.info("up")
    logger.warning("rollout %d failed", 7)
    assert warnings.take() == ["rollout 7 failed"]
    for number in range(1000):
        logger.warning("%s", "x" * 10_000 + str(number))
    taken = warnings.take()
    assert len(taken) == MAX_WARNINGS
    assert max(map(len, taken)) <= 2000
    assert warnings.take() == []
