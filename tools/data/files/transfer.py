"""Downloading one file whole or not at all.

A file is complete only when its size and its hash are those of its pinned commit. Until then the received bytes lie in
a partial file that is named after the hash, so that a later run resumes it only for the same content. The transfer is
plain HTTP with huggingface_hub's session, headers and errors: its own download neither resumes after a kill nor
compares hashes.

What the hub knows about a data set or a model: the commit of a revision, and size and hash of each file at that commit.

Revisions of data sets and repositories: only a commit names the same content for ever.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from recipes.errors import DataError, Problem
from recipes.retry import Answer, RetryPolicy, TransientError, call_with_retries
from tools.data.files.hosts import GITHUB, HUB, Host, Tries, session_with, wait_or_raise
from tools.data.files.row_blocks import CHUNK
from tools.hub import ROWS
from tools.locks import try_lock
from tools.progress import Progress

if TYPE_CHECKING:
    import httpx2


COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: object) -> bool:
    """Return whether a revision is a commit: 40 hex digits."""
    return isinstance(revision, str) and COMMIT.fullmatch(revision) is not None


def no_commit(where: str, revision: object, *, fix: str) -> Problem:
    """Return the problem of a revision that is a branch, a tag or absent."""
    if not revision:
        return Problem(where=where, wrong="no commit is given", fix=fix)
    expected = "a commit (40 hex digits): the rows of a branch or a tag can change"
    return Problem(where=where, got=repr(revision), expected=expected, fix=fix)


def list_files(dataset: str, revision: str, names: list[str], policy: RetryPolicy) -> dict[str, RemoteFile]:
    """Return what the hub declares about each file; raises `DataError` with every file that is not there."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    where = f"{dataset}@{revision[:12]}"

    def ask() -> list[Any]:
        with session_with(HUB, where):
            return list(HfApi().get_paths_info(dataset, names, revision=revision, repo_type="dataset"))

    entries = [entry for entry in _ask_hub(ask, policy, where) if isinstance(entry, RepoFile)]
    found = {entry.path: _remote_file(dataset, revision, entry.path, entry) for entry in entries}
    if missing := [name for name in names if name not in found]:
        fix = "correct `files` or the revision in the blends file"
        raise DataError([Problem(where=where, wrong=f"it has no file {name}", fix=fix) for name in missing])
    return found


def list_all_files(
    repository: str, revision: str, policy: RetryPolicy, *, kind: str = ROWS
) -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of a revision, and what the hub declares about every file of a data set or model there.

    Raises `DataError` for a name that leads out of the directory in which the files are put.
    """
    info = _info(repository, revision, policy, kind)
    for name in (entry.rfilename for entry in info.siblings or ()):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            wrong, fix = f"a file of it is called {name!r}", "check HF_ENDPOINT: no hub has such a name"
            raise DataError(Problem(where=f"{repository}@{revision[:12]}", wrong=wrong, fix=fix))
    files = {
        entry.rfilename: _remote_file(repository, info.sha, entry.rfilename, entry, kind)
        for entry in info.siblings or ()
    }
    return info.sha, files


def commit_of(dataset: str, revision: str, policy: RetryPolicy) -> str:
    """Return the commit that a branch points to now."""
    commit: str = _info(dataset, revision, policy, ROWS).sha
    return commit


def _info(repository: str, revision: str, policy: RetryPolicy, kind: str) -> Any:
    """Return what the hub says about a data set or a model, in one answer.

    Listing its tree would take several requests, which huggingface_hub retries by rules of its own.
    """
    from huggingface_hub import HfApi

    where = f"{repository}@{revision[:12]}"

    def ask() -> Any:
        with session_with(HUB, where) as session:
            timeout: Any = session.timeout  # with None huggingface_hub waits for ever
            options: Any = {"revision": revision, "files_metadata": True, "timeout": timeout}
            return HfApi().repo_info(repository, repo_type=kind, **options)

    info = _ask_hub(ask, policy, where)
    if not is_commit(info.sha) or (is_commit(revision) and info.sha != revision):
        got, expected = f"commit {info.sha}", f"commit {revision}" if is_commit(revision) else "a commit"
        fix = "the hub or a mirror does not serve the pinned commit; check HF_ENDPOINT"
        raise DataError(Problem(where=where, got=got, expected=expected, fix=fix))
    return info


def _remote_file(repository: str, revision: str, name: str, entry: Any, kind: str = ROWS) -> RemoteFile:
    """Return the facts about a file; every answer of the hub has them under the same names."""
    return RemoteFile(
        repository=repository,
        kind=kind,
        revision=revision,
        name=name,
        size=entry.lfs.size if entry.lfs else entry.size,
        sha256=entry.lfs.sha256 if entry.lfs else None,
        git_blob=entry.blob_id,
    )


def _ask_hub(ask: Callable[[], Answer], policy: RetryPolicy, where: str) -> Answer:
    """Return the hub's answer; passing failures are tried again, others raise `DataError`."""

    def after(failure: TransientError, num_failures: int) -> None:
        wait_or_raise(failure, num_failures, policy, where, HUB)

    return call_with_retries(ask, after)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """What is known about one file at one commit before it is downloaded."""

    repository: str
    revision: str
    name: str
    size: int
    sha256: str | None  # known of large files (Git LFS) only
    git_blob: str  # git's sha1 of the content; for a large file, of its LFS pointer
    kind: str = ROWS  # of the repository
    url: str = ""  # at GitHub's raw address; empty: a file on the hub

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

    url = file.url or hf_hub_url(file.repository, file.name, repo_type=file.kind, revision=file.revision)
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
    if size.isdecimal() and int(size) != file.size and "Content-Encoding" not in headers:
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
