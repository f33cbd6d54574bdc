"""From rewards to advantages: scaling, length shaping, effort levels, fixed advantages."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.schema import KeyProblem
from recipes.config.tree import Config

SCALING, SHAPING = "grpo.reward_scaling", "grpo.reward_shaping"
EFFORT = "env.nemo_gym.effort_levels"


def scaling_has_a_range(config: Config) -> Iterator[KeyProblem]:
    """Require a non-empty source range of the reward map."""
    scaling = config.grpo.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        expected = f"less than {SCALING}.source_max = {scaling.source_max}"
        also, fix = (
            (f"{SCALING}.source_max", f"{SCALING}.enabled"),
            "the map divides by their difference; change one of them",
        )
        yield KeyProblem(
            key=f"{SCALING}.source_min", got=str(scaling.source_min), expected=expected, fix=fix, also=also
        )


def length_penalty_starts_above_zero(config: Config) -> Iterator[KeyProblem]:
    """Require a length penalty that begins inside the answer."""
    shaping = config.grpo.reward_shaping
    key, limit = f"{SHAPING}.overlong_buffer_length", f"{SHAPING}.max_response_length"
    if shaping.enabled and shaping.overlong_buffer_length >= shaping.max_response_length:
        expected = f"less than {limit} = {shaping.max_response_length}"
        fix = "every answer would be punished; lower it"
        also = (limit, f"{SHAPING}.enabled")
        yield KeyProblem(key=key, got=str(shaping.overlong_buffer_length), expected=expected, fix=fix, also=also)


def effort_shaping_is_on_or_off(config: Config) -> Iterator[KeyProblem]:
    """Refuse effort levels of which only one of two switches is set: they look on and do nothing."""
    effort = config.env.nemo_gym.effort_levels
    if (effort.low_weight > 0) != (effort.low_string != ""):
        name, other = ("low_string", "low_weight") if effort.low_weight > 0 else ("low_weight", "low_string")
        off = '""' if name == "low_string" else "0"
        wrong, fix = f"is {off}, which is off, although {EFFORT}.{other} is set", "set both or neither"
        yield KeyProblem(key=f"{EFFORT}.{name}", wrong=wrong, fix=fix, also=(f"{EFFORT}.{other}",))


def penalties_survive_the_clip(config: Config) -> Iterator[KeyProblem]:
    """Require the fixed advantages to lie inside the bounds that are applied after them."""
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    for name in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
        value = getattr(config.grpo, name)
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            expected = f"a number in [{low}, {high}] = grpo.advantage_clip_low..high"
            also = ("grpo.advantage_clip_low", "grpo.advantage_clip_high")
            fix = "the clip comes last and would change it; change this value or the bounds"
            yield KeyProblem(key=f"grpo.{name}", got=str(value), expected=expected, fix=fix, also=also)
