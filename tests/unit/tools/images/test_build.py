"""The commands that make an image, what is refused before they start, and the lock of digests."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from recipes.errors import LaunchError, RunError
from tools.doctor.machine import image_problems
from tools.images import build as containers
from tools.images.build import (
    bases_of,
    build_of,
    digests,
    find_builder,
    main,
    output_of,
    problems,
    space_problems,
    wrong_values,
)
from tools.images.lock import (
    LockedImage,
    digest_problems,
    hash_inputs,
    launch_digest,
    read_lock,
    record_of,
    write_lock,
)
from tools.images.table import IMAGES, SKILLS_COMMIT

ROOT = Path(__file__).resolve().parents[4]
DIGEST, OTHER = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


def test_every_dockerfile_is_an_image_and_its_arguments_are_declared():
    ours = {image.dockerfile for image in IMAGES.values() if image.source is None}
    assert {path.relative_to(ROOT) for path in ROOT.glob("containers/*/Dockerfile")} == ours
    for image in IMAGES.values():
        if image.source is None:
            declared = set(
                re.findall(r"^ARG (\w+)", (ROOT / image.dockerfile).read_text(encoding="utf-8"), re.MULTILINE)
            )
            assert set(image.arguments) <= declared, image.name


def test_the_gpu_lock_has_what_the_packages_import_that_are_compiled():
    """An index shows no requirements of a source, and nothing outside the lock is installed."""
    imports = {
        "transformer-engine-torch": {
            "einops",
            "onnx",
            "onnxscript",
            "packaging",
            "pydantic",
            "transformer-engine-cu13",
        },
        "mamba-ssm": {"causal-conv1d", "einops", "transformers", "triton"},
    }
    lines = (ROOT / "containers/requirements-gpu.lock").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line and not line.startswith("#")}
    assert set(imports) <= pinned
    assert not [(name, needed - pinned) for name, needed in imports.items() if needed - pinned]
    assert {"onnx-ir", "ml-dtypes", "protobuf"} <= pinned, "what onnx and onnxscript import"


def test_published_base_and_pinned_sandbox():
    assert "ARG BASE=nvcr.io/nvidia/nemo-rl:v0.7.0\n" in (ROOT / IMAGES["nemo_rl"].dockerfile).read_text(
        encoding="utf-8"
    )
    commands = build_of("nemo-skills", {}, "podman").commands
    assert [command[-1] for command in commands[1:3]] == [SKILLS_COMMIT, SKILLS_COMMIT]
    assert commands[3][-1] == str(IMAGES["nemo-skills"].context)


def test_the_swe_image_is_built_on_the_training_image_of_the_same_variables():
    environ = {"REGISTRY": "r.example/lab", "TAG": "7", "ENGINE": "nemo_rl"}
    assert build_of("swe", environ, "podman").arguments == {"BASE": build_of("nemo_rl", environ, "podman").tag}
    assert build_of("swe", {}, "podman").arguments == {"BASE": build_of("native", {}, "podman").tag}
    assert build_of("swe", {**environ, "BASE": "x:1"}, "podman").arguments == {"BASE": "x:1"}


V5 = "nvcr.io/nvidia/nemo-rl:v0.5.0.nemotron_3_super"


@pytest.mark.parametrize(
    ("environ", "tag"),
    [
        ({}, "localhost/super-rl/nemo-rl:v0.7.0"),
        ({"BASE": V5, "VLLM_VERSION": "lock"}, "localhost/super-rl/nemo-rl:v0.5.0.nemotron_3_super"),
        ({"BASE": f"r.example:5000/nemo-rl@{DIGEST}"}, "localhost/super-rl/nemo-rl:latest"),
        ({"TAG": "mine"}, "localhost/super-rl/nemo-rl:mine"),
    ],
)
def test_the_name_of_an_image_of_nemo_rl_says_its_version_to_the_doctor(environ, tag):
    assert build_of("nemo_rl", environ, "podman").tag == tag
    is_old = bool(list(image_problems("nemo_rl", tag)))
    assert is_old is ("v0.5" in tag)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"BASE": V5}, "VLLM_VERSION: got none, expected lock: "),
        ({"BASE": V5, "VLLM_VERSION": "0.20.0"}, "VLLM_VERSION: got 0.20.0, expected lock: "),
        ({"VLLM_VERSION": "0.17"}, "VLLM_VERSION: got 0.17, expected lock or three numbers"),
        ({"PREFETCH": "a b;c"}, "PREFETCH: got a b;c, expected YAML files"),
        ({"CUDA": "13.0"}, "CUDA: got 13.0"),
        ({"WHEEL_ARCH": "arm64"}, "WHEEL_ARCH: got arm64"),
    ],
)
def test_a_build_argument_that_cannot_be_meant_is_refused(environ, said):
    (problem,) = wrong_values("nemo_rl", environ)
    assert said in str(problem)


def answers(found: dict[str, str]):
    """Return an `ask` of a store with some images, a `run` that downloads newer ones, and the commands it ran."""
    commands: list[list[str]] = []

    def run(command):
        commands.append(list(command))
        found[command[-1]] = DIGEST

    return (lambda command: found.get(command[-1], "")), run, commands


def test_a_base_is_looked_up_once_and_then_taken_from_the_lock():
    bases = bases_of(IMAGES["native"], {}, ROOT)
    assert [(base.argument, base.is_given) for base in bases] == [("BASE", False), ("UV", False)]
    ask, run, commands = answers({bases[1].name: OTHER})
    found = digests(bases, {}, "podman", ask=ask, run=run)
    assert found == {base.name: DIGEST for base in bases}, "what the store had is older than the tag"
    assert commands == [["podman", "pull", base.name] for base in bases]
    ask, run, commands = answers({base.name: f"sha256:{'c' * 64}" for base in bases})  # the tags have moved
    assert digests(bases, found, "podman", ask=ask, run=run) == found and commands == []
    assert bases[0].by_digest(DIGEST) == f"nvcr.io/nvidia/cuda@{DIGEST}"


def test_a_base_that_is_named_is_looked_up_again_unless_it_has_a_digest():
    (base,) = bases_of(IMAGES["sandbox"], {"BASE": "r.example:5000/debian"}, ROOT)
    assert base.is_given and base.by_digest(DIGEST) == f"r.example:5000/debian@{DIGEST}"
    ask, run, _ = answers({base.name: OTHER})  # in the store, from before
    assert digests([base], {base.name: OTHER}, "docker", ask=ask, run=run) == {base.name: DIGEST}
    assert bases_of(IMAGES["sandbox"], {"BASE": f"debian@{DIGEST}"}, ROOT) == ()


def test_our_own_training_image_is_no_base_to_look_up():
    assert bases_of(IMAGES["swe"], {}, ROOT) == ()
    assert build_of("swe", {"BASE": "localhost/super-rl/native:latest"}, "podman").bases == ()
    assert bases_of(IMAGES["nemo-skills"], {}, ROOT) == ()


def test_a_base_without_a_digest_ends_the_build():
    with pytest.raises(RunError, match=r"no digest of .*debian:bookworm-slim from: docker image inspect"):
        digests(bases_of(IMAGES["sandbox"], {}, ROOT), {}, "docker", ask=lambda _: "", run=lambda _: None)


def test_without_a_network_the_copy_of_a_base_is_taken_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def unreachable(_: object) -> None:
        raise RunError("no network")

    bases = bases_of(IMAGES["sandbox"], {}, ROOT)
    found = digests(bases, {}, "docker", ask=lambda _: OTHER, run=unreachable)
    assert found == {bases[0].name: OTHER}
    assert f"could not be pulled: the copy on this machine is taken, {OTHER}" in capsys.readouterr().out
    with pytest.raises(RunError, match="no network"):
        digests(bases, {}, "docker", ask=lambda _: "", run=unreachable)


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_an_image_is_built_then_checked_then_pushed_then_imported(builder):
    environ = {"REGISTRY": "r.example/lab/", "TAG": "7", "CUDA": "cu129", "PUSH": "1", "SQSH": "/images/x.sqsh"}
    environ["BUILD_FLAGS"] = "--platform=linux/arm64 --label='two words'"
    work = build_of("nemo_rl", environ, builder)
    commands = work.commands
    assert work.tag == "r.example/lab/nemo-rl:7"
    assert commands[0][:3] == (
        ["docker", "buildx", "build"] if builder == "docker" else [builder, "build", "--format=docker"]
    )
    assert commands[0][-4:] == ["--build-arg=CUDA=cu129", "--platform=linux/arm64", "--label=two words", "."]
    assert not [word for word in commands[0] if word.startswith("--build-arg=BASE")]  # the Dockerfile's default
    assert any(command[-3:] == list(IMAGES["nemo_rl"].check) for command in commands[1:-2])
    digest = [] if builder == "docker" else ["--digestfile=build/nemo_rl.digest"]
    assert commands[-2] == [builder, "push", *digest, work.tag]
    assert commands[-1][:2] == ["enroot", "import"]
    assert commands[-1][-1] == ("dockerd" if builder == "docker" else "podman") + f"://{work.tag}"


def test_dry_run_prints_the_commands_and_needs_no_builder(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("BUILDER", "buildah")
    assert main(["sandbox"]) == 0
    assert "buildah build --format=docker --file=containers/sandbox/Dockerfile" in capsys.readouterr().out


def test_a_dry_run_shows_the_builder_that_would_be_taken(monkeypatch, tmp_path):
    for name, status in {"docker": 1, "podman": 1, "buildah": 0}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_builder("", is_dry=True) == "buildah"
    assert find_builder("docker", is_dry=True) == "docker"
    with pytest.raises(LaunchError, match=r"docker does not work here; .* `docker buildx inspect`$"):
        find_builder("docker")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert find_builder("", is_dry=True) == "docker"
    with pytest.raises(LaunchError, match="no builder works"):
        find_builder("")


@pytest.mark.parametrize("is_dry", ["0", "1"])
@pytest.mark.parametrize(
    ("image", "variables", "message"),
    [
        ("sandbox", {"BUILDER": "kaniko"}, "BUILDER: got kaniko, expected docker or podman or buildah"),
        ("sandbox", {"TAG": "two words"}, "TAG: got two words, expected up to 128 letters, digits"),
        ("sandbox", {"TAG": "a/b"}, "TAG: got a/b"),
        ("sandbox", {"REGISTRY": "https://r.example"}, "REGISTRY: got https://r.example, expected HOST"),
        ("sandbox", {"REGISTRY": "r.example/Lab"}, "REGISTRY: got r.example/Lab"),
        ("sandbox", {"PUSH": "maybe"}, "PUSH: got maybe, expected true or false"),
        ("sandbox", {"PUSH": "yes"}, "PUSH: REGISTRY is not set, so there is nowhere to push to; set REGISTRY="),
        ("sandbox", {"BUILD_FLAGS": "--label='x"}, "BUILD_FLAGS: got --label='x, expected words quoted as for a shell"),
        ("sand", {}, "ENGINE or SANDBOX: got sand, expected cpu_test or native or nemo-skills"),
    ],
)
def test_a_wrong_value_is_one_line_in_a_dry_run_too(image, variables, message, is_dry, monkeypatch, tmp_path, capsys):
    (tmp_path / "podman").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in {**variables, "DRY_RUN": is_dry}.items():
        monkeypatch.setenv(name, value)
    assert main([image]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("registry", ["localhost:5000", "r.example/lab/x_y", "[::1]:5000/a", "10.0.0.1:80", "lab"])
def test_names_of_registries(registry):
    assert wrong_values("sandbox", {"REGISTRY": registry, "TAG": "v1.2_x-y", "PUSH": "1"}) == []


def test_what_would_fail_late_is_refused_first(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "podman").write_text("#!/bin/sh\nexit 125\n", encoding="utf-8")
    (tmp_path / "podman").chmod(0o755)
    (tmp_path / "file").touch()
    found = problems(build_of("sandbox", {"SQSH": f"{tmp_path}/file/x.sqsh"}, "buildah"))
    assert [f"{problem.where}: {problem.wrong}" for problem in found] == [
        "enroot: not on PATH, but SQSH needs it",
        f"SQSH: {tmp_path}/file is not a directory that you may write to",
    ]
    found = problems(build_of("sandbox", {"SQSH": str(tmp_path)}, "podman"))
    assert [problem.fix for problem in found][1:] == [f"set SQSH={tmp_path}/sandbox.sqsh"]
    assert [problem.where for problem in problems(build_of("nemo-skills", {}, "podman"))] == ["git"]
    base, checksum = problems(build_of("swe", {}, "podman"))
    assert str(checksum).startswith("APPTAINER_SHA256: not set, so the download cannot be checked; ")
    assert str(base).startswith("BASE: podman has no image localhost/super-rl/native:latest; ")
    assert problems(build_of("swe", {"BASE": "r.example/x:1", "APPTAINER_SHA256": "0" * 64}, "podman")) == []
    assert problems(build_of("sandbox", {}, "podman")) == []


def test_an_import_needs_room_for_the_file_and_for_enroot(tmp_path):
    assert space_problems(1, tmp_path, {"ENROOT_TEMP_PATH": str(tmp_path)}) == []
    found = space_problems(2**60, tmp_path, {"TMPDIR": str(tmp_path)})
    assert [problem.where for problem in found] == ["SQSH", "ENROOT_TEMP_PATH"]
    (found,) = space_problems(1, tmp_path, {"ENROOT_TEMP_PATH": f"{tmp_path}/none"})
    assert str(found).startswith(f"ENROOT_TEMP_PATH: {tmp_path}/none is not a directory")


def test_the_lock_survives_and_inputs_are_hashed_with_their_names(tmp_path):
    entry = LockedImage(tag="t", digest=DIGEST, inputs="i", arguments={"CUDA": "cu130"})
    write_lock(tmp_path / "images.lock", {"native": entry})
    assert read_lock(tmp_path / "images.lock") == {"native": entry}
    assert read_lock(tmp_path / "none") == {}
    (tmp_path / "cut").write_text('{"images": {"native": {"tag": "t"}}}', encoding="utf-8")
    with pytest.raises(LaunchError, match="cut: the lock of images is damaged"):
        read_lock(tmp_path / "cut")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "a").write_text("x", encoding="utf-8")
    before = hash_inputs(tmp_path, [Path("dir")])
    (tmp_path / "dir" / "a").rename(tmp_path / "dir" / "b")
    assert hash_inputs(tmp_path, [Path("dir")]) != before


def test_a_launch_with_another_image_is_reported(tmp_path):
    lock = {"native": LockedImage(tag="t", digest=DIGEST, inputs="", arguments={})}
    image = tmp_path / "x.sqsh"
    image.write_bytes(b"12345")
    assert launch_digest("r.example/x:1") is None
    assert launch_digest(str(image)) is None
    for digest, expected in ((DIGEST, 0), (OTHER, 1)):
        record_of(image).write_text(json.dumps({"tag": "t", "digest": digest, "bytes": 5}), encoding="utf-8")
        found = list(digest_problems({"CONTAINER": str(image), "SANDBOX_CONTAINER": f"r.example/x@{DIGEST}"}, lock))
        assert len(found) == expected
    assert found[0].got == OTHER
    assert not list(digest_problems({"CONTAINER": str(image)}, {}))
    image.write_bytes(b"other")
    image.write_bytes(b"another")
    assert "was replaced" in str(launch_digest(str(image)))


def test_a_builder_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "ANSWER_SECONDS", 0.1)
    with pytest.raises(RunError, match=r"no answer after 0\.1 s: sleep 60"):
        output_of(["sleep", "60"], tmp_path)
