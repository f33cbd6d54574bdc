"""The mounts of a run's containers, and whether the containers see every path of the launch.

A container follows symbolic links itself. So it does not see the whole of a mounted directory whose links lead out of
it, such as a snapshot in the Hugging Face cache. `seen` looks up a path as a process in the container would.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config.merge import read_chain
from recipes.errors import Problem
from tools.draft.contract import Contract
from tools.draft.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
INPUTS = ("MODEL_PATH", "TRAIN_PATH", "VAL_PATH", "SIF_DIR", "HF_HOME")  # variables that name what the run reads
NODE_TMP = "/tmp:/tmp"  # the node's own: Ray keeps its sockets there, and the head and the driver are two containers
AWKWARD = re.compile(r"[^\w./@%+=~-]")  # `:` and `,` separate mounts, and pyxis writes paths into a shell script
FLAGS = ("ro", "rw")
MAX_LINKS = 40
_OF_EVERY_IMAGE = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the host and where a container sees it."""

    source: Path
    target: Path
    flags: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (str(self.source), str(self.target), self.flags)))


def parse_mounts(text: str) -> tuple[list[Mount], list[Problem]]:
    """Parse SRC[:DST[:ro]],...; return the mounts with everything that is wrong with them."""
    mounts: list[Mount] = []
    problems: list[Problem] = []
    for entry in filter(None, (word.strip() for word in text.split(","))):
        source, _, rest = entry.partition(":")
        target, _, flags = rest.partition(":")
        mount = Mount(Path(source), Path(target or source), flags)
        mounts.append(mount)
        problems += _entry_problems(entry, mount)
    targets = [mount.target for mount in mounts]
    for twice in sorted({place for place in targets if targets.count(place) > 1}):
        problems.append(_extra(str(twice), "one mount for each place", "remove one of them"))
    return mounts, problems


def _entry_problems(entry: str, mount: Mount) -> Iterator[Problem]:
    if not mount.source.is_absolute() or not mount.target.is_absolute():
        yield _extra(entry, "absolute paths: SRC:DST[:ro]", "write the whole path")
    elif mount.target == Path("/"):
        yield _extra(entry, "a place inside the container", "name a directory")
    elif not mount.source.exists():
        yield _extra(entry, f"an existing {mount.source}", "correct the path, or remove the mount")
    if mount.flags not in ("", *FLAGS):
        yield _extra(entry, f"{' or '.join(FLAGS)} after the second colon", "correct it")
    yield from _awkward("EXTRA_MOUNTS", mount)


def _extra(got: str, expected: str, fix: str) -> Problem:
    return Problem(where="EXTRA_MOUNTS", got=got, expected=expected, fix=fix)


def _awkward(where: str, mount: Mount) -> Iterator[Problem]:
    for path in dict.fromkeys((mount.source, mount.target)):
        if AWKWARD.search(str(path)):
            expected = "letters, digits and . _ / @ % + = ~ - in a path that is mounted"
            yield Problem(where=where, got=str(path), expected=expected, fix="rename it, or CONTAINER_RUNTIME=none")


def run_mounts(contract: Contract, run_dir: Path, code_dir: Path) -> list[Mount]:
    """Return what containers see of the shared disks, outer places first: EXTRA_MOUNTS, and what they leave out."""
    mounts, _ = parse_mounts(contract["EXTRA_MOUNTS"])
    extra = list(mounts)
    for mount in _own_mounts(contract, run_dir, code_dir):
        # A place that EXTRA_MOUNTS fills stays as the user says; `mount_problems` reports where that is wrong.
        if not any(mount.target.is_relative_to(other.target) for other in extra) and _host(mounts, mount.target) != (
            mount.source
        ):
            mounts.append(mount)
    return sorted(mounts, key=lambda mount: mount.target.parts)


def _own_mounts(contract: Contract, run_dir: Path, code_dir: Path) -> Iterator[Mount]:
    # Made at submission, so they need not exist yet.
    for path in (run_dir, code_dir, Path(contract["PERSISTENT_CACHE"]).absolute()):
        yield Mount(path.resolve(), path)
    config = (ROOT / contract["CONFIG_PATH"]).absolute()
    if not config.is_relative_to(ROOT):
        yield from place_of(config.parent)
        yield from place_of(ROOT / "configs")  # its parents
    for path in _input_paths(contract).values():
        yield from place_of(path)


def _input_paths(contract: Contract) -> dict[str, Path]:
    given = {name: contract.values.get(name, "") for name in INPUTS}
    return {name: Path(os.path.normpath(Path(value).absolute())) for name, value in given.items() if value}


def place_of(path: Path) -> Iterator[Mount]:
    """Yield the mounts that show `path` and the files that its links lead to, each under its own name."""
    parts = path.parts
    if "latest" in parts[1:] and parts[parts.index("latest") - 1] == "checkpoints":
        # The newest checkpoint when the job starts, not the one of today: the whole run of the parent stage.
        run_dir = Path(*parts[: parts.index("latest") - 1])
        yield Mount(run_dir.resolve(), run_dir)
        return
    yield Mount(path.resolve(), path)
    if path.is_dir():
        for child in path.iterdir():
            if child.is_symlink():
                named = Path(os.path.normpath(path / child.readlink()))
                real = child.resolve()
                yield Mount(real.parent, named.parent) if real.name == named.name else Mount(real, named)


def seen(mounts: Sequence[Mount], path: Path) -> Path | None:
    """Return the file of the host that `path` leads to in a container; None when none is mounted there."""
    here, todo, links = Path("/"), list(path.parts[1:]), 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            here = here.parent
            continue
        host = _host(mounts, here / part)
        if host is None or not host.is_symlink():
            here /= part
            continue
        links += 1
        if links > MAX_LINKS:
            return None
        link = host.readlink()
        todo = [*(link.parts[1:] if link.is_absolute() else link.parts), *todo]
        here = Path("/") if link.is_absolute() else here
    host = _host(mounts, here)
    return host if host is not None and host.exists() else None


def _host(mounts: Sequence[Mount], path: Path) -> Path | None:
    """Return what the innermost mount has at a place of the container."""
    inner = _innermost(mounts, path)
    return None if inner is None else inner.source.resolve() / path.relative_to(inner.target)


def _innermost(mounts: Sequence[Mount], path: Path) -> Mount | None:
    around = [mount for mount in mounts if path.is_relative_to(mount.target)]
    return max(around, key=lambda mount: len(mount.target.parts), default=None)


def mount_problems(launch: Launch) -> list[Problem]:
    """Return everything that a container of the run would not see, and every mount that cannot be."""
    contract = launch.contract
    if contract.is_local or contract["CONTAINER_RUNTIME"] == "none" or launch.run_dir is None:
        return []
    extra, problems = parse_mounts(contract["EXTRA_MOUNTS"])
    mounts = run_mounts(contract, launch.run_dir, launch.root)
    for mount in mounts:
        if mount not in extra:
            problems += _awkward("a path that the job mounts", mount)
    for where, path in _needed(launch):
        problems += _sight_problems(where, path, mounts)
    for path in (launch.run_dir, Path(contract["PERSISTENT_CACHE"]).absolute()):
        inner = _innermost(mounts, path)
        if inner is not None and inner.flags == "ro":
            fix = f"remove `:ro`, or mount {path}:{path} as well"
            problems.append(_extra(str(inner), f"a mount that can be written: the run writes to {path}", fix))
    return problems


def _needed(launch: Launch) -> Iterator[tuple[str, Path]]:
    """Return every path that the job reads, and what names it."""
    inputs = _input_paths(launch.contract)
    for name, path in inputs.items():
        yield name, path
        if path.is_dir():
            yield from ((name, child) for child in sorted(path.iterdir()) if child.is_symlink())
    config = (launch.root / launch.contract["CONFIG_PATH"]).absolute()
    if launch.contract["CONFIG_PATH"] and not config.is_relative_to(launch.root):
        for path, _ in read_chain(config)[0]:
            yield "CONFIG_PATH", path
    if launch.loaded is not None:
        for key, path in _paths(launch.loaded.tree):
            if path not in inputs.values():
                yield f"{launch.loaded.sources.get(key, launch.loaded.path)}: {key}", path


def _paths(tree: Mapping[str, Any] | Sequence[Any], key: str = "") -> Iterator[tuple[str, Path]]:
    """Yield key and path of the values that name a file of this machine, but not one that every image has."""
    for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        inner = f"{key}.{name}" if key else str(name)
        if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
            yield from _paths(value, inner)
        elif isinstance(value, str) and value.startswith("/") and "\n" not in value and len(value) < 1024:
            path = Path(os.path.normpath(value))
            is_imaged = path == Path("/") or any(path.is_relative_to(place) for place in _OF_EVERY_IMAGE)
            if not is_imaged and path.exists():
                yield inner, path


def _sight_problems(where: str, path: Path, mounts: Sequence[Mount]) -> Iterator[Problem]:
    if not path.exists():
        return  # another check reports it
    found = seen(mounts, path)
    if found is None:
        place = path if path.is_dir() else path.parent
        fix = f"add {place.resolve()}:{place} to EXTRA_MOUNTS"
        yield Problem(where=where, wrong=f"{path} is not mounted, so no container sees it", fix=fix)
    elif found.resolve() != path.resolve():
        got = f"{path}, which is {found} in the container"
        yield Problem(where=where, got=got, expected=str(path.resolve()), fix="correct EXTRA_MOUNTS, which hides it")


def container_arguments(contract: Contract, run_dir: Path, code_dir: Path) -> tuple[str, ...]:
    """Return the job file's options that say in what containers it runs."""
    runtime = contract["CONTAINER_RUNTIME"]
    if runtime == "none":
        return ("--runtime=none",)
    mounts = [NODE_TMP, *map(str, run_mounts(contract, run_dir, code_dir))]
    return (
        f"--runtime={runtime}",
        f"--container={image_name(runtime, contract['CONTAINER'])}",
        f"--sandbox={image_name(runtime, contract['SANDBOX_CONTAINER'])}",
        f"--mounts={','.join(mounts)}",
    )


def image_name(runtime: str, image: str) -> str:
    """Spell an image as the runtime wants it: a file by its whole path, a registry's image with the runtime's marks."""
    if "://" not in image and (image.startswith(("/", ".", "~")) or Path(image).exists()):
        return str(Path(image).expanduser().resolve())
    scheme, _, name = image.rpartition("://")
    host, slash, rest = name.replace("#", "/", 1).partition("/")
    has_host = bool(slash) and ("." in host or ":" in host or host == "localhost")
    if runtime == "pyxis" and scheme in ("", "docker"):
        return f"{host}#{rest}" if has_host else name  # a host stands before `#`, else it is Docker Hub's
    if runtime == "apptainer":
        return f"{scheme or 'docker'}://{host}{slash}{rest}"
    if runtime == "podman" and scheme in ("", "docker"):
        return f"{host}{slash}{rest}"
    return image
