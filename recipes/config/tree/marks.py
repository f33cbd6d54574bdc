"""Marks on the type of a configuration key: what `typing` and `annotated_types` cannot say.

A mark adds its words to the key's entry in configs/schema.json. The method that pydantic calls for it is all that
ties them to pydantic, so that loading a configuration does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from annotated_types import MinLen

Json = dict[str, Any]
Text = Annotated[str, MinLen(1)]


class _Mark:
    """A mark of which every subclass says what it adds."""

    def __init__(self, **entry: Any) -> None:
        self.entry = entry

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], Json]) -> Json:
        return {**handler(core), **self.entry}


class Unit(_Mark):
    """What a number counts."""

    def __init__(self, name: str) -> None:
        super().__init__(**{"x-unit": name})


class Like(_Mark):
    """The regular expression (ECMA 262) that a text matches."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern=pattern)


class Honours(_Mark):
    """The only values that the native engine accepts, and why it refuses the others before a launch."""

    def __init__(self, *values: Any, reason: str) -> None:
        accepted = {"const": values[0]} if len(values) == 1 else {"enum": list(values)}
        super().__init__(**{"x-native": {"honours": accepted, "reason": reason}})


class NoEffect(_Mark):
    """The native engine accepts every value and reads none of them: until when, or why."""

    def __init__(self, reason: str) -> None:
        super().__init__(**{"x-native": {"no_effect": reason}})


class FurtherKeys(_Mark):
    """Not a key: the field holds the further keys of its block, each of which is an entry of this name in `$defs`."""

    def __init__(self, definition: str) -> None:
        super().__init__(**{"x-further-keys": definition})


NOT_SET: Any = None
"""The default of a setting that has none: no value is shown, and null is not one that a file may give it."""


class OneValue(_Mark):
    """The native engine has one value of this setting, its default, and refuses others; with NOT_SET it refuses all.

    NeMo Gym's server may read others.
    """

    def __init__(self) -> None:
        super().__init__(**{"x-native": {"one_value": True}})


class Entry(_Mark):
    """The setting is an entry of this name in `$defs`."""

    def __init__(self, definition: str) -> None:
        super().__init__(**{"x-entry": definition})


class NotAKey(_Mark):
    """Not a setting: the field holds what another server's settings say."""

    def __init__(self) -> None:
        super().__init__(**{"x-not-a-key": True})
