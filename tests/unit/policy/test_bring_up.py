"""Which nodes the failure of a rank blames: on fake ranks, of which some fail and some never answer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from recipes.errors import PolicyError, RunError
from recipes.policy import policy as policy_module
from recipes.policy.policy import Policy

HOSTS = ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2")  # of each rank


@pytest.mark.parametrize(
    ("answers", "is_up", "exit_code", "last"),
    [
        ("..x.", False, 69, "  on node 10.0.0.2"),
        ("  x ", False, 69, "  on node 10.0.0.2"),  # the others wait for it
        ("  xx", False, 69, "  on node 10.0.0.2"),
        ("xxxx", False, 1, None),  # the same everywhere: no node is to blame
        ("x x ", False, 1, None),
        ("..  ", False, 69, "  on node 10.0.0.2"),  # late
        ("    ", False, 1, None),
        ("..x.", True, 1, None),  # while it trains, the run may save first
    ],
)
def test_a_rank_that_does_not_come_up_blames_its_node_unless_all_nodes_fail(
    monkeypatch: pytest.MonkeyPatch, answers: str, is_up: bool, exit_code: int, last: str | None
) -> None:
    def wait(pending: Sequence[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        del timeout
        done = [call for call in pending if answers[int(call)] != " "][:num_returns]
        return done, [call for call in pending if call not in done]

    def get(call: str) -> None:
        if answers[int(call)] == "x":
            raise RayActorError

    monkeypatch.setattr(policy_module, "ray", SimpleNamespace(wait=wait, get=get))
    never: Any = None
    policy = Policy([], never, never)
    policy._identities = [SimpleNamespace(pid=7, node_id="ab", node_ip=ip) for ip in HOSTS]  # type: ignore[misc]
    policy._is_up = is_up
    with pytest.raises(RunError, match=r"policy start: ") as raised:
        policy._gather("0123", deadline=1.0, what="start")
    assert raised.value.exit_code == exit_code
    assert isinstance(raised.value, PolicyError) == (exit_code == 1)
    if last is not None:
        assert str(raised.value).splitlines()[-1] == last
