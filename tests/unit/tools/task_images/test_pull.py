"""One odd image among others: its failure is counted, and the others are made."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.errors import LaunchError, Problem
from tools.task_images import build as module
from tools.task_images.build import Pull
from tools.task_images.convert import Conversion, write_environment
from tools.task_images.instances import Instance
from tools.task_images.inventory import Inventory
from tools.task_images.registry.references import Reference

ODD = {
    "a surrogate": ({"Env": ["A=\udc80"]}, "UnicodeEncodeError"),
    "variables that are no texts": ({"Env": [1]}, "AttributeError"),
    "a command of numbers": ({"Cmd": [1]}, "TypeError"),
    "a variable with NUL": (ValueError("embedded null byte"), "ValueError"),
}


def instance(name: str) -> Instance:
    return Instance(id=name, reference=Reference.parse(f"docker.io/x/{name}:latest"), file=f"{name}.sif", facts={})


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """Pulls of images that need no registry and no programs."""

    @contextmanager
    def blobs(*_: Any) -> Any:
        yield {}

    def convert(_conversion: Any, manifest: Any, _blobs: Any, place: Path, _facts: Any) -> Path:
        if isinstance(manifest.config, Exception):
            raise manifest.config
        (place / "root").mkdir()
        write_environment(place / "root", manifest.config)
        (place / "image.sif").write_bytes(b"image")
        return place / "image.sif"

    monkeypatch.setattr(module, "convert", convert)
    (tmp_path / "work").mkdir()
    fixed: Any = SimpleNamespace(of=blobs, add=lambda _: None)
    return Pull(
        directory=tmp_path,
        work=tmp_path / "work",
        registry=fixed,
        conversion=Conversion(apptainer=False),
        inventory=Inventory(tmp_path),
        blobs=fixed,
        locate=lambda reference: reference,
        manifests={},
        progress=fixed,
    )


@pytest.mark.parametrize("odd", ODD)
def test_one_odd_image_stops_no_other(work: Pull, odd: str) -> None:
    config, why = ODD[odd]
    work.manifests = {name: SimpleNamespace(digest="d", config=found) for name, found in (("a", config), ("b", {}))}
    (failure,) = work.run([instance("a"), instance("b")], 2, 2)
    assert (failure.instance, failure.cause) == ("a", "convert") and failure.detail.startswith(f"{why}: ")
    assert list(work.inventory.files) == ["b.sif"] and list(work.work.iterdir()) == []


def test_what_is_wrong_for_all_images_is_said_once(work: Pull) -> None:
    missing = LaunchError(Problem(where="umoci", wrong="not on PATH", fix="install it"))
    work.manifests = {"a": SimpleNamespace(digest="d", config=missing)}
    with pytest.raises(LaunchError, match="not on PATH"):
        work.run([instance("a")], 1, 1)


def test_the_disk_holds_a_file_and_its_line_before_the_file_takes_its_name(
    work: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, synced, fsync = work.directory, [], os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        content = b"" if path.is_dir() else path.read_bytes()
        synced.append((path.name, content, (place / "a.sif").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    work.manifests = {"a": SimpleNamespace(digest="d", config={})}
    assert work.run([instance("a")], 1, 1) == []
    line = (place / "inventory.jsonl").read_bytes()
    assert [entry for entry in synced if entry[0] != place.name] == [
        (".a.sif.partial", b"image", False),
        ("inventory.jsonl", line, False),
    ]
    assert synced[-1] == (place.name, b"", True)
