"""Images from and to a real registry on loopback, which also stands where Docker Hub would be."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from container_tools import start_engine
from loopback_registry import MANIFEST, OPEN, Pusher, busybox_root, layer, start_registry
from small_root import require

from recipes.errors import RunError
from tools.images.build import Build, build_of, make
from tools.images.lock import LOCK, digest_problems, read_lock

pytestmark = pytest.mark.functional
REGISTRIES_CONF = """[[registry]]
prefix = "docker.io"
location = "{host}"
insecure = true
[[registry]]
location = "{host}"
insecure = true
"""
BASE = "tiangolo/uwsgi-nginx-flask:python3.10"  # without a registry, as the Dockerfile of NeMo-Skills writes it


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The registry with the base image in it; podman and buildah have a store of their own and know only this one."""
    require("podman", "buildah", "runc", "docker-registry", "git")
    home = tmp_path_factory.mktemp("registry")
    with start_registry(home / "registry") as url, start_engine(home / "store") as engine:
        name, _, tag = BASE.partition(":")
        Pusher(url).push(name, tag, [layer(busybox_root())])
        host = url.removeprefix("http://")
        (home / "registries.conf").write_text(REGISTRIES_CONF.format(host=host), encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**engine.env, "CONTAINERS_REGISTRIES_CONF": str(home / "registries.conf")}.items():
                patch.setenv(name, value)
            yield host


def commit(repository: Path, text: str) -> str:
    """Commit a Dockerfile like that of NeMo-Skills and return the commit."""
    (repository / "dockerfiles").mkdir(parents=True, exist_ok=True)
    (repository / "dockerfiles/Dockerfile.sandbox").write_text(f"FROM {BASE}\nCOPY text /text\n", encoding="utf-8")
    (repository / "text").write_text(text, encoding="utf-8")
    git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def skills(builder: str, repository: Path, pinned: str, **variables: str) -> Build:
    """What `make sandbox SANDBOX=nemo-skills` does, with another repository in place of the one on GitHub."""
    work = build_of("nemo-skills", variables, builder)
    return replace(work, image=replace(work.image, source=(str(repository), pinned), check=("cat", "/text")))


@pytest.mark.parametrize("builder", ["podman", "buildah"])
def test_the_image_of_another_repository_is_built_at_its_commit(builder, host, tmp_path, capfd):
    (tmp_path / "root/containers").mkdir(parents=True)
    old = commit(tmp_path / "source", "the pinned text\n")
    new = commit(tmp_path / "source", "a later text\n")
    for pinned, text in ((old, "the pinned text\n"), (new, "a later text\n"), (old, "the pinned text\n")):
        entry = make(skills(builder, tmp_path / "source", pinned), tmp_path / "root")
        assert text in capfd.readouterr().out
        assert entry.inputs == pinned
    with pytest.raises(RunError, match="of: git -C build/nemo-skills fetch"):
        make(skills(builder, tmp_path / "source", "0" * 40), tmp_path / "root")
    assert read_lock(tmp_path / "root" / LOCK) == {"nemo-skills": entry}


@pytest.mark.parametrize("builder", ["podman", "buildah"])
def test_a_pushed_image_is_recorded_with_the_digest_that_the_registry_has(builder, host, tmp_path):
    (tmp_path / "root/containers").mkdir(parents=True)
    pinned = commit(tmp_path / "source", f"pushed by {builder}\n")
    work = skills(builder, tmp_path / "source", pinned, REGISTRY=f"{host}/lab", TAG=builder, PUSH="1")
    entry = make(work, tmp_path / "root")
    url = f"http://{host}/v2/lab/nemo-skills/manifests/{builder}"
    with OPEN(urllib.request.Request(url, headers={"Accept": MANIFEST}, method="HEAD"), timeout=30) as answer:
        assert answer.headers["Docker-Content-Digest"] == entry.digest
    name = f"{host}/lab/nemo-skills@{entry.digest}"
    subprocess.run(["podman", "pull", "--quiet", name], check=True)
    assert not list(digest_problems({"CONTAINER": name}, read_lock(tmp_path / "root" / LOCK)))
    assert list(digest_problems({"CONTAINER": f"{host}/x@sha256:{'0' * 64}"}, read_lock(tmp_path / "root" / LOCK)))


def test_a_push_that_the_registry_refuses_ends_with_the_command(host, tmp_path):
    (tmp_path / "root/containers").mkdir(parents=True)
    pinned = commit(tmp_path / "source", "nowhere\n")
    work = skills("podman", tmp_path / "source", pinned, REGISTRY="127.0.0.1:1/lab", PUSH="1")
    with pytest.raises(RunError, match=r"status 125 of: podman push .* 127\.0\.0\.1:1/lab/nemo-skills:latest"):
        make(work, tmp_path / "root")
    assert read_lock(tmp_path / "root" / LOCK) == {}
