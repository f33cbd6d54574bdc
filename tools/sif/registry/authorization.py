"""The Authorization header of each request: the password itself, or a token that a registry's token server gives.

A registry answers the first request with 401 and a challenge. "Basic" asks for the password; "Bearer" names the address
of a token server, the realm. That answer is not trusted: the password goes to a realm over HTTPS on the registry's own
host, on Docker Hub's known token server, or on a host that the operator lists in SIF_REGISTRIES, and to no other.
Reference: the token authentication of the OCI distribution API.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping

import httpx2

from recipes.retry import TransientError, is_transient, retry_after
from tools.sif.registry.credentials import LOGIN_HOST, PASSWORD, USER, Credentials
from tools.sif.registry.errors import ImageError
from tools.sif.registry.references import DOCKER_HUB, REGISTRIES, Reference, is_loopback

CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
HUB_TOKEN_SERVER = "auth.docker.io"
LOGIN_FIX = (
    f"not there, or private: run `docker login`, or set {USER} and {PASSWORD} (and {LOGIN_HOST} for another host)"
)
TOKEN_SECONDS = 240.0  # registries give tokens for five minutes where they do not say how long
TOKEN_SHARE = 0.8  # of its life, after which a token is replaced


class Authorizer:
    """Answers challenges and keeps the tokens; may be used by many threads."""

    def __init__(self, client: httpx2.Client, credentials: Credentials, trusted: frozenset[str]) -> None:
        self._client, self._credentials, self._trusted = client, credentials, trusted
        self._headers: dict[str, tuple[str, float]] = {}  # address of a repository -> header, when it ends
        self._challenges: dict[str, str] = {}  # host -> its last challenge
        self._lock = threading.Lock()

    def header(self, reference: Reference) -> str | None:
        """Return the header for a repository; None before the registry's first challenge, or where none is needed.

        A host that has sent a challenge before is not asked for another one per repository.
        """
        if (header := self._kept(reference)) is not None:
            return header
        with self._lock:
            challenge = self._challenges.get(reference.host)
        if challenge is None:
            return None
        self.answer(reference, challenge)
        return self._kept(reference)

    def _kept(self, reference: Reference) -> str | None:
        with self._lock:
            header, ends = self._headers.get(reference.api, (None, 0.0))
        return header if time.monotonic() < ends else None

    def answer(self, reference: Reference, challenge: str) -> None:
        """Answer a challenge; raises `ImageError` or `TransientError`."""
        kind, parts = challenge.partition(" ")[0].lower(), dict(CHALLENGE.findall(challenge))
        with self._lock:
            self._challenges[reference.host] = challenge
        header, seconds = self._credentials.basic(reference.host), TOKEN_SECONDS
        if kind == "bearer":
            header, seconds = self._token(reference, parts, header)
        if header:
            with self._lock:
                self._headers[reference.api] = (header, time.monotonic() + seconds)

    def _token(self, reference: Reference, parts: Mapping[str, str], basic: str | None) -> tuple[str, float]:
        """Return the header with a new token and for how many seconds to use it."""
        realm = token_server(reference, parts.get("realm", ""), self._trusted)
        query = {"scope": f"repository:{reference.repository}:pull", "service": parts.get("service", "")}
        headers = {"Authorization": basic} if basic else {}
        answer = self._client.get(realm, params=query, headers=headers, follow_redirects=False)
        if is_transient(answer.status_code):
            reason = f"HTTP {answer.status_code} from the token server"
            raise TransientError(reason, retry_after=retry_after(answer.headers))
        if answer.status_code != 200:
            raise ImageError("access", f"{reference}: HTTP {answer.status_code} from its token server ({LOGIN_FIX})")
        try:
            given = json.loads(answer.content)
            token = given.get("token") or given["access_token"]
            life = float(given.get("expires_in") or TOKEN_SECONDS / TOKEN_SHARE)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImageError("access", f"{reference}: its token server sends no token") from error
        return f"Bearer {token}", min(TOKEN_SECONDS, TOKEN_SHARE * life)


def token_server(reference: Reference, realm: str, trusted: frozenset[str]) -> httpx2.URL:
    """Return the address of a token server; raises `ImageError` unless the password may be sent there."""
    try:
        url = httpx2.URL(realm)
    except httpx2.InvalidURL as error:
        raise ImageError("access", f"{reference}: the address of its token server is invalid") from error
    host = url.netloc.decode()
    is_own = host == reference.host or (reference.host, host) == (DOCKER_HUB, HUB_TOKEN_SERVER)
    if url.scheme == "https" and (is_own or host in trusted):
        return url
    if url.scheme == "http" and is_own and is_loopback(host):
        return url
    wrong = f"{reference}: its registry names the token server {realm[:200]!r}, which is not on the registry's host"
    raise ImageError("access", f"{wrong} over HTTPS; if you trust that host, add it to {REGISTRIES}")
