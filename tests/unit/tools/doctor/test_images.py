"""Images of the job: what each runtime takes, as a file and by name."""

from __future__ import annotations

import pytest

from tests.unit.tools.launch_case import sif_file
from tools.doctor.images import file_findings, is_file_name, name_findings


def codes(findings: object) -> list[str]:
    return [finding.code for finding in findings]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("runtime", "accepted"),
    [("pyxis", ["squashfs"]), ("apptainer", ["squashfs", "sif", "directory"]), ("podman", [])],
)
def test_kinds_of_files(tmp_path, runtime, accepted):
    (tmp_path / "squashfs").write_bytes(b"hsqs" + bytes(36) + (300).to_bytes(8, "little") + bytes(300))
    (tmp_path / "sif").write_bytes(sif_file(content=10))
    (tmp_path / "directory").mkdir()
    (tmp_path / "text").write_text("FROM debian\n")
    for name in ("squashfs", "sif", "directory", "text"):
        wrong = codes(file_findings("CONTAINER", str(tmp_path / name), runtime))
        assert wrong == ([] if name in accepted else ["IMG002"]), name


def test_a_cut_import_is_found_by_its_header(tmp_path):
    (tmp_path / "a.sqsh").write_bytes(b"hsqs" + bytes(36) + (300).to_bytes(8, "little") + bytes(200))
    (finding,) = file_findings("CONTAINER", str(tmp_path / "a.sqsh"), "pyxis")
    assert (finding.code, finding.problem.expected) == ("IMG003", "300 bytes, as its header says")


def test_what_is_meant_as_a_file():
    assert all(is_file_name(image) for image in ("/a/b", "./b.sqsh", "b.sqsh", "~/x.sif"))
    assert not any(is_file_name(image) for image in ("registry.example/a:1", "docker://a/b.sif", "debian"))


@pytest.mark.parametrize(
    "image",
    ["debian", "registry.example/training:1", "registry.example#lab/training:1.2", "user@host:5000#a/b:c",
     "docker://registry.example/lab/rl@sha256:" + "0" * 64],
)  # fmt: skip
def test_names_that_pyxis_fetches(image):
    assert codes(name_findings("CONTAINER", image, "pyxis")) == []


@pytest.mark.parametrize(
    ("image", "runtime"),
    [
        ("registry.example/Training:1", "pyxis"),
        ("registry.example/training:", "pyxis"),
        ("registry.example/training:1 --privileged", "pyxis"),
        ("https://registry.example/training", "pyxis"),
        ("dockerd://training:1", "apptainer"),
        ("oras://registry.example/training:1", "podman"),
    ],
)
def test_names_that_no_node_could_fetch(image, runtime):
    assert codes(name_findings("CONTAINER", image, runtime)) == ["IMG004"]
