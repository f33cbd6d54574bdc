import base64
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import EngineError
from recipes.generation import generation as generation_module
from recipes.generation.generation import Generation, nccl_init, nccl_update, shared_memory_init
from recipes.types import WeightLayout

LAYOUT = WeightLayout(
    path="/dev/shm/x",
    names=("a", "b"),
    dtypes=("float32", "bfloat16"),
    shapes=((2, 3), (4,)),
    offsets=(0, 64),
    num_bytes=128,
)


def test_engine_ranks_follow_the_policy_without_gap_or_overlap() -> None:
    infos = [nccl_init(bytes(range(128)), engine=e, num_engines=3, ranks_per_engine=8) for e in range(3)]
    ranks = [0] + [info["rank_offset"] + rank for info in infos for rank in range(8)]
    assert ranks == list(range(25))
    assert {info["world_size"] for info in infos} == {25}
    assert {base64.b64decode(info["nccl_unique_id_b64"]) for info in infos} == {bytes(range(128))}


def test_updates_name_what_is_sent_in_order() -> None:
    assert nccl_update(LAYOUT) == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}


def test_the_shared_memory_layout_crosses_as_lists() -> None:
    info = shared_memory_init(LAYOUT)
    assert info["shapes"] == [[2, 3], [4]] and info["offsets"] == [0, 64] and info["num_bytes"] == 128


class Handle(SimpleNamespace):
    """One engine as the driver holds it: a key of a dict, as the real one."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Engines:
    """Twelve engines that are up, as the driver holds them; keeps what their calls carry, and what Ray stores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: list[Any] = []
        self.calls: dict[str, list[tuple[Any, ...]]] = {"connect_weights": [], "update_weights": []}
        monkeypatch.setattr(generation_module.ray, "put", self._put)
        monkeypatch.setattr(generation_module, "outcomes", lambda *_args, **_options: {})
        actor = SimpleNamespace(**{name: SimpleNamespace(remote=self._noted(name)) for name in self.calls})
        self.handles: list[Any] = [
            Handle(index=n, key=(n, 1), is_up=True, actor=actor, can_see_file=True, info=None) for n in range(12)
        ]
        generation: Any = object.__new__(Generation)
        generation._engines, generation._ranks_per_engine = self.handles, 8
        generation._push_lock = generation._state_lock = generation_module.threading.RLock()
        generation._deadlines = SimpleNamespace(refit=1.0)
        generation._client = SimpleNamespace(open=lambda _index: None)
        generation._tell_clients = lambda: None
        generation._connected, generation._layout, generation.at_push = frozenset(), None, None
        self.generation: Generation = generation

    def _put(self, value: Any) -> int:
        self.stored.append(value)
        return len(self.stored) - 1

    def _noted(self, name: str) -> Any:
        return lambda *args, **_options: self.calls[name].append(args)


@pytest.mark.parametrize("nccl_id", [b"id", None], ids=["nccl", "file"])
def test_names_cross_to_the_engines_once_and_no_push_has_them(
    nccl_id: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch)
    names = tuple(f"backbone.layers.{n}.mixer.in_proj.weight" for n in range(2000))
    layout = replace(
        LAYOUT, names=names, dtypes=("bfloat16",) * 2000, shapes=((4, 4),) * 2000, offsets=tuple(range(2000))
    )
    assert engines.generation.needs_connect(layout)
    engines.generation.connect_weights(layout, nccl_id=nccl_id)
    assert not engines.generation.needs_connect(layout)
    for version in range(3):
        engines.generation.update_weights(version)
    assert sum(names[7] in str(value) for value in engines.stored) == 1, "stored once for all engines"
    for name, calls in engines.calls.items():
        assert len(calls) == 12 * (3 if name == "update_weights" else 1)
        assert max(len(pickle.dumps(args)) for args in calls) < 500, name
    assert {args[1] for args in engines.calls["update_weights"]} == {layout.digest}


def test_an_engine_that_came_back_and_another_layout_are_connected_before_a_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(monkeypatch)
    engines.generation.connect_weights(LAYOUT)
    engines.handles[3].key = (3, 2)
    assert engines.generation.needs_connect(LAYOUT)
    engines.generation.connect_weights(LAYOUT)
    assert len(engines.calls["connect_weights"]) == 12 + 1, "only the one that does not know the layout"
    changed = replace(LAYOUT, shapes=((3, 2), (4,)))
    assert changed.digest != LAYOUT.digest and not engines.generation.needs_connect(LAYOUT)
    assert engines.generation.needs_connect(changed)
    engines.generation.connect_weights(changed)
    assert len(engines.calls["connect_weights"]) == 13 + 12


def test_a_push_by_a_layout_that_was_not_announced_is_refused() -> None:
    from recipes.generation.weight_transfer import WorkerExtension

    worker = WorkerExtension()
    with pytest.raises(EngineError, match=f"by the layout {LAYOUT.digest}, and this engine was told none"):
        worker.load_pushed_weights(LAYOUT.digest, {}, False)
    worker.announce_pushes("other", {})
    with pytest.raises(EngineError, match=f"by the layout {LAYOUT.digest}, and this engine was told other"):
        worker.load_pushed_weights(LAYOUT.digest, {}, False)
