"""The layers that are on disk during a run: each is pulled once, however many images share it."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.task_images.registry.client import Manifest, Registry
from tools.task_images.registry.references import Reference


class LayerCache:
    """A directory of layers named by digest; above `limit` bytes, those that no image uses are removed."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory, self._limit = directory, limit
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._fetching: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._users: defaultdict[str, int] = defaultdict(int)
        self._idle: OrderedDict[str, int] = OrderedDict()  # digest -> bytes, the longest unused first

    @contextmanager
    def of(
        self, registry: Registry, reference: Reference, manifest: Manifest, count: Callable[[int], None]
    ) -> Iterator[dict[str, Path]]:
        """Yield the layers of an image, digest -> path, which stay while the block runs; `count` gets their bytes."""
        with self._lock:
            for digest in manifest.layers:
                self._users[digest] += 1
                self._idle.pop(digest, None)
        try:
            paths = {}
            for digest, size in manifest.layers.items():
                path = self._directory / digest.removeprefix("sha256:")
                with self._lock:
                    fetching = self._fetching[digest]
                with fetching:
                    if path.is_file():
                        count(size)
                    else:
                        registry.blob(reference, digest, path, count)
                paths[digest] = path
            yield paths
        finally:
            self._release(manifest)

    def _release(self, manifest: Manifest) -> None:
        with self._lock:
            for digest, size in manifest.layers.items():
                self._users[digest] -= 1
                if not self._users[digest]:
                    self._idle[digest] = size
            while self._idle and sum(self._idle.values()) > self._limit:
                self._remove(next(iter(self._idle)))

    def clear(self) -> None:
        """Remove the layers that no image uses."""
        with self._lock:
            for digest in list(self._idle):
                self._remove(digest)

    def _remove(self, digest: str) -> None:
        del self._idle[digest]
        name = digest.removeprefix("sha256:")
        for path in (self._directory / name, self._directory / f"{name}.partial"):
            path.unlink(missing_ok=True)
