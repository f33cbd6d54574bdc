"""Names of images, and which registries a name may point to.

Rows are not trusted: a name in a row may only point to Docker Hub and to the registries that the operator lists in the
variable SIF_REGISTRIES. Without that limit a row could make this machine send requests, and the operator's password,
to any address.

Why an image cannot be pulled, converted or run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from recipes.errors import LaunchError, Problem, RecipeError


class ImageError(RecipeError):
    """The failure of one image; failures are counted by `cause`, one word such as "missing" or "access"."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


DOCKER_HUB = "docker.io"
REGISTRIES = "SIF_REGISTRIES"
HOST = re.compile(r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(:\d{1,5})?", re.ASCII)
LOOPBACK = re.compile(r"(localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(:\d{1,5})?", re.ASCII)
REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*", re.ASCII)
TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The name of an image in a registry."""

    host: str
    repository: str
    tag: str = "latest"

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read a name as Docker does: without a host it is on Docker Hub; the repository becomes lower-case.

        Raises `ValueError` for a text that is not a name, so that nothing else can get into an address.
        """
        first, slash, rest = text.partition("/")
        has_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
        host, path = (first, rest) if has_host else (DOCKER_HUB, text)
        repository, colon, tag = path.lower().partition(":")
        tag = path[len(repository) + 1 :] if colon else "latest"  # a tag keeps its case
        if host == DOCKER_HUB and "/" not in repository:
            repository = f"library/{repository}"
        if not (HOST.fullmatch(host) and REPOSITORY.fullmatch(repository) and TAG.fullmatch(tag)):
            raise ValueError(f"{text!r} is not the name of an image (HOST/REPOSITORY:TAG)")
        return cls(host=host, repository=repository, tag=tag)

    def behind(self, mirror: str) -> Reference:
        """Return the name under a mirror of Docker Hub, given as HOST[:PORT][/PREFIX]; other names stay."""
        if self.host != DOCKER_HUB or not mirror:
            return self
        host, _, prefix = mirror.rstrip("/").partition("/")
        return replace(self, host=host, repository=f"{prefix}/{self.repository}".lstrip("/"))

    @property
    def api(self) -> str:
        """The address of the repository: plain HTTP on this machine only, as Docker does it, else HTTPS."""
        host = "registry-1.docker.io" if self.host == DOCKER_HUB else self.host
        return f"{'http' if is_loopback(self.host) else 'https'}://{host}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}:{self.tag}"


def is_loopback(host: str) -> bool:
    """Whether HOST[:PORT] is this machine."""
    return LOOPBACK.fullmatch(host) is not None


def trusted_registries(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the hosts that rows may name: Docker Hub and those of SIF_REGISTRIES; raises `LaunchError`."""
    hosts = [host.strip() for host in environ.get(REGISTRIES, "").split(",") if host.strip()]
    problems = [
        Problem(where=REGISTRIES, got=repr(host), expected="HOST[:PORT],...", fix="correct the name")
        for host in hosts
        if not HOST.fullmatch(host)
    ]
    if problems:
        raise LaunchError(problems)
    return frozenset((DOCKER_HUB, *hosts))
