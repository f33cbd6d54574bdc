"""Ray's object store as the place of tokens: read without a copy, and a loss is an error that names it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import ray
from policy_case import local_ray, lost_reference
from random_batch import random_rollouts
from ray.exceptions import OutOfDiskError

from recipes.cluster import token_store
from recipes.cluster.private import private_ray
from recipes.cluster.token_store import RayTokenStore, room_for
from recipes.errors import RunError, StalledError, TokensLostError
from recipes.tokens import lost_groups, output_texts, pack_rollouts
from tests.groups import as_lists, group_of

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=1):
        yield


def test_arrays_come_back_as_they_were_and_are_shared() -> None:
    _, tokens = pack_rollouts(random_rollouts(64, width=400))
    store = RayTokenStore()
    reference = store.put(tokens)
    first, again = store.get([reference, reference])
    assert as_lists(first) == as_lists(tokens)
    assert first.token_ids.ctypes.data == again.token_ids.ctypes.data != tokens.token_ids.ctypes.data
    assert not first.token_ids.flags.writeable
    assert isinstance(reference, ray.ObjectRef)


def test_tokens_whose_process_died_are_named() -> None:
    with pytest.raises(TokensLostError, match="the tokens of 1 group cannot be read from the object store"):
        RayTokenStore().get([lost_reference()])


def test_groups_whose_tokens_are_lost_are_found_among_others() -> None:
    store = RayTokenStore()
    rollouts = [replace(rollout, output_text="yes") for rollout in random_rollouts(2)]
    made = [group_of(rollouts) for _ in range(3)]
    groups = [replace(group, tokens=store.put(group.tokens)) for group in made]
    groups[1] = replace(groups[1], tokens=lost_reference())
    with pytest.raises(TokensLostError):
        store.get([group.tokens for group in groups])
    assert lost_groups(groups, store) == [groups[1]]
    assert output_texts([(group, 0) for group in groups], store) == ["yes", "", "yes"]


def test_tokens_that_do_not_come_are_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "_GET_SECONDS", 1.0)

    @ray.remote
    def sleep() -> None:
        time.sleep(600)

    never = sleep.remote()
    with pytest.raises(StalledError, match="the tokens of 2 groups did not come from the object store within 1 s"):
        RayTokenStore().get([never, never])
    ray.cancel(never, force=True)


def test_a_store_that_is_full_names_what_has_no_room_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")  # as on a disk that is full
    with private_ray(1, object_store_memory=80_000_000):
        store, held = RayTokenStore(), []

        @ray.remote
        def answer() -> np.ndarray:
            return np.ones(30_000_000, dtype=np.uint8)

        with pytest.raises(RunError) as full:
            while len(held) < 4:
                held.append(store.put(np.ones(30_000_000, dtype=np.uint8)))  # type: ignore[arg-type]
        with pytest.raises(RunError) as of_a_task, room_for("a group of worker 1"):
            ray.get(answer.remote())
        with pytest.raises(TokensLostError):  # but one whose process died is lost, as it was before
            store.get([lost_reference()])
    assert len(held) == 2
    for error, what in ((full, "the tokens of a group"), (of_a_task, "a group of worker 1")):
        text = str(error.value)
        assert re.match(r"Ray's object store on [\w.:-]+: no room for ", text) and f"no room for {what}: it is" in text
        for change in ("make room in /tmp", "RAY_local_fs_capacity_threshold", "grpo.num_prompts_per_step"):
            assert change in text


def test_a_copy_that_finds_no_room_is_not_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is sampled again, which a full store would make without end."""

    def full(*_args: object, **_kwargs: object) -> None:
        raise OutOfDiskError

    monkeypatch.setattr(token_store.ray, "get", full)
    with pytest.raises(RunError, match="no room for the tokens of 1 group") as refused:
        RayTokenStore().get([None])
    assert not isinstance(refused.value, TokensLostError)
