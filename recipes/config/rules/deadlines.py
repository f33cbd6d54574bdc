"""Waits that contain other waits."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.schema import INSTANCES, KeyProblem
from recipes.config.keys.servers import AGENTS, SWE_AGENTS, servers
from recipes.config.tree import Config

CONTAINS = {"rollout": ("generation",), "progress": ("rollout", "refit", "train", "checkpoint")}


def waits_are_nested(config: Config) -> Iterator[KeyProblem]:
    """Require a wait that contains others to be at least as long as the longest of them."""
    for outer, inners in CONTAINS.items():
        limit = getattr(config.deadlines, outer)
        inner = max(inners, key=lambda name: float(getattr(config.deadlines, name)))
        longest = getattr(config.deadlines, inner)
        if limit < longest:
            expected = f"at least deadlines.{inner} = {longest:g} s"
            fix = "it contains that wait; raise it or lower the other"
            also = tuple(f"deadlines.{name}" for name in inners)
            yield KeyProblem(key=f"deadlines.{outer}", got=f"{limit:g} s", expected=expected, fix=fix, also=also)


def tasks_end_within_a_rollout(config: Config) -> Iterator[KeyProblem]:
    """Require a rollout to wait for as long as a whole task may take."""
    limit = config.deadlines.rollout
    for name, server, settings in servers(config, AGENTS):
        if server == SWE_AGENTS:
            parts = [settings.get(f"swebench_{part}_timeout", 0) for part in ("agent", "tests")]
            if sum(parts) > limit:
                key = f"{INSTANCES}.{name}.{AGENTS}.{server}.swebench_agent_timeout"
                fix = "lower swebench_agent_timeout or swebench_tests_timeout, or raise deadlines.rollout"
                got, expected = f"{parts[0]} + {parts[1]} = {sum(parts)} s", f"at most deadlines.rollout = {limit:g} s"
                yield KeyProblem(key=key, got=got, expected=expected, fix=fix, also=("deadlines.rollout",))
