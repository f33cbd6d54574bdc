"""Downloading one file whole or not at all.

A file is complete only when its size and its hash are those of its pinned commit. Until then the received bytes lie in
a partial file that is named after the hash, so that a later run resumes it only for the same content. The transfer is
plain HTTP with huggingface_hub's session, headers and errors: its own download neither resumes after a kill nor
compares hashes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from recipes.errors import DataError, Problem
from recipes.retry import RetryPolicy, TransientError
from tools.files.hosts import GITHUB, HUB, Host, session_with, wait_or_raise
from tools.files.locks import try_lock
from tools.files.progress import Progress
from tools.files.row_files import CHUNK
from tools.files.speed import Tries

if TYPE_CHECKING:
    import httpx2


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """What is known about one file at one commit before it is downloaded."""

    repository: str
    revision: str
    name: str
    size: int
    sha256: str | None  # known of large files (Git LFS) only
    git_blob: str  # git's sha1 of the content; for a large file, of its LFS pointer
    url: str = ""  # at GitHub's raw address; empty: a file of a data set on the hub

    @property
    def identity(self) -> str:
        """The hash that the content must have."""
        return self.sha256 or self.git_blob

    def hasher(self) -> Any:
        """Return a hash object that must end at `identity`."""
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    @property
    def where(self) -> str:
        """The file as messages name it."""
        return f"{self.repository}@{self.revision[:12]}: {self.name}"

    @property
    def host(self) -> Host:
        """The host that serves the file; only the hub may see the hub's token."""
        return GITHUB if self.url else HUB


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadedFile:
    """A complete file: its content hash, its bytes and its lines."""

    sha256: str
    size: int
    rows: int


def download_file(file: RemoteFile, target: Path, policy: RetryPolicy) -> DownloadedFile:
    """Download `file` to `target`, resuming an earlier run's partial file; `target` appears only when it is right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file() and target.stat().st_size == file.size:
        with target.open("rb") as content:
            received, digest = _measure(file, content)
        if digest == file.identity:
            return received
    partial = target.with_name(f".{target.name}.{file.identity[:16]}.partial")
    for stale in target.parent.glob(f".{target.name}.*.partial"):
        if stale != partial:
            print(f"download: removing {stale.name}, which belongs to another version of the file")
            stale.unlink()
    for is_last in (False, True):
        with _locked(partial) as content:
            _require_space(partial, file.size - partial.stat().st_size)
            resumed = _receive_all(file, content, policy)
            content.flush()
            received, digest = _measure(file, content)
            if digest == file.identity:
                os.fsync(content.fileno())
                partial.replace(target)
                return received
            partial.unlink()  # nothing tells which bytes are wrong
        got = f"{received.size} bytes with hash {digest[:16]}..."
        if is_last or not resumed:
            raise changed(file, got, f"{file.size} bytes with {file.identity[:16]}...")
        print(f"download: {file.where}: {got} after resuming, which is wrong; starting over")
    raise AssertionError("the last attempt either returns or raises")


@contextmanager
def _locked(partial: Path) -> Iterator[BinaryIO]:
    """Open and lock a partial file; remove it at the end when nothing was received."""
    with partial.open("a+b") as content:
        if not try_lock(partial, content):
            wrong, fix = "another download of this file is running", "wait until it has finished"
            raise DataError(Problem(where=str(partial), wrong=wrong, fix=fix))
        try:
            yield content
        finally:
            if content.tell() == 0:
                partial.unlink(missing_ok=True)


def _require_space(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial.parent).free
    if needed > free:
        got, expected = f"{free / 1e9:.1f} GB free", f"{needed / 1e9:.1f} GB for the rest of the file"
        raise DataError(Problem(where=str(partial.parent), got=got, expected=expected, fix="make room"))


def _receive_all(file: RemoteFile, content: BinaryIO, policy: RetryPolicy) -> bool:
    """Append to `content` until it has the declared size; return whether it was put together from several parts."""
    progress = Progress(f"download: {file.name}", file.size)
    begin = size = content.seek(0, 2)
    progress.begin(begin)
    resumed, tries = begin > 0, Tries(begin)
    while size < file.size:
        try:
            _receive(file, content, progress, tries)
            if content.tell() < file.size:
                raise TransientError(f"{file.host.name} ended after {content.tell()} of {file.size} bytes")
        except TransientError as failure:
            size = content.tell()
            num_failures = tries.failed(size)
            resumed = resumed or size > 0
            failure.is_reached |= tries.furthest > begin
            wait_or_raise(failure, num_failures, policy, file.where, file.host)
        size = content.tell()
    progress.end()
    return resumed


def _receive(file: RemoteFile, content: BinaryIO, progress: Progress, tries: Tries) -> None:
    """Append the host's answer to one request to `content`."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    url = file.url or hf_hub_url(file.repository, file.name, repo_type="dataset", revision=file.revision)
    start = content.tell()
    headers = (build_hf_headers() if file.host is HUB else {}) | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with session_with(file.host, file.where) as session, session.stream("GET", url, headers=headers) as answer:
        if answer.status_code == 416:
            _empty(content)
            raise TransientError(f"{file.host.name} has nothing after byte {start}")
        if answer.is_error:
            answer.read()
            hf_raise_for_status(answer)
        _require_same_content(file, [*answer.history, answer])
        if start and not str(answer.headers.get("Content-Range")).startswith(f"bytes {start}-"):
            _empty(content)  # the whole file comes again
            progress.begin(0)
        for chunk in tries.chunks(
            answer.iter_bytes()
        ):  # each chunk is written at once, so a broken connection loses none
            content.write(chunk)
            progress.add(len(chunk))
            if content.tell() > file.size:
                _empty(content)
                raise TransientError(f"{file.host.name} sent more than {file.size} bytes")


def _empty(content: BinaryIO) -> None:
    content.truncate(0)
    content.seek(0)


def _require_same_content(file: RemoteFile, answers: list[httpx2.Response]) -> None:
    """Refuse answers whose headers name another commit, another content hash or another size."""
    for answer in answers:
        commit, linked = answer.headers.get("X-Repo-Commit"), answer.headers.get("X-Linked-Etag")
        if commit not in (None, file.revision):
            raise changed(file, f"commit {commit}", f"commit {file.revision}")
        if linked is not None and linked.removeprefix("W/").strip('"') != file.identity:
            raise changed(file, f"content {linked}", f"content {file.identity}, as the hub listed it")
    headers = answers[-1].headers
    size = headers.get("Content-Range", headers.get("Content-Length", "")).rpartition("/")[2]
    if size.isdigit() and int(size) != file.size and "Content-Encoding" not in headers:
        raise changed(file, f"a file of {size} bytes", f"{file.size} bytes")


def changed(file: RemoteFile, got: str, expected: str) -> DataError:
    """Return the error of a host whose content is not that of the pinned commit."""
    host = file.host
    fix = f"{host.name} or a mirror changed under the pinned commit; check {host.variable}, then run it again"
    return DataError(Problem(where=file.where, got=got, expected=expected, fix=fix))


def _measure(file: RemoteFile, content: BinaryIO) -> tuple[DownloadedFile, str]:
    """Read a file once; return its facts, and the hash to compare with `file.identity`."""
    content.seek(0)
    identity, sha256 = file.hasher(), hashlib.sha256()
    size = rows = 0
    last = b"\n"
    while chunk := content.read(CHUNK):
        identity.update(chunk)
        if not file.sha256:
            sha256.update(chunk)
        size, rows, last = size + len(chunk), rows + chunk.count(b"\n"), chunk[-1:]
    digest = identity.hexdigest()
    rows += last != b"\n"
    return DownloadedFile(sha256=digest if file.sha256 else sha256.hexdigest(), size=size, rows=rows), digest
