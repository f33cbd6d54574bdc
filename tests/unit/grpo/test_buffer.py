"""Waiting for groups: what ends the wait."""

from __future__ import annotations

import pytest

from recipes.grpo.buffer import ReplayBuffer


@pytest.mark.timeout(30)
def test_a_request_to_stop_just_before_the_wait_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(num_prompts_per_step=2, max_trajectory_age_steps=1)
    wait = buffer._changed.wait

    def interrupted(seconds: float) -> bool:
        buffer.close()  # as a signal's handler does, after the last look and before anything waits
        assert seconds <= 1.0  # a signal is seen so soon
        return wait(0.0)

    monkeypatch.setattr(buffer._changed, "wait", interrupted)
    assert buffer.take(0, deadline_seconds=600.0, waiting_for=lambda: "nothing") == []
