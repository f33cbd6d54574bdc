"""The inventory of a SIF directory, the list of failures, and the estimate of the disk that a run needs."""

from __future__ import annotations

import pytest

from recipes.errors import DataError
from tools.task_images.build import Availability, spread
from tools.task_images.instances import instance_from
from tools.task_images.inventory import Failure, Inventory, SifFile, read_failures, write_failures


def made(file: str, size: int) -> SifFile:
    return SifFile(
        file=file, instance="i", reference="r", digest="d", bytes=size, sha256="s", tool="umoci", stripped=True
    )


def test_a_line_that_was_cut_spoils_no_other(tmp_path):
    inventory = Inventory(tmp_path)
    inventory.add(made("a.sif", 3))
    with (tmp_path / "inventory.jsonl").open("a") as file:
        file.write('{"file": "b.sif", "inst')  # the disk was full
    Inventory(tmp_path).add(made("c.sif", 4))
    assert sorted(Inventory(tmp_path).files) == ["a.sif", "c.sif"]


def test_a_file_counts_when_it_is_the_one_that_was_made(tmp_path):
    inventory = Inventory(tmp_path)
    inventory.add(made("a.sif", 3))
    (tmp_path / "a.sif").write_bytes(b"abc")
    (tmp_path / "b.sif").write_bytes(b"abc")  # nobody knows it, and it is no SIF file
    assert [inventory.is_whole(tmp_path / name) for name in ("a.sif", "b.sif", "c.sif")] == [True, False, False]
    assert [inventory.is_stripped(tmp_path / name) for name in ("a.sif", "b.sif", "c.sif")] == [True, False, False]
    (tmp_path / "a.sif").write_bytes(b"ab")  # as before a run that was killed between its line and its file
    assert not inventory.is_whole(tmp_path / "a.sif") and not inventory.is_stripped(tmp_path / "a.sif")


def test_an_empty_list_of_failures_is_no_file(tmp_path):
    failure = Failure(instance="i", reference="r", cause="missing", detail="not there")
    assert write_failures(tmp_path, [failure]) == tmp_path / "images.failed"
    assert read_failures(tmp_path) == [failure]
    assert write_failures(tmp_path, []) is None
    assert read_failures(tmp_path) == []


def test_room_is_estimated_for_results_and_for_the_work():
    instances = [instance_from({"instance_id": f"a__b-{n}", "dataset_name": "SWE-bench"}) for n in range(10)]
    available = Availability(instances=instances, failures=[], manifests={}, num_bytes=1000, largest=100)
    assert available.needed(4) == (1200, 4 * 600)
    assert available.needed(64) == (1200, 10 * 600)
    assert not available.is_exact
    assert [instance.id for instance in spread(instances, 3)] == ["a__b-0", "a__b-3", "a__b-6"]
    assert spread(instances, 10) == instances


@pytest.mark.parametrize("content", ["no list\n", "[]\n", '{"instance": "i"}\n', "\n"])
def test_a_list_of_failures_that_no_run_wrote_is_named(tmp_path, content):
    (tmp_path / "images.failed").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"images.failed: not a list .*\w+Error: .* remove it"):
        read_failures(tmp_path)
