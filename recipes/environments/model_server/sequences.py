"""From a forest of calls to what is trained: paths from a root to a leaf, each call trained in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recipes.environments.model_server.forest import CallNode, Forest, walk
from recipes.types import Turn

MAX_SEQUENCES = 8  # of one rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The paths of a rollout that are kept."""

    paths: tuple[tuple[CallNode, ...], ...]  # from a root to a leaf, the main one first
    trained: tuple[frozenset[int], ...]  # per path: numbers of the nodes that are trained there
    num_delivered: int  # sampled tokens of all calls that count
    num_trained: int  # sampled tokens of all calls that are trained
    num_ignored: int = 0  # sampled tokens of the calls beside the main path, where only that counts

    @property
    def lost_share(self) -> float:
        """The share of sampled tokens that are in no kept path."""
        return 1 - self.num_trained / self.num_delivered if self.num_delivered else 0.0

    @property
    def ignored_share(self) -> float:
        """The share of all sampled tokens that do not count."""
        return self.num_ignored / (self.num_delivered + self.num_ignored) if self.num_ignored else 0.0

    def turns(self, index: int) -> tuple[Turn, ...]:
        """Return one path as turns: what is not trained there is context, and belongs to the next turn's prompt."""
        turns: list[Turn] = []
        context: tuple[int, ...] = ()
        for node in self.paths[index]:
            prompt_ids = context + node.turn.prompt_token_ids
            if node.number in self.trained[index]:
                turns.append(replace(node.turn, prompt_token_ids=prompt_ids))
                context = ()
            else:
                context = prompt_ids + node.turn.token_ids
        return tuple(turns)

    def branches(self) -> tuple[tuple[Turn, ...], ...]:
        """Return the turns of every path but the main one."""
        return tuple(self.turns(index) for index in range(1, len(self.paths)))


def kept_nodes(forest: Forest) -> list[CallNode]:
    """Return the calls that somebody acted on: delivered, or continued by such a call. Parents come first."""
    kept: set[int] = set()
    for node in reversed(list(walk(forest.roots))):
        if node.is_delivered or any(child.number in kept for child in node.children):
            kept.add(node.number)
    return [node for node in walk(forest.roots) if node.number in kept]


def sequences_of(
    forest: Forest, *, max_tokens: int, max_sequences: int = MAX_SEQUENCES, main_only: bool = False
) -> Sequences:
    """Return the paths to train on, at most `max_tokens` tokens of them together.

    The main path has the most calls, the latest one of equals. The others follow by how many sampled tokens they add.
    With `main_only` they do not count.
    """
    nodes = kept_nodes(forest)
    numbers = {node.number for node in nodes}
    leaves = [node for node in nodes if not any(child.number in numbers for child in node.children)]
    num_sampled = _num_sampled(nodes)
    if main_only and leaves:
        leaves = [_best_leaf(leaves, {}, is_main=True)]
        nodes = list(leaves[0].path())
    covered: set[int] = set()
    paths: list[tuple[CallNode, ...]] = []
    trained: list[frozenset[int]] = []
    room = max_tokens
    while leaves and len(paths) < max_sequences:
        leaf = _best_leaf(leaves, _new_tokens(nodes, covered), is_main=not paths)
        leaves.remove(leaf)
        if leaf.num_tokens > room:
            continue
        room -= leaf.num_tokens
        path = tuple(leaf.path())
        new = frozenset(node.number for node in path) - covered
        covered |= new
        paths.append(path)
        trained.append(new)
    return Sequences(
        paths=tuple(paths),
        trained=tuple(trained),
        num_delivered=_num_sampled(nodes),
        num_trained=_num_sampled([node for node in nodes if node.number in covered]),
        num_ignored=num_sampled - _num_sampled(nodes),
    )


def _num_sampled(nodes: Sequence[CallNode]) -> int:
    return sum(len(node.turn.token_ids) for node in nodes)


def _best_leaf(leaves: Sequence[CallNode], new_tokens: dict[int, int], *, is_main: bool) -> CallNode:
    if is_main:
        return max(leaves, key=lambda leaf: (leaf.num_calls, leaf.number))
    return max(leaves, key=lambda leaf: (new_tokens[leaf.number], leaf.number))


def _new_tokens(nodes: Sequence[CallNode], covered: set[int]) -> dict[int, int]:
    """Return, per node, the sampled tokens from its root to it that no path covers yet."""
    totals: dict[int, int] = {}
    for node in nodes:
        above = totals[node.parent.number] if node.parent else 0
        totals[node.number] = above + (0 if node.number in covered else len(node.turn.token_ids))
    return totals
