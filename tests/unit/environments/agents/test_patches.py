"""The patch that an agent leaves: what it holds, and that nothing in the repository decides how it is read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from recipes.environments.agents.coding import patches
from recipes.environments.agents.coding.patches import NoPatchError, begin, read_patch
from tests.directory_container import DirectoryContainer

WHO = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(place: Path, *words: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", "-C", str(place), *WHO, *words], check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout


@pytest.fixture
async def container(tmp_path: Path) -> AsyncIterator[DirectoryContainer]:
    place = tmp_path / "work"
    place.mkdir()
    (place / "a.py").write_text("one\ntwo\n", encoding="utf-8")
    (place / "gone.py").write_text("old\n", encoding="utf-8")
    (place / "data.bin").write_bytes(bytes(range(256)) * 4)
    (place / "kept.log").write_text("tracked although it is ignored\n", encoding="utf-8")
    (place / ".gitignore").write_text("*.log\n*.pyc\n", encoding="utf-8")
    git(place, "init", "-q")
    git(place, "add", "-A", "-f")
    git(place, "commit", "-qm", "base")
    (place / "of_image.txt").write_text("untracked since before the agent\n", encoding="utf-8")
    container = DirectoryContainer(place, tmp_path)
    yield container
    await container.close()


def applied(container: DirectoryContainer, patch: str, tmp_path: Path) -> Path:
    """Return the state before the agent with a patch applied."""
    fresh = tmp_path / "fresh"
    git(tmp_path, "clone", "-q", str(container.place), str(fresh))
    (fresh / "of_image.txt").write_text("untracked since before the agent\n", encoding="utf-8")
    subprocess.run(["git", "-C", str(fresh), "apply", "-"], input=patch.encode(), check=True)
    return fresh


async def test_nothing_changed_is_no_patch(container: DirectoryContainer) -> None:
    assert await read_patch(container, await begin(container, str(container.place))) == ""


async def test_all_kinds_of_changes_come_back(container: DirectoryContainer, tmp_path: Path) -> None:
    place = container.place
    beginning = await begin(container, str(place))
    (place / "a.py").write_text("one\n2\r\n", encoding="utf-8")
    (place / "gone.py").unlink()
    (place / "data.bin").write_bytes(bytes(range(255, -1, -1)))
    (place / "kept.log").write_text("changed\n", encoding="utf-8")
    (place / "new.log").write_text("ignored\n", encoding="utf-8")
    (place / "sub dir").mkdir()
    (place / "sub dir" / "ü.py").write_text("no end of line", encoding="utf-8")
    (place / "run").write_text("#!/bin/sh\n", encoding="utf-8")
    (place / "run").chmod(0o755)
    (place / "link").symlink_to("a.py")
    os.mkfifo(place / "pipe")
    patch = await read_patch(container, beginning)
    fresh = applied(container, patch, tmp_path)
    assert (fresh / "a.py").read_bytes() == b"one\n2\r\n"
    assert not (fresh / "gone.py").exists()
    assert (fresh / "data.bin").read_bytes() == bytes(range(255, -1, -1))
    assert (fresh / "kept.log").read_text(encoding="utf-8") == "changed\n"
    assert not (fresh / "new.log").exists()
    assert (fresh / "sub dir" / "ü.py").read_text(encoding="utf-8") == "no end of line"
    assert os.access(fresh / "run", os.X_OK)
    assert (fresh / "link").readlink() == Path("a.py")
    assert "of_image" not in patch


async def test_what_was_committed_is_part_of_it(container: DirectoryContainer) -> None:
    beginning = await begin(container, str(container.place))
    (container.place / "a.py").write_text("one\n2\n", encoding="utf-8")
    git(container.place, "commit", "-qam", "my work")
    git(container.place, "checkout", "-q", "-b", "other")
    assert "+2" in await read_patch(container, beginning)


async def test_nothing_of_the_repository_runs(container: DirectoryContainer, tmp_path: Path) -> None:
    """Hooks, filters, drivers of diff, a monitor of files: the agent may set all of them."""
    place = container.place
    beginning = await begin(container, str(place))
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n", encoding="utf-8")
    trap.chmod(0o755)
    for key in ("core.fsmonitor", "filter.x.clean", "filter.x.process", "diff.x.textconv", "diff.external"):
        git(place, "config", key, str(trap))
    for key in ("diff.noprefix", "diff.renames", "core.autocrlf", "filter.x.required"):
        git(place, "config", key, "true")
    git(place, "config", "core.worktree", "/")
    git(place, "config", "core.hooksPath", str(tmp_path))
    (place / ".gitattributes").write_text("* filter=x diff=x\n*.bin -diff\na.py ident\n", encoding="utf-8")
    (place / ".git" / "info" / "attributes").write_text("* export-ignore -diff\n", encoding="utf-8")
    (place / ".git" / "info" / "exclude").write_text("*\n", encoding="utf-8")
    (tmp_path / "home.gitconfig").write_text("[diff]\nexternal = false\n", encoding="utf-8")
    (tmp_path / ".gitconfig").write_text(
        f"[diff]\nexternal = {trap}\n[core]\nexcludesFile = {trap}\n", encoding="utf-8"
    )
    (place / "a.py").write_text("one\n2\n", encoding="utf-8")
    (place / "b.py").write_text("new\n", encoding="utf-8")
    patch = await read_patch(container, beginning)
    assert "--- a/a.py\n+++ b/a.py\n" in patch
    assert "+2\n" in patch
    assert "+++ b/b.py" in patch
    assert not (tmp_path / "ran").exists()


async def test_bytes_that_are_no_text_make_it_binary(container: DirectoryContainer, tmp_path: Path) -> None:
    beginning = await begin(container, str(container.place))
    (container.place / "a.py").write_bytes(b"# caf\xe9\n")
    patch = await read_patch(container, beginning)
    assert "GIT binary patch" in patch
    assert (applied(container, patch, tmp_path) / "a.py").read_bytes() == b"# caf\xe9\n"


async def test_a_huge_patch_is_refused(container: DirectoryContainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "MAX_PATCH", 10_000)
    beginning = await begin(container, str(container.place))
    (container.place / "big.py").write_text("x = 1\n" * 100_000, encoding="utf-8")
    with pytest.raises(NoPatchError, match="more than 10000 bytes"):
        await read_patch(container, beginning)


async def test_a_repository_that_is_gone_is_no_patch(container: DirectoryContainer) -> None:
    beginning = await begin(container, str(container.place))
    (container.place / "a.py").write_text("one\n2\n", encoding="utf-8")
    for path in sorted((container.place / ".git").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(NoPatchError, match="git could not read the repository"):
        await read_patch(container, beginning)


async def test_a_directory_without_a_repository_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    container = DirectoryContainer(place, tmp_path)
    with pytest.raises(NoPatchError, match="git could not read the repository: fatal: not a git repository"):
        await begin(container, str(place))
    await container.close()


async def test_a_repository_inside_does_not_spoil_the_rest(container: DirectoryContainer) -> None:
    beginning = await begin(container, str(container.place))
    (container.place / "inner").mkdir()
    git(container.place / "inner", "init", "-q")
    (container.place / "inner" / "x.py").write_text("x\n", encoding="utf-8")
    (container.place / "a.py").write_text("one\n2\n", encoding="utf-8")
    (container.place / "z.py").write_text("z\n", encoding="utf-8")
    patch = await read_patch(container, beginning)
    assert "+2\n" in patch
    assert "b/z.py" in patch
