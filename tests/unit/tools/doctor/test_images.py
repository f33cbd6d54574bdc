"""Images of the job: what each runtime takes, as a file and by name."""

from __future__ import annotations

import pytest

from tests.unit.tools.launch_case import sif_file, write_case
from tools.doctor.machine import image_problems
from tools.doctor.slurm import file_findings, is_file_name, name_findings


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
    (tmp_path / "text").write_text("FROM debian\n", encoding="utf-8")
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


NEMO_RL_IMAGES = (  # of the published pages, and what they become
    "nvcr.io/nvidia/nemo-rl:v0.7.0",
    "your-registry/nemo-rl:v0.7.0.prefetched_venvs",
    "docker://nvcr.io#nvidia/nemo-rl:v0.7.0",
    "registry.example:5000/lab/nemo-rl@sha256:" + "0" * 64,
    "/images/nvidia+nemo-rl+v0.7.0.sqsh",
    "./nemo-rl.sqsh",
    "nemo_rl_v0.8.1.sif",
)
OLD_IMAGES = (
    "nvcr.io/nvidia/nemo-rl:v0.5.0.nemotron_3_super",
    "your-registry/nemo-rl:v0.5.0.nemotron_3_super_swe",
    "nvcr.io/nvidia/nemo-rl:v0.4.0.nemotron_3_nano",
    "/images/nemo-rl-v0.6.0.sqsh",
)
OTHER_IMAGES = (
    "registry.example/lab/native:1",
    "/srv/images/native.sqsh",
    "debian",
    "nemo-rl.example/lab/native:2",
    "/nemo-rl/images/native-v0.5.sqsh",
    "lab/my-nemo-rlx:1",
    "nemo-skills-sandbox:latest",
)


@pytest.mark.parametrize("image", NEMO_RL_IMAGES)
def test_an_image_of_nemo_rl_is_for_its_own_engine(image):
    (problem,) = image_problems("native", image)
    assert image in str(problem) and "ENGINE=nemo_rl" in problem.fix
    assert list(image_problems("nemo_rl", image)) == []


@pytest.mark.parametrize("image", OLD_IMAGES)
@pytest.mark.parametrize("engine", ["native", "nemo_rl"])
def test_an_old_image_of_nemo_rl_is_for_no_engine(image, engine):
    (problem,) = image_problems(engine, image)
    assert "writes for 0.7.0" in problem.wrong and "nvcr.io/nvidia/nemo-rl:v0.7.0" in problem.fix
    assert ("set ENGINE=nemo_rl" in problem.fix) is (engine == "native")


@pytest.mark.parametrize("image", OTHER_IMAGES)
def test_another_image_is_for_the_engine_that_is_asked_for(image):
    assert list(image_problems("native", image)) == list(image_problems("nemo_rl", image)) == []


def test_a_launch_in_the_image_of_another_engine_is_refused_unless_it_is_forced(tmp_path):
    case = write_case(tmp_path)
    (finding,) = (one for one in case.examine(CONTAINER="nvcr.io/nvidia/nemo-rl:v0.7.0") if one.code == "ENG009")
    assert (finding.severity, finding.can_force) == ("error", True)
    assert "ENG009" not in case.codes(CONTAINER="nvcr.io/nvidia/nemo-rl:v0.7.0", LAUNCHER="local")
    theirs = {"CONTAINER": "lab/native:1", "SWE_CONTAINER": "nvcr.io/nvidia/nemo-rl:v0.7.0"}
    for stage, places in (("stage2.2", ["SWE_CONTAINER"]), ("stage2.1", [])):
        at = [one.problem.where for one in case.examine(stage, **theirs) if one.code == "ENG009"]
        assert at == places
    assert "ENG009" not in case.codes(CONTAINER_RUNTIME="none", CONTAINER="nemo-rl:v0.5.0")
