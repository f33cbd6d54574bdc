"""What the hub says of a data set: the commit of a revision, and the size and hash of its files there."""

from __future__ import annotations

from typing import Any

from recipes.errors import DataError, Problem
from tools.data.blends import is_commit
from tools.files.hosts import HUB, Patience, persist, session_with
from tools.files.transfer import RemoteFile


def list_files(dataset: str, revision: str, names: list[str], patience: Patience) -> dict[str, RemoteFile]:
    """Return what the hub declares of each file; raises `DataError` for one that is not there."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    where = f"{dataset}@{revision[:12]}"

    def ask() -> list[Any]:
        with session_with(HUB, where):
            return list(HfApi().get_paths_info(dataset, names, revision=revision, repo_type="dataset"))

    entries = [entry for entry in persist(ask, patience, where) if isinstance(entry, RepoFile)]
    found = {entry.path: _remote_file(dataset, revision, entry.path, entry) for entry in entries}
    if missing := [name for name in names if name not in found]:
        fix = "correct `files` or the revision in the blends file"
        raise DataError([Problem(where=where, got=f"no file {name}", expected="it", fix=fix) for name in missing])
    return found


def list_all_files(dataset: str, revision: str, patience: Patience) -> dict[str, RemoteFile]:
    """Return what the hub declares of every file of a data set at a commit."""
    info = _info(dataset, revision, patience)
    return {entry.rfilename: _remote_file(dataset, revision, entry.rfilename, entry) for entry in info.siblings or ()}


def commit_of(dataset: str, revision: str, patience: Patience) -> str:
    """Return the commit at which a branch is now."""
    commit: str = _info(dataset, revision, patience).sha
    return commit


def _info(dataset: str, revision: str, patience: Patience) -> Any:
    """Return what the hub says of a data set in one answer; listing its tree would retry below our own retries."""
    from huggingface_hub import HfApi

    where = f"{dataset}@{revision[:12]}"

    def ask() -> Any:
        with session_with(HUB, where) as session:
            timeout: Any = session.timeout  # None would mean no deadline at all
            return HfApi().dataset_info(dataset, revision=revision, files_metadata=True, timeout=timeout)

    info = persist(ask, patience, where)
    if not is_commit(info.sha) or (is_commit(revision) and info.sha != revision):
        got, expected = f"commit {info.sha}", f"commit {revision}" if is_commit(revision) else "a commit"
        fix = "the hub or a mirror does not serve the pinned commit; check HF_ENDPOINT"
        raise DataError(Problem(where=where, got=got, expected=expected, fix=fix))
    return info


def _remote_file(dataset: str, revision: str, name: str, entry: Any) -> RemoteFile:
    """Return the facts of a file, which the hub gives in the same words in all its answers."""
    return RemoteFile(
        repository=dataset,
        revision=revision,
        name=name,
        size=entry.lfs.size if entry.lfs else entry.size,
        sha256=entry.lfs.sha256 if entry.lfs else None,
        git_blob=entry.blob_id,
    )
