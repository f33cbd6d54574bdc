"""Garbage collection is off while large packages are imported, and on again afterwards."""

from __future__ import annotations

import gc
import multiprocessing
import sys

import pytest

from recipes.generation.core_start import as_main_module
from recipes.imports import without_gc


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_block_leaves_collection_as_it_was(was_enabled: bool) -> None:
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ImportError), without_gc():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize(("name", "is_enabled"), [("EngineCore", 0), ("EngineCore_DP1", 0), ("VllmWorker-0", 1)])
def test_only_an_engine_core_begins_without_collection(name: str, is_enabled: int) -> None:
    main = sys.modules["__main__"].__spec__
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_state, args=(sender,), name=name)
    with as_main_module():
        process.start()
    assert receiver.poll(60)
    assert receiver.recv() == is_enabled
    process.join(60)
    assert sys.modules["__main__"].__spec__ is main


def _send_state(sender: multiprocessing.connection.Connection) -> None:
    sender.send(int(gc.isenabled()))
