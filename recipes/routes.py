"""Which experts the engine has sent each token to, packed small, and laid out again for the policy.

A mixture of experts sends a token to the best K of its E experts. Engine and policy round differently, so they would
choose differently now and then, and then their log-probabilities differ. The policy therefore replays the engine's
choice. Only the choice: the weights of the chosen experts are the policy's own, with their gradients.

The choices of a span of tokens travel as bytes beside the tokens. In each layer the numbers of the K experts are
sorted, for their order says nothing, and stored as differences of two bytes each, which compress well.

Shape legend: T tokens of a span, S of a sequence, D layers of the model, L layers with experts, K chosen experts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Metrics of a step: the share of the tokens that the policy has routed itself, for want of a route (NeMo RL's name),
# and the share of the replayed choices that it would not have made.
ROUTES_UNKNOWN = "r3/routed_experts_fallback_token_route_fraction"
ROUTES_CHANGED = "r3/changed_route_fraction"
UNKNOWN = -1  # in place of an expert, where the engine has not reported what it chose
_HEAD = struct.Struct("<5I")  # start, T, L, K, bytes of the compressed part; then L numbers of layers, of two bytes
_LEVEL = 1  # of zlib: higher ones take many times as long and save little


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The routes of successive tokens of one sequence, as they were packed."""

    start: int  # place of the first token in the sequence
    num_tokens: int
    num_chosen: int
    layers: tuple[int, ...]  # numbers of the layers, from 1
    packed: bytes

    @property
    def end(self) -> int:
        """Return the place behind the last token."""
        return self.start + self.num_tokens

    def chosen(self) -> NDArray[np.int16]:
        """Return the experts, ascending in each layer: [T, L, K]."""
        shape = (self.num_tokens, len(self.layers), self.num_chosen)
        planes = np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(2, *shape)
        deltas = planes[0].astype(np.int16)
        if planes[1].any():  # no model has more than 256 experts between two chosen ones, as a rule
            deltas += planes[1].astype(np.int16) << 8
        return np.cumsum(deltas, axis=2, dtype=np.int16)


def pack(chosen_TDK: NDArray[np.integer], start: int) -> bytes:
    """Return what `spans` reads, of all layers of the model; those without experts have expert 0 alone.

    So has a layer that sends each of these tokens to one expert, and to the first one: it is left out as well, and
    `laid_out` puts it back.
    """
    layers = np.flatnonzero(chosen_TDK.any(axis=(0, 2)))
    if not len(layers) and chosen_TDK.shape[2] > 1:
        return b""
    chosen_TLK = chosen_TDK[:, layers]
    ascending = np.sort(chosen_TLK, axis=2).astype(np.uint16)
    deltas = np.diff(ascending, axis=2, prepend=np.uint16(0))
    planes = np.stack([deltas & 0xFF, deltas >> 8]).astype(np.uint8)
    packed = zlib.compress(planes.tobytes(), _LEVEL)
    num_tokens, num_layers, num_chosen = chosen_TLK.shape
    head = _HEAD.pack(start, num_tokens, num_layers, num_chosen, len(packed))
    return head + (layers + 1).astype("<u2").tobytes() + packed


def spans(routes: bytes) -> Iterator[Span]:
    """Yield the spans of routes, which may be several behind one another."""
    place = 0
    while place < len(routes):
        start, num_tokens, num_layers, num_chosen, size = _HEAD.unpack_from(routes, place)
        place += _HEAD.size
        layers = tuple(np.frombuffer(routes, "<u2", num_layers, place).tolist())
        place += 2 * num_layers
        yield Span(start, num_tokens, num_chosen, layers, bytes(routes[place : place + size]))
        place += size


def cut(routes: bytes, end: int) -> bytes:
    """Return the routes of the tokens before place `end`."""
    kept = []
    for span in spans(routes):
        num_kept = min(max(end - span.start, 0), span.num_tokens)
        whole = np.zeros((num_kept, max(span.layers, default=0), span.num_chosen), np.int16)
        whole[:, np.array(span.layers, np.int64) - 1] = span.chosen()[:num_kept]
        kept.append(pack(whole, span.start))
    return b"".join(kept)


def laid_out(routes: bytes, length: int, layers: Sequence[int], num_chosen: int) -> NDArray[np.int16]:
    """Return the experts of each token of a sequence in some layers, [S, L, K]; `UNKNOWN` where no span has them.

    Where spans overlap the first one counts: later ones come from requests that computed a context once more.
    """
    chosen_SLK = np.full((length, len(layers), num_chosen), UNKNOWN, np.int16)
    for span in reversed(list(spans(routes))):
        has_all = num_chosen == 1 or set(layers) <= set(span.layers)
        if span.num_chosen != num_chosen or not has_all:
            raise ValueError(
                f"the engine chose {span.num_chosen} experts in layers {list(span.layers)}, the policy chooses"
                f" {num_chosen} in layers {list(layers)}: they have not got the same model"
            )
        chosen = span.chosen()[: max(length - span.start, 0)]
        known = [place for place, layer in enumerate(layers) if layer in span.layers]
        own = np.zeros((len(chosen), len(layers), num_chosen), np.int16)
        own[:, known] = chosen[:, [span.layers.index(layers[place]) for place in known]]
        chosen_SLK[span.start : span.start + len(own)] = own
    return chosen_SLK


def num_unknown(routes: bytes, length: int) -> int:
    """Return how many tokens of a sequence have no route, besides the last one, which the engine never computes."""
    is_known = np.zeros(max(length - 1, 0), np.bool_)
    for span in spans(routes):
        is_known[span.start : span.end] = True
    return int((~is_known).sum())
