"""Pulls from registries: whether an image exists, its manifest, its layers. Reference: the OCI distribution API.

All threads share one limit of requests per host; an answer 429 stops all of them for as long as the registry asks. A
layer is accepted when the digest of its bytes is the one in its name; one whose transfer broke off is continued where
it ended.

A limit of requests per second, shared by all threads that ask one host (a token bucket).

The Authorization header of each request: the password itself, or a token that a registry's token server gives.

A registry answers the first request with 401 and a challenge. "Basic" asks for the password; "Bearer" names the address
of a token server, the realm. That answer is not trusted: the password goes to a realm over HTTPS on the registry's own
host, on Docker Hub's known token server, or on a host that the operator lists in SIF_REGISTRIES, and to no other.
Reference: the token authentication of the OCI distribution API.

The user and password of each registry, from Docker's files or from two variables.

A password is only ever given to the host that it belongs to. Docker's files name the host of each password. Those in
APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD belong to Docker Hub, or to the host in SIF_LOGIN_HOST.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from recipes.errors import LaunchError, Problem
from recipes.retry import Answer, RetryPolicy, TransientError, call_with_retries, is_transient, retry_after
from tools.data.files.hosts import Tries, fast_enough
from tools.task_images.registry.references import DOCKER_HUB, REGISTRIES, ImageError, Reference, is_loopback

USER, PASSWORD = "APPTAINER_DOCKER_USERNAME", "APPTAINER_DOCKER_PASSWORD"
LOGIN_HOST = "SIF_LOGIN_HOST"
HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")
HELPER_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the passwords are: the environment, and the contents of Docker's files."""

    environ: Mapping[str, str]
    files: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Credentials:
        """Read Docker's files; raises `LaunchError` for one that is not a JSON object."""
        home = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME", "/")) / ".docker")
        places = [home / "config.json"]
        if environ.get("XDG_RUNTIME_DIR"):
            places.append(Path(environ["XDG_RUNTIME_DIR"]) / "containers" / "auth.json")
        if environ.get("REGISTRY_AUTH_FILE"):
            places.insert(0, Path(environ["REGISTRY_AUTH_FILE"]))
        return cls(environ, tuple(_read(place) for place in places if place.is_file()))

    def basic(self, host: str) -> str | None:
        """Return the header "Basic ..." for a host, None where there is no password for it."""
        has_variables = self.environ.get(USER) and self.environ.get(PASSWORD)
        if has_variables and host == (self.environ.get(LOGIN_HOST) or DOCKER_HUB):
            return _header(self.environ[USER], self.environ[PASSWORD])
        keys = (host, f"https://{host}", *(HUB_KEYS if host == DOCKER_HUB else ()))
        for file in self.files:
            for key in keys:
                helper = (file.get("credHelpers") or {}).get(key)
                entry = (file.get("auths") or {}).get(key)
                if entry and entry.get("auth"):
                    return f"Basic {entry['auth']}"
                if helper or (entry is not None and file.get("credsStore")):
                    return _ask(str(helper or file["credsStore"]), key)
        return None


def _read(path: Path) -> Mapping[str, Any]:
    fix = "run `docker login` again, or remove the file"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problem = Problem(where=str(path), wrong=f"cannot be read as JSON ({type(error).__name__})", fix=fix)
        raise LaunchError(problem) from error
    if not isinstance(content, dict):
        raise LaunchError(Problem(where=str(path), got=type(content).__name__, expected="a JSON object", fix=fix))
    return content


def _ask(helper: str, key: str) -> str | None:
    """Ask the program in which Docker keeps passwords."""
    words = [f"docker-credential-{helper}", "get"]
    try:
        answer = subprocess.run(
            words,
            input=key,
            encoding="utf-8",
            errors="replace",
            capture_output=True,
            timeout=HELPER_SECONDS,
            check=True,
        )
        given = json.loads(answer.stdout)
        return _header(given["Username"], given["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _header(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


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


LONGEST_SLEEP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """How many requests one host gets."""

    per_second: float = 10.0  # on average
    burst: int = 20  # at once


@dataclass(slots=True)
class RateLimiter:
    """Lets the requests to one host through, no more than `limit`."""

    limit: RateLimit
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _closed_until: float = 0.0
    _available: float = field(init=False)  # requests that may be made now
    _updated: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._available, self._updated = float(self.limit.burst), self.clock()

    def wait(self) -> None:
        """Return when the caller may make one request."""
        while (seconds := self._try()) > 0:
            self.sleep(min(seconds, LONGEST_SLEEP_SECONDS))

    def _try(self) -> float:
        """Count one request and return 0, or return the seconds after which to try again."""
        with self._lock:
            now = self.clock()
            if now < self._closed_until:
                return self._closed_until - now
            self._available = min(self.limit.burst, self._available + (now - self._updated) * self.limit.per_second)
            self._updated = now
            if self._available < 1:
                return (1 - self._available) / self.limit.per_second
            self._available -= 1
            return 0.0

    def close(self, seconds: float) -> None:
        """Let no request through for some time."""
        with self._lock:
            self._closed_until = max(self._closed_until, self.clock() + seconds)


MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
READ_SECONDS = 60.0  # without a byte; tools/data/files/hosts.py has the lowest speed
SHOWN_WAIT_SECONDS = 10.0  # longer waits are printed


REGISTRY_RETRIES = RetryPolicy(
    max_retries=7,
    max_seconds=120.0,
    max_retry_after=7 * 3600.0,  # Docker Hub counts requests over a window of six hours
    jitter=0.25,  # so that threads that failed together do not ask again together
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of an image for amd64."""

    digest: str
    content: bytes
    layers: Mapping[str, int]  # digest -> bytes; the configuration is one of them
    config: str  # digest

    @property
    def size(self) -> int:
        return sum(self.layers.values())


class Registry:
    """A client of all registries; may be used by many threads."""

    def __init__(
        self,
        credentials: Credentials,
        policy: RetryPolicy = REGISTRY_RETRIES,
        rate: RateLimit = RateLimit(),
        *,
        trusted: frozenset[str] = frozenset((DOCKER_HUB,)),
    ) -> None:
        self._policy, self._rate = policy, rate
        # On a redirect to another host httpx removes the Authorization header, as for the storage behind a registry.
        self._client = httpx2.Client(timeout=httpx2.Timeout(READ_SECONDS), follow_redirects=True)
        self._authorizer = Authorizer(self._client, credentials, trusted)
        self._rate_limiters: dict[str, RateLimiter] = {}
        self._reached: set[str] = set()
        self._unreached: dict[str, LaunchError] = {}
        self._lock = threading.Lock()
        self.waits: defaultdict[str, int] = defaultdict(int)  # reason -> times

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def digest(self, reference: Reference) -> str | None:
        """Return the digest of an image, None where it does not exist; Docker Hub does not count this as a pull."""
        address = f"{reference.api}/manifests/{reference.tag}"

        def ask() -> str | None:
            with self._request("HEAD", address, reference) as answer:
                if answer.status_code == 404:
                    return None
                self._require_ok(answer, reference)
                return answer.headers.get("Docker-Content-Digest", "")

        return self._ask(ask, reference)

    def manifest(self, reference: Reference) -> Manifest:
        """Return the manifest for amd64; raises `ImageError`."""
        digest, content = self._manifest(reference, reference.tag)
        document = _parsed(content, reference)
        if "manifests" in document:
            digest = _for_amd64(document, reference)
            digest, content = self._manifest(reference, digest)
            document = _parsed(content, reference)
        try:
            parts = [document["config"], *document["layers"]]
            layers = {str(part["digest"]): int(part["size"]) for part in parts}
        except (KeyError, TypeError, ValueError) as error:
            raise ImageError("manifest", f"{reference}: {type(error).__name__} {error}") from error
        if wrong := [layer for layer in layers if not DIGEST.fullmatch(layer)]:
            raise ImageError("manifest", f"{reference}: the digest of a layer is not a sha256: {wrong[0][:80]}")
        return Manifest(digest=digest, content=content, layers=layers, config=str(document["config"]["digest"]))

    def _manifest(self, reference: Reference, name: str) -> tuple[str, bytes]:
        def ask() -> tuple[str, bytes]:
            with self._request("GET", f"{reference.api}/manifests/{name}", reference) as answer:
                if answer.status_code == 404:
                    raise ImageError("missing", f"{reference}: not in the registry")
                self._require_ok(answer, reference)
                content = b"".join(fast_enough(answer.iter_bytes()))
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            declared = name if DIGEST.fullmatch(name) else answer.headers.get("Docker-Content-Digest", digest)
            if declared != digest:
                raise TransientError(f"manifest with {digest[:19]} instead of {declared[:19]}")
            return digest, content

        return self._ask(ask, reference)

    def blob(self, reference: Reference, digest: str, target: Path, count: Callable[[int], None]) -> None:
        """Write a blob to `target`, which appears only with the right digest; `count` gets the bytes of each chunk."""
        partial = target.with_name(f"{target.name}.partial")
        for is_last in (False, False, True):  # whole transfers with a wrong digest
            tries = Tries(0)
            while True:
                try:
                    self._receive(reference, digest, partial, count, tries)
                    break
                except TransientError as failure:
                    now = partial.stat().st_size if partial.exists() else 0
                    self._wait_or_raise(failure, tries.failed(now), reference)
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found == digest.removeprefix("sha256:"):
                partial.replace(target)
                return
            partial.unlink()
            self.waits["wrong digest"] += 1
            if is_last:
                detail = f"{reference} {digest[:19]}: the registry sent bytes with another digest three times"
                raise ImageError("digest", detail)

    def _receive(
        self, reference: Reference, digest: str, partial: Path, count: Callable[[int], None], tries: Tries
    ) -> None:
        """Append what is missing to `partial`."""
        start = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._request("GET", f"{reference.api}/blobs/{digest}", reference, headers) as answer:
            if answer.status_code == 404:
                raise ImageError("missing", f"{reference}: its layer {digest[:19]} is not in the registry")
            if answer.status_code == 416:
                partial.unlink(missing_ok=True)
                raise TransientError("the registry has no bytes after those received")
            self._require_ok(answer, reference)
            if answer.status_code != 206:
                start = 0
            declared = answer.headers.get("Content-Length")
            with partial.open("ab" if start else "wb") as file:
                for chunk in tries.chunks(answer.iter_raw()):  # written as they arrive, so that a break loses none
                    file.write(chunk)
                    count(len(chunk))
                received = file.tell() - start
        if declared is not None and received < int(declared):
            raise TransientError(f"the registry ended after {received} of {declared} bytes")

    @contextmanager
    def _request(
        self, method: str, address: str, reference: Reference, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx2.Response]:
        """Send one request, and a second one with a new token where the registry answers with a challenge."""
        try:
            header = self._authorizer.header(reference)
            for is_second in (False, True):
                self.rate_limiter(reference.host).wait()
                sent = {"Accept": ", ".join(MANIFESTS), "Accept-Encoding": "identity", **(headers or {})}
                if header:
                    sent["Authorization"] = header
                with self._client.stream(method, address, headers=sent) as answer:
                    self._reached.add(reference.host)
                    if answer.status_code == 401 and not is_second:
                        self._authorizer.answer(reference, answer.headers.get("WWW-Authenticate", ""))
                        header = self._authorizer.header(reference)
                        continue
                    yield answer
                    return
        except httpx2.LocalProtocolError:  # its message holds the password or token
            raise ImageError("access", f"{reference}: no header can hold the password or token ({LOGIN_FIX})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise TransientError(f"{type(error).__name__} ({error})") from error

    def rate_limiter(self, host: str) -> RateLimiter:
        """Return the limit of one host."""
        with self._lock:
            if host not in self._rate_limiters:
                self._rate_limiters[host] = RateLimiter(self._rate)
            return self._rate_limiters[host]

    def _require_ok(self, answer: httpx2.Response, reference: Reference) -> None:
        status = answer.status_code
        if is_transient(status):
            raise TransientError(f"HTTP {status}", retry_after=retry_after(answer.headers))
        if status in (401, 403):
            raise ImageError("access", f"{reference}: HTTP {status} ({LOGIN_FIX})")
        if status >= 400:
            raise ImageError("refused", f"{reference}: HTTP {status}")

    def _ask(self, ask: Callable[[], Answer], reference: Reference) -> Answer:
        """Return the answer to `ask`, with retries; a host that never answered is not asked any more."""

        def ask_once() -> Answer:
            if reference.host in self._unreached:
                raise self._unreached[reference.host]
            return ask()

        return call_with_retries(ask_once, lambda failure, count: self._wait_or_raise(failure, count, reference))

    def _wait_or_raise(self, failure: TransientError, num_failures: int, reference: Reference) -> None:
        """Wait before the next attempt, or give up; after a 429 all threads that ask this host wait."""
        failure.is_reached = reference.host in self._reached
        seconds = self._policy.seconds_until_retry(num_failures, failure)
        if seconds is None:
            if self._policy.asks_too_long(failure):
                detail = f"{reference}: the registry asks to wait {failure.retry_after:.0f} s"
                raise ImageError("limit", detail) from failure
            if not failure.is_reached:
                self._unreached[reference.host] = unreachable(reference, failure, num_failures)
                raise self._unreached[reference.host] from failure
            raise ImageError("network", f"{reference}: {failure}") from failure
        self.waits[str(failure).split(" (", 1)[0]] += 1
        if seconds >= SHOWN_WAIT_SECONDS:
            print(f"sif: {reference.host}: {failure}; waiting {seconds:.0f} s", flush=True)
        if str(failure).startswith("HTTP 429"):
            self.rate_limiter(reference.host).close(seconds)
        else:
            self._policy.sleep(seconds)


def unreachable(reference: Reference, failure: TransientError, num_failures: int) -> LaunchError:
    """Return the error for a registry that never answered, which ends the run."""
    fix = "check the network and the proxy (HTTPS_PROXY, no_proxy), or name a mirror: MIRROR=HOST[:PORT][/PREFIX]"
    wrong = f"the registry never answered: {failure}, {num_failures} times in a row"
    return LaunchError(Problem(where=reference.api.partition("/v2/")[0], wrong=wrong, fix=fix))


def _parsed(content: bytes, reference: Reference) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ImageError("manifest", f"{reference}: the manifest is not JSON") from error
    if not isinstance(document, dict):
        raise ImageError("manifest", f"{reference}: the manifest is not a JSON object")
    return document


def _for_amd64(index: Mapping[str, Any], reference: Reference) -> str:
    try:
        for entry in index["manifests"]:
            platform = entry.get("platform") or {}
            if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
                return str(entry["digest"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError("manifest", f"{reference}: its list of manifests: {type(error).__name__} {error}") from error
    raise ImageError("platform", f"{reference}: has no image for linux/amd64")
