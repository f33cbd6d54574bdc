import base64

from recipes.generation.generation import nccl_init, nccl_update, shared_memory_init
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
