"""Revisions of data sets and repositories: only a commit names the same content for ever."""

from __future__ import annotations

import re

from recipes.errors import Problem

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
