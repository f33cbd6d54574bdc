"""The copy of the code that a job runs from: it must hold the configuration that the launch was computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.errors import LaunchError
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings, found
from tools.planning.snapshot import read_code, snapshot_path, untracked


def check(draft: Draft) -> Iterator[Finding]:
    """Check a launch that copies the code; one from this checkout needs no copy."""
    contract, loaded = draft.contract, draft.loaded
    if contract.is_local or contract.is_set("SKIP_CODE_SNAPSHOT") or loaded is None or not contract["EXP_NAME"]:
        return
    files = [draft.root / name for name in (*loaded.files, *sorted(set(loaded.sources.values())))]
    files = [file for file in dict.fromkeys(files) if file.is_file()]
    try:
        yield from untracked_findings(draft.root, files)
        home = draft.root / contract["CODE_SNAPSHOT_DIRNAME"] / contract["EXP_NAME"]
        reuse_newest = not contract.is_set("REFRESH_CODE_SNAPSHOT")
        snapshot = snapshot_path(home, read_code(draft.root), reuse_newest=reuse_newest)
    except LaunchError as error:
        yield from as_findings("COD001", error.problems)
        return
    if snapshot.is_dir():
        yield from older_findings(draft.root, snapshot, files)


def untracked_findings(root: Path, files: Iterable[Path]) -> Iterator[Finding]:
    """Name the files of the configuration that a copy of the tracked files lacks."""
    for file in untracked(root, files):
        wrong = "git does not track this file, and the job runs from a copy of the tracked files"
        yield found("COD002", where=str(file), wrong=wrong, fix=f"git add {file.relative_to(root)}")


def older_findings(root: Path, snapshot: Path, files: Iterable[Path]) -> Iterator[Finding]:
    """Compare the configuration in a snapshot that is taken again with the one that sizes were computed from."""
    for file in files:
        if not file.is_relative_to(root):
            continue
        copy = snapshot / file.relative_to(root)
        if not copy.is_file() or copy.read_bytes() != file.read_bytes():
            wrong = f"differs from {file}" if copy.is_file() else f"no such file, though there is {file}"
            fix = "unset REFRESH_CODE_SNAPSHOT, or undo the change"
            yield found("COD003", where=str(copy), wrong=wrong, fix=fix)
