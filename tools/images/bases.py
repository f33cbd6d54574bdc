"""The base images of a build, by digest: looked up once, recorded in the lock, and used again by every later build.

A tag can name another image tomorrow, a digest cannot.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import RunError
from tools.images.builders import base_digest_words
from tools.images.lock import DIGEST
from tools.images.table import Image

ARGUMENTS = ("BASE", "UV")  # build arguments that name an image
_LOCAL = "localhost/"  # built here, in no registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """One image of a registry that a build begins from or copies from, named by its tag."""

    argument: str  # the build argument that names it
    name: str
    is_given: bool  # by the user; otherwise the Dockerfile's default

    def by_digest(self, digest: str) -> str:
        """Return NAME@DIGEST for NAME:TAG."""
        return f"{re.sub(r':[^:/]+$', '', self.name)}@{digest}"


def bases_of(image: Image, given: Mapping[str, str], root: Path) -> tuple[Base, ...]:
    """Return the bases of an image of ours. The training image of `swe` is none: the lock has its digest already."""
    if image.source is not None:
        return ()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", (root / image.dockerfile).read_text(), re.MULTILINE))
    found = (
        Base(argument=argument, name=given.get(argument) or defaults[argument], is_given=argument in given)
        for argument in ARGUMENTS
        if argument in image.arguments and (argument in given or not image.on_training_image)
    )
    return tuple(base for base in found if not base.name.startswith(_LOCAL) and DIGEST.search(base.name) is None)


def digests(
    bases: Sequence[Base],
    recorded: Mapping[str, str],
    builder: str,
    *,
    ask: Callable[[Sequence[str]], str],
    run: Callable[[Sequence[str]], None],
) -> dict[str, str]:
    """Return name -> digest: the recorded one, or for a base that the user names, or a new one, that of its tag now.

    The tag is pulled before its digest is asked: what the builder's store has under that name may be old. Where it
    cannot be pulled, as without a network, the copy in the store is taken, and a line says so. `ask` returns what a
    command prints, "" where it fails. `run` runs one and raises `RunError` where it fails, as this does when there is
    no digest.
    """
    found = {}
    for base in bases:
        digest = None if base.is_given else recorded.get(base.name)
        if digest is None:
            digest = _digest_now(base.name, builder, ask=ask, run=run)
        found[base.name] = digest
    return found


def _digest_now(
    name: str, builder: str, *, ask: Callable[[Sequence[str]], str], run: Callable[[Sequence[str]], None]
) -> str:
    question, failed = base_digest_words(builder, name), None
    try:
        run([builder, "pull", name])
    except RunError as error:
        failed = error
    match = DIGEST.search(ask(question))
    if match is None:
        raise failed or RunError(f"containers: no digest of {name} from: {shlex.join(question)}")
    if failed:
        print(f"containers: {name} could not be pulled: the copy on this machine is taken, {match[0]}", flush=True)
    return match[0]
