"""The artifact store: numbered versions of data and models, what each was made from, without W&B.

    ROOT/NAME/v1/{manifest.json, metadata.json}    ROOT/NAME/latest, the text `v1`

ROOT is a directory or any fsspec URL. A version never changes. It exists as soon as its manifest does, which is written
after its metadata; then `latest` is updated. A reference is NAME, NAME:v3 or NAME:latest; a slash in NAME counts as a
dash.
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
from recipes.files import write_atomically
from tools.files.locks import only_one

MANIFEST, METADATA, LATEST = "manifest.json", "metadata.json", "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One version of data or a model: the files at `path`, facts about them, and what they were made from."""

    name: str
    version: int
    type: str
    path: str
    created_at: str
    producer: str  # the run that made it; "local": made without a run
    metadata: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]]  # inputs outside the store: uri, revision, hash
    used_artifacts: Sequence[str]  # references into this store

    @property
    def reference(self) -> str:
        """The name with the version."""
        return f"{self.name}:v{self.version}"


class Store:
    """The artifacts below one root."""

    def __init__(self, root: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(root)

    def names(self) -> list[str]:
        """Return every name of which a version exists."""
        if not self._fs.exists(self._root):
            return []
        entries = [posixpath.basename(str(path).rstrip("/")) for path in self._fs.ls(self._root, detail=False)]
        return sorted(name for name in entries if self._versions(name))

    def find(self, reference: str) -> Artifact:
        """Return the artifact of a reference; raises `DataError` with the existing versions or names."""
        name, _, version = reference.partition(":")
        name = registered_name(name)
        versions = self._versions(name)
        numbers = {f"v{number}": number for number in versions}
        wanted = max(versions, default=0) if version in ("", LATEST) else numbers.get(version, 0)
        if not wanted:
            known = ", ".join(numbers) or ", ".join(self.names())
            wrong = "there is no such artifact" + (f" (known: {known})" if known else ": the store is empty")
            raise DataError(Problem(where=reference, wrong=wrong, fix="correct the name, or record it first"))
        return self._read(name, wanted)

    def all(self) -> Iterator[Artifact]:
        """Yield every version of every name."""
        for name in self.names():
            for version in self._versions(name):
                yield self._read(name, version)

    def add(self, draft: Artifact) -> Artifact:
        """Record `draft` as the next version, unless the latest version is equal; return the version."""
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
            raise DataError(Problem(where=path, wrong=f"the manifest is damaged ({error})", fix=fix)) from error

    def _write(self, name: str, file: str, text: str) -> None:
        path = posixpath.join(self._root, name, file)
        if isinstance(self._fs, LocalFileSystem):
            write_atomically(Path(path), text.encode())
        else:  # an object store shows a file only when it is complete
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.pipe_file(path, text.encode())


def registered_name(name: str) -> str:
    """Return the name of an artifact in the store: for `super3/rl/rlvr1/data?sample=9`, `super3-rl-rlvr1-data`."""
    return name.partition("?")[0].replace("/", "-")


def draft(name: str, *, kind: str, path: Path, metadata: Mapping[str, Any], producer: str = "local") -> Artifact:
    """Return an artifact that is not recorded yet and has no inputs."""
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
    """Return what is compared to decide whether two versions are equal."""
    kept = ("type", "path", "producer", "metadata", "inputs", "used_artifacts")
    content: dict[str, Any] = json.loads(json.dumps({key: getattr(artifact, key) for key in kept}))
    return content
