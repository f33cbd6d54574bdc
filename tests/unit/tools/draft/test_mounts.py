"""What a container sees: links are followed as in the container, and every path of a launch is looked up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tools.draft.contract import Contract, read_contract
from tools.draft.mounts import (
    ROOT,
    Mount,
    container_arguments,
    image_name,
    mount_problems,
    parse_mounts,
    place_of,
    run_mounts,
    seen,
)


@dataclass
class Loaded:
    tree: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("stage.yaml")
    sources: dict[str, str] = field(default_factory=dict)


@dataclass
class Launch:
    """The attributes of a launch that the check reads."""

    contract: Contract
    run_dir: Path
    root: Path = ROOT
    loaded: Loaded = field(default_factory=Loaded)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A shared file system."""
    place = tmp_path / "shared"
    for name in ("models/sft", "data", "cache", "results/run", "judges/genrm"):
        (place / name).mkdir(parents=True)
    for name in ("data/train.jsonl", "data/val.jsonl", "models/sft/config.json"):
        (place / name).write_text("{}", encoding="utf-8")
    return place


def launch(shared: Path, **variables: str) -> Launch:
    environ = {
        "CONFIG_PATH": "configs/tiny/stage1_rlvr.yaml",
        "MODEL_PATH": f"{shared}/models/sft",
        "TRAIN_PATH": f"{shared}/data/train.jsonl",
        "VAL_PATH": f"{shared}/data/val.jsonl",
        "PERSISTENT_CACHE": f"{shared}/cache",
    }
    return Launch(read_contract({**environ, **variables})[0], shared / "results" / "run")


def targets(plan: Launch) -> list[str]:
    return [str(mount.target) for mount in run_mounts(plan.contract, plan.run_dir, Path("/code"))]


def test_everything_that_the_launch_names_is_mounted_under_its_own_name(shared):
    plan = launch(shared)
    assert targets(plan) == sorted(
        ["/code"]
        + [f"{shared}/{name}" for name in ("cache", "data/train.jsonl", "data/val.jsonl", "models/sft", "results/run")]
    )
    assert mount_problems(plan) == []


def test_a_mount_of_the_user_makes_ours_unnecessary(shared):
    plan = launch(shared, EXTRA_MOUNTS=f"{shared}:{shared}")
    assert targets(plan) == sorted(["/code", str(shared)])
    assert mount_problems(plan) == []


def test_what_the_run_writes_is_not_mounted_read_only(shared):
    wrong = mount_problems(launch(shared, EXTRA_MOUNTS=f"{shared}:{shared}:ro"))
    assert [(problem.where, problem.got) for problem in wrong] == [("EXTRA_MOUNTS", f"{shared}:{shared}:ro")] * 2
    assert [problem.expected.rpartition(" ")[2] for problem in wrong] == [f"{shared}/results/run", f"{shared}/cache"]
    inner = [f"{shared}/{name}:{shared}/{name}" for name in ("results", "cache")]
    assert mount_problems(launch(shared, EXTRA_MOUNTS=",".join([f"{shared}:{shared}:ro", *inner]))) == []


def test_extra_mounts_are_parsed(tmp_path):
    mounts, problems = parse_mounts(f"{tmp_path}:/data:ro, {tmp_path},")
    assert problems == []
    assert [str(mount) for mount in mounts] == [f"{tmp_path}:/data:ro", f"{tmp_path}:{tmp_path}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:/data", "absolute paths"),
        ("{tmp}:data", "absolute paths"),
        ("{tmp}:/", "a place inside the container"),
        ("/no/such/place:/data", "an existing /no/such/place"),
        ("{tmp}:/data:readonly", "ro or rw"),
        ("{tmp}:/data:ro:rw", "ro or rw"),
        ("{tmp}:/a b", "letters, digits"),
        ("{tmp}:/$HOME", "letters, digits"),
        ("{tmp}:/a,{tmp}:/a", "one mount for each place"),
    ],
)
def test_wrong_mounts_are_named(tmp_path, text, expected):
    (problem,) = parse_mounts(text.replace("{tmp}", str(tmp_path)))[1]
    assert problem.where == "EXTRA_MOUNTS"
    assert problem.expected.startswith(expected)


def test_links_are_followed_as_in_the_container(tmp_path):
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    other.mkdir()
    (real / "file").write_text("x", encoding="utf-8")
    (other / "secret").write_text("y", encoding="utf-8")
    (real / "inside").symlink_to("file")
    (real / "up").symlink_to("../other/secret")
    (real / "away").symlink_to(other / "secret")
    (real / "round").symlink_to("round")
    mounts = [Mount(real, Path("/data"))]
    assert seen(mounts, Path("/data/file")) == real / "file"
    assert seen(mounts, Path("/data/inside")) == real / "file"
    for name in ("up", "away", "round", "missing"):
        assert seen(mounts, Path("/data") / name) is None, name
    assert seen(mounts, real / "file") is None  # the host's name is not the container's
    assert seen([*mounts, Mount(other, Path("/other"))], Path("/data/up")) == other / "secret"
    assert seen([*mounts, Mount(other, other)], Path("/data/away")) == other / "secret"
    assert seen([*mounts, Mount(other, Path("/data/in"))], Path("/data/in/secret")) == other / "secret"
    assert seen(mounts, Path("/else/../data/file")) == real / "file"


def test_a_snapshot_of_the_hugging_face_cache_is_seen_whole(shared):
    cache = shared / "hub" / "models--lab--sft"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "abc").write_text("weights", encoding="utf-8")
    snapshot = cache / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    plan = launch(shared, MODEL_PATH=str(snapshot))
    mounts = run_mounts(plan.contract, plan.run_dir, Path("/code"))
    assert seen(mounts, snapshot / "model.safetensors") == cache / "blobs" / "abc"
    assert mount_problems(plan) == []


def test_the_parents_newest_export_is_found_when_the_job_starts(shared):
    checkpoints = shared / "results" / "parent" / "checkpoints"
    wanted = f"{checkpoints}/latest/hf"
    before = targets(launch(shared, MODEL_PATH=wanted))  # submitted while the parent runs
    for step in ("step_000010", "step_000020"):
        (checkpoints / step / "hf").mkdir(parents=True)
    (checkpoints / "latest").symlink_to("step_000010")
    plan = launch(shared, MODEL_PATH=wanted)
    assert targets(plan) == before
    mounts = run_mounts(plan.contract, plan.run_dir, Path("/code"))
    assert seen(mounts, Path(wanted)) == checkpoints / "step_000010" / "hf"
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").symlink_to("step_000020")
    assert seen(mounts, Path(wanted)) == checkpoints / "step_000020" / "hf"


def test_a_link_to_the_model_is_mounted_by_what_it_points_to(shared):
    (shared / "best").symlink_to(shared / "models" / "sft")
    assert list(place_of(shared / "best")) == [Mount(shared / "models" / "sft", shared / "best")]
    assert mount_problems(launch(shared, MODEL_PATH=str(shared / "best"))) == []


def test_every_path_that_is_not_mounted_is_named_at_once(shared, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "words.txt").write_text("x", encoding="utf-8")
    plan = launch(shared, EXTRA_MOUNTS=f"{tmp_path}/none:/none,{outside}:{shared}/data")
    judge = f"{shared}/judges/genrm"
    plan.loaded.tree = {
        "env": {"nemo_gym": {"judge": {"model": judge}, "files": [str(outside / "words.txt")]}},
        "policy": {"model_name": plan.contract["MODEL_PATH"], "name": "/not/here", "python": "/usr/bin/env"},
    }
    plan.loaded.sources = {"env.nemo_gym.judge.model": "mine.yaml"}
    problems = mount_problems(plan)
    assert [problem.where for problem in problems] == [
        "EXTRA_MOUNTS",
        "TRAIN_PATH",
        "VAL_PATH",
        "mine.yaml: env.nemo_gym.judge.model",
        "stage.yaml: env.nemo_gym.files.0",
    ]
    assert problems[3].fix == f"add {judge}:{judge} to EXTRA_MOUNTS"
    # Another directory lies where the training data should be.
    assert problems[1].what == f"{shared}/data/train.jsonl is not mounted, so no container sees it"
    (outside / "train.jsonl").write_text("other rows", encoding="utf-8")
    hidden = next(problem for problem in mount_problems(plan) if problem.where == "TRAIN_PATH")
    assert hidden.got == f"{shared}/data/train.jsonl, which is {outside}/train.jsonl in the container"
    assert "hides it" in hidden.fix


def test_a_configuration_outside_the_checkout_is_mounted_with_its_parents(shared):
    (shared / "mine").mkdir()
    mine = shared / "mine" / "run.yaml"
    mine.write_text(f"defaults: {ROOT}/configs/tiny/stage1_rlvr.yaml\n", encoding="utf-8")
    plan = launch(shared, CONFIG_PATH=str(mine))
    assert {str(shared / "mine"), f"{ROOT}/configs"} <= set(targets(plan))
    assert mount_problems(plan) == []
    (shared / "base").mkdir()
    parent = shared / "base" / "parent.yaml"
    parent.write_text(f"defaults: {ROOT}/configs/tiny/stage1_rlvr.yaml\n", encoding="utf-8")
    mine.write_text("defaults: ../base/parent.yaml\n", encoding="utf-8")
    (problem,) = mount_problems(plan)
    assert problem.where == "CONFIG_PATH"
    assert str(shared / "base") in problem.fix


def test_a_path_with_a_space_cannot_be_mounted(shared):
    (shared / "a model").mkdir()
    (problem,) = mount_problems(launch(shared, MODEL_PATH=f"{shared}/a model"))
    assert problem.got == f"{shared}/a model"


@pytest.mark.parametrize("variables", [{"CONTAINER_RUNTIME": "none"}, {"LAUNCHER": "local"}])
def test_without_containers_nothing_is_looked_up(shared, variables):
    assert mount_problems(launch(shared, EXTRA_MOUNTS="nonsense", **variables)) == []


def test_the_job_file_is_told_runtime_images_and_mounts(shared):
    plan = launch(shared, CONTAINER="nvcr.io/nvidia/nemo-rl:v0.7.0", SANDBOX_CONTAINER="./box.sqsh")
    words = container_arguments(plan.contract, plan.run_dir, Path("/code"))
    options = dict(word.split("=", 1) for word in words)
    assert list(options) == ["--runtime", "--container", "--sandbox", "--mounts"]
    assert options["--container"] == "nvcr.io#nvidia/nemo-rl:v0.7.0"
    assert options["--sandbox"] == str(Path("box.sqsh").absolute())
    mounts = options["--mounts"].split(",")
    assert mounts[0] == "/tmp:/tmp"
    assert f"{shared}/cache:{shared}/cache" in mounts
    bare = launch(shared, CONTAINER_RUNTIME="none")
    assert container_arguments(bare.contract, bare.run_dir, Path("/code")) == ("--runtime=none",)


@pytest.mark.parametrize(
    ("runtime", "image", "expected"),
    [
        ("pyxis", "nvcr.io/nvidia/nemo-rl:v0.7.0", "nvcr.io#nvidia/nemo-rl:v0.7.0"),
        ("pyxis", "docker://nvcr.io/nvidia/nemo-rl:1", "nvcr.io#nvidia/nemo-rl:1"),
        ("pyxis", "docker://me@nvcr.io#nvidia/nemo-rl:1", "me@nvcr.io#nvidia/nemo-rl:1"),
        ("pyxis", "localhost:5000/box", "localhost:5000#box"),
        ("pyxis", "library/debian:12", "library/debian:12"),
        ("pyxis", "debian", "debian"),
        ("pyxis", "dockerd://box:1", "dockerd://box:1"),
        ("pyxis", "/images/train.sqsh", "/images/train.sqsh"),
        ("apptainer", "nvcr.io#nvidia/nemo-rl:1", "docker://nvcr.io/nvidia/nemo-rl:1"),
        ("apptainer", "oras://registry.example/box:1", "oras://registry.example/box:1"),
        ("apptainer", "/images/train.sif", "/images/train.sif"),
        ("podman", "docker://nvcr.io#nvidia/nemo-rl:1", "nvcr.io/nvidia/nemo-rl:1"),
        ("podman", "localhost/box:1", "localhost/box:1"),
    ],
)
def test_images_are_spelled_for_the_runtime(runtime, image, expected):
    assert image_name(runtime, image) == expected
