"""What one node compiled reaches the next job's nodes whole, and nothing that is wrong with a cache ends a job."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from tools.job.compile_cache import CompileCache, close_cache, open_cache, seed_path


def make_node(tmp_path: Path, name: str) -> CompileCache:
    """Open the cache of one node; every node has a /tmp of its own."""
    (tmp_path / name).mkdir(exist_ok=True)
    cache = open_cache(tmp_path / name, seed_path(tmp_path / "shared"))
    assert cache is not None
    return cache


def compile_kernel(cache: CompileCache, name: str) -> None:
    path = Path(cache.variables()["VLLM_CACHE_ROOT"]) / "kernels" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name, encoding="utf-8")
    path.chmod(0o755)


def kernels(cache: CompileCache) -> set[str]:
    return {path.name for path in Path(cache.variables()["VLLM_CACHE_ROOT"]).glob("kernels/*")}


def test_what_one_job_compiled_is_there_when_the_next_begins(tmp_path: Path, capfd) -> None:
    first = make_node(tmp_path, "n1")
    compile_kernel(first, "a")
    os.link(first.path / "vllm/kernels/a", first.path / "vllm/kernels/b")
    (first.path / "vllm/kernels/link").symlink_to("/etc/passwd")
    close_cache(first)
    assert not first.path.exists(), "the node's directory stays behind"
    assert "kept 2 compiled files, 2 of them new" in capfd.readouterr().err
    second = make_node(tmp_path, "n2")
    assert kernels(second) == {"a", "b"}
    assert os.access(second.path / "vllm/kernels/b", os.X_OK)
    close_cache(second)
    assert capfd.readouterr().err == "", "a node that compiled nothing has replaced the file"


def test_nodes_write_to_themselves_and_one_of_them_keeps_what_is_new(tmp_path: Path) -> None:
    nodes = [make_node(tmp_path, f"n{number}") for number in range(3)]
    for number, node in enumerate(nodes):
        compile_kernel(node, f"k{number}")
    assert [kernels(node) for node in nodes] == [{"k0"}, {"k1"}, {"k2"}]
    for node in nodes:
        close_cache(node)
    later = make_node(tmp_path, "n1")
    assert kernels(later) == {"k0"}
    compile_kernel(later, "k1")
    close_cache(later)
    assert kernels(make_node(tmp_path, "n3")) == {"k0", "k1"}


def test_two_jobs_on_a_node_share_its_directory_until_the_last_has_ended(tmp_path: Path) -> None:
    first, second = make_node(tmp_path, "n1"), make_node(tmp_path, "n1")
    compile_kernel(first, "a")
    close_cache(first)
    assert kernels(second) == {"a"}
    assert not second.seed.exists()
    close_cache(second)
    assert second.seed.exists() and not second.path.exists()


def test_a_killed_start_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    first = make_node(tmp_path, "n1")
    compile_kernel(first, "torn")
    os.close(first.lock)
    assert kernels(make_node(tmp_path, "n1")) == set()


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_a_damaged_file_is_said_and_replaced(tmp_path: Path, capfd, content: bytes) -> None:
    seed = seed_path(tmp_path / "shared")
    seed.parent.mkdir(parents=True)
    seed.write_bytes(content)
    node = make_node(tmp_path, "n1")
    assert "this node compiles anew" in capfd.readouterr().err
    compile_kernel(node, "a")
    close_cache(node)
    assert kernels(make_node(tmp_path, "n2")) == {"a"}


def test_an_archive_cannot_write_beside_the_directory(tmp_path: Path, capfd) -> None:
    seed = seed_path(tmp_path / "shared")
    seed.parent.mkdir(parents=True)
    (tmp_path / "evil").write_text("x", encoding="utf-8")
    with tarfile.open(seed, "w") as tar:
        tar.add(tmp_path / "evil", arcname="../outside")
    make_node(tmp_path, "n1")
    assert not (tmp_path / "n1" / "outside").exists()
    assert "this node compiles anew" in capfd.readouterr().err


def test_a_directory_that_others_can_read_is_not_used(tmp_path: Path, capfd) -> None:
    (tmp_path / f"compiled-rl-{os.getuid()}").mkdir(mode=0o755)
    assert open_cache(tmp_path, tmp_path / "seed.tar") is None
    assert "with mode 755; this node keeps no compile caches" in capfd.readouterr().err


def test_a_full_shared_disk_costs_only_the_cache(tmp_path: Path, capfd) -> None:
    node = make_node(tmp_path, "n1")
    compile_kernel(node, "a")
    (tmp_path / "shared").write_text("no directory", encoding="utf-8")
    close_cache(node)
    assert "was not replaced" in capfd.readouterr().err
    assert not node.path.exists()
