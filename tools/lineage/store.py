"""A store of artifacts without W&B: what was made, from what, in numbered versions that never change.

    ROOT/NAME/v1/{manifest.json, metadata.json}    ROOT/NAME/latest, the text `v1`

ROOT is a directory or any fsspec URL. A version exists once its manifest does, which is written last; `latest` follows.
References are NAME, NAME:v3 or NAME:latest, with slashes in NAME as good as dashes.
"""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from recipes.errors import DataError, Problem
from tools.files.locks import only_one

MANIFEST, METADATA, LATEST = "manifest.json", "metadata.json", "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One version of something: files at `path`, facts about it, and what it was made from."""

    name: str
    version: int
    type: str
    path: str
    created_at: str
    producer: str  # run that made it, "local" for none
    metadata: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]]  # what is in no store: uri, revision, hash
    used_artifacts: Sequence[str]  # references into this store

    @property
    def reference(self) -> str:
        """Its name with its version."""
        return f"{self.name}:v{self.version}"


class Store:
    """The artifacts below one root."""

    def __init__(self, root: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(root)

    def names(self) -> list[str]:
        """Return every name that has a version."""
        if not self._fs.exists(self._root):
            return []
        entries = [posixpath.basename(str(path).rstrip("/")) for path in self._fs.ls(self._root, detail=False)]
        return sorted(name for name in entries if self._versions(name))

    def find(self, reference: str) -> Artifact:
        """Return the artifact of a reference; raises `DataError` naming what there is."""
        name, _, version = reference.partition(":")
        name = registered_name(name)
        versions = self._versions(name)
        numbers = {f"v{number}": number for number in versions}
        wanted = max(versions, default=0) if version in ("", LATEST) else numbers.get(version, 0)
        if not wanted:
            there = ", ".join(numbers) or ", ".join(self.names()) or "nothing"
            fix = "correct the name, or record it first"
            raise DataError(Problem(where=reference, got="no such artifact", expected=f"one of: {there}", fix=fix))
        return self._read(name, wanted)

    def all(self) -> Iterator[Artifact]:
        """Yield every version of every name."""
        for name in self.names():
            for version in self._versions(name):
                yield self._read(name, version)

    def add(self, draft: Artifact) -> Artifact:
        """Record the next version of `draft.name`, unless the latest one says the same already; return it."""
        is_local = isinstance(self._fs, LocalFileSystem)
        with only_one(Path(self._root) / ".lock") if is_local else nullcontext():
            versions = self._versions(draft.name)
            if versions:
                latest = self._read(draft.name, versions[-1])
                if _content(latest) == _content(draft):
                    return latest
            version = versions[-1] + 1 if versions else 1
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = {"name": draft.name, "version": version, "created_at": created, **_content(draft)}
            self._write(draft.name, f"v{version}/{METADATA}", json.dumps(entry["metadata"], indent=2) + "\n")
            self._write(draft.name, f"v{version}/{MANIFEST}", json.dumps(entry, indent=2) + "\n")
            self._write(draft.name, LATEST, f"v{version}")
        return self._read(draft.name, version)

    def _versions(self, name: str) -> list[int]:
        pattern = posixpath.join(self._root, name, "v*", MANIFEST)
        numbers = [posixpath.basename(posixpath.dirname(str(path)))[1:] for path in self._fs.glob(pattern)]
        return sorted(int(number) for number in numbers if number.isdigit())

    def _read(self, name: str, version: int) -> Artifact:
        path = posixpath.join(self._root, name, f"v{version}", MANIFEST)
        try:
            return Artifact(**json.loads(self._fs.cat_file(path)))
        except (ValueError, TypeError) as error:
            fix = "remove this version, and record it again"
            raise DataError(Problem(where=path, got=str(error), expected="a manifest", fix=fix)) from error

    def _write(self, name: str, file: str, text: str) -> None:
        path = posixpath.join(self._root, name, file)
        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        if isinstance(self._fs, LocalFileSystem):
            partial = f"{path}.partial"
            self._fs.pipe_file(partial, text.encode())
            Path(partial).replace(path)
        else:  # object stores show a file only when it is whole
            self._fs.pipe_file(path, text.encode())


def registered_name(name: str) -> str:
    """Return the name under which an artifact is kept: `super3/rl/rlvr1/data?sample=9` is `super3-rl-rlvr1-data`."""
    return name.partition("?")[0].replace("/", "-")


def draft(name: str, *, kind: str, path: Path, metadata: Mapping[str, Any], producer: str = "local") -> Artifact:
    """Return an artifact that is not recorded yet and was made from nothing."""
    return Artifact(
        name=registered_name(name),
        version=0,
        type=kind,
        path=str(path.resolve()),
        created_at="",
        producer=producer,
        metadata=metadata,
        inputs=(),
        used_artifacts=(),
    )


def _content(artifact: Artifact) -> dict[str, Any]:
    """Return what makes two versions the same."""
    kept = ("type", "path", "producer", "metadata", "inputs", "used_artifacts")
    content: dict[str, Any] = json.loads(json.dumps({key: getattr(artifact, key) for key in kept}))
    return content
