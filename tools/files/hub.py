"""What the hub knows about a data set: the commit of a revision, and the size and hash of each file at that commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipes.errors import DataError, Problem
from recipes.retry import Answer, RetryPolicy, TransientError, call_with_retries
from tools.files.hosts import HUB, session_with, wait_or_raise
from tools.files.revisions import is_commit
from tools.files.transfer import RemoteFile


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


def list_all_files(dataset: str, revision: str, policy: RetryPolicy) -> dict[str, RemoteFile]:
    """Return what the hub declares about every file of a data set at a commit."""
    info = _info(dataset, revision, policy)
    return {entry.rfilename: _remote_file(dataset, revision, entry.rfilename, entry) for entry in info.siblings or ()}


def commit_of(dataset: str, revision: str, policy: RetryPolicy) -> str:
    """Return the commit that a branch points to now."""
    commit: str = _info(dataset, revision, policy).sha
    return commit


def _info(dataset: str, revision: str, policy: RetryPolicy) -> Any:
    """Return what the hub says about a data set, in one answer.

    Listing its tree would take several requests, which huggingface_hub retries by rules of its own.
    """
    from huggingface_hub import HfApi

    where = f"{dataset}@{revision[:12]}"

    def ask() -> Any:
        with session_with(HUB, where) as session:
            timeout: Any = session.timeout  # with None huggingface_hub waits for ever
            return HfApi().dataset_info(dataset, revision=revision, files_metadata=True, timeout=timeout)

    info = _ask_hub(ask, policy, where)
    if not is_commit(info.sha) or (is_commit(revision) and info.sha != revision):
        got, expected = f"commit {info.sha}", f"commit {revision}" if is_commit(revision) else "a commit"
        fix = "the hub or a mirror does not serve the pinned commit; check HF_ENDPOINT"
        raise DataError(Problem(where=where, got=got, expected=expected, fix=fix))
    return info


def _remote_file(dataset: str, revision: str, name: str, entry: Any) -> RemoteFile:
    """Return the facts about a file; every answer of the hub has them under the same names."""
    return RemoteFile(
        repository=dataset,
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
