"""Settings of a verifier: a frozen dataclass in its file, one field per key of its server, each with its default.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings(JudgeSettings):
        \"\"\"What the server is, in one line.\"\"\"

        seconds: Annotated[float, Gt(0), Unit("seconds")] = 10.0
        \"\"\"the meaning of the key\"\"\"

Type, range, unit, meaning and default stand nowhere else: `make config-keys` writes them to configs/schema.json, by
which a configuration is checked, and `make config` shows the defaults. `parse_task` is given such an object.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

from recipes.config.tree.marks import NOT_SET, Entry, NotAKey, OneValue, Text, Unit
from recipes.config.tree.servers import Reference, Sampling

__all__ = [
    "NOT_SET",
    "Entry",
    "JudgeSettings",
    "NoSettings",
    "NotAKey",
    "OneValue",
    "Reference",
    "Sampling",
    "SandboxSettings",
    "Text",
    "Unit",
    "keys_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSettings:
    """A verifier without settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """A verifier that asks a judge."""

    judge_model_server: Reference = NOT_SET
    """judge that is asked"""
    judge_responses_create_params: Sampling = NOT_SET
    """sampling of the judge"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """A verifier that runs code in a sandbox at an address."""

    sandbox_host: str = "127.0.0.1"
    """host of the sandbox that runs the code"""
    sandbox_port: Annotated[int | str, Unit("TCP port")] = 6000
    """port of that sandbox"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting of a class: its default, and whether the native engine has that value alone."""

    default: Any
    has_one_value: bool


def keys_of(settings: type) -> dict[str, Key]:
    """Return the settings that a class declares, by name."""
    hints, found = get_type_hints(settings, include_extras=True), {}
    for field in fields(settings):
        marks = getattr(hints[field.name], "__metadata__", ())
        if not any(isinstance(mark, NotAKey) for mark in marks):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            found[field.name] = Key(default=default, has_one_value=any(isinstance(mark, OneValue) for mark in marks))
    return found
