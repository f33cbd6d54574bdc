"""The tokens of a conversation that grows: what follows is added without copying what was said."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

_TYPE = "i"  # int32
_lock = threading.Lock()  # agents may add to the same tokens from several threads


class TokenIds(Sequence[int]):
    """Token ids that never change.

    `ids.plus(more)` shares the memory of `ids` unless something else was added to `ids` before, so each turn of a
    conversation costs what is new in it. Ids are int32; a larger one raises `OverflowError`. A tuple may be equal.
    """

    __slots__ = ("_length", "_shared")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._shared = array(_TYPE, ids)  # only grows; what follows behind `_length` belongs to others
        self._length = len(self._shared)

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """Return ids as `TokenIds`, without copying those that are."""
        return ids if isinstance(ids, TokenIds) else cls(ids)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            return tuple(self._shared[start:stop:step]) if step > 0 else tuple(self._shared[: self._length])[place]
        return self._shared[range(self._length)[place]]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return self[:] == other
        if not isinstance(other, TokenIds):
            return NotImplemented
        return len(self) == len(other) and self.num_shared(other) == len(self)

    __hash__ = None  # type: ignore[assignment]

    def plus(self, more: Iterable[int]) -> TokenIds:
        """Return these ids and others behind them."""
        added, sum_ = array(_TYPE, more), TokenIds.__new__(TokenIds)
        with _lock:
            shared = self._shared
            there = shared[self._length : self._length + len(added)]
            if there != added[: len(there)]:
                shared, there = shared[: self._length], array(_TYPE)
            shared.extend(added[len(there) :])
        sum_._shared, sum_._length = shared, self._length + len(added)
        return sum_

    def to_bytes(self, start: int = 0) -> bytes:
        """Return the ids from `start` on as int32."""
        return self._shared[start : self._length].tobytes()

    def num_shared(self, other: TokenIds) -> int:
        """Return with how many equal ids both begin. It costs nothing when one was made by adding to the other."""
        size = min(self._length, other._length)
        if self._shared is other._shared:
            return size
        differs = np.frombuffer(self.to_bytes(), np.int32, size) != np.frombuffer(other.to_bytes(), np.int32, size)
        return int(differs.argmax()) if differs.any() else size
