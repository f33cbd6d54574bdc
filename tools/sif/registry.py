"""What a registry is asked: whether an image is there, its manifest, its blobs. Reference: the OCI distribution API.

Every request to one host takes a token of that host's bucket, whichever thread asks; an answer 429 closes the bucket
for all of them until the time that the registry asks for. A blob counts when its bytes have the digest of its name;
one that ended early is asked for again from where it ended.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from recipes.errors import LaunchError, Problem, RecipeError
from tools.files.retry import RETRIED_STATUSES, Answer, RetryPolicy, TransientError, call_with_retries, retry_after
from tools.sif.credentials import Credentials
from tools.sif.wanted import Reference

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LOGIN = "not there, or private: `docker login`, or set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD"
TOKEN_SECONDS = 240.0  # registries give tokens for five minutes when they say nothing
READ_SECONDS = 60.0  # without a byte
TOLD_SECONDS = 10.0  # a wait that a user would wonder about


class PullError(RecipeError):
    """An image that cannot be had; `cause` is the word under which it is counted."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


REGISTRY_RETRIES = RetryPolicy(
    max_retries=7,
    max_seconds=120.0,
    max_retry_after=7 * 3600.0,  # Docker Hub counts requests over a window of six hours
    jitter=0.25,  # or all threads that failed together would ask again together
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """How many requests one host gets."""

    per_second: float = 10.0
    burst: int = 20


@dataclass(slots=True)
class TokenBucket:
    """Tokens of one host."""

    per_second: float
    burst: int
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    closed_until: float = 0.0
    _tokens: float = field(init=False)
    _filled: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._tokens, self._filled = float(self.burst), self.clock()

    def take(self) -> None:
        """Wait for a token and take it."""
        while (wait := self._try()) > 0:
            self.sleep(min(wait, 5.0))

    def _try(self) -> float:
        """Take a token, or return the seconds after which to try again."""
        with self._lock:
            now = self.clock()
            if now < self.closed_until:
                return self.closed_until - now
            self._tokens = min(self.burst, self._tokens + (now - self._filled) * self.per_second)
            self._filled = now
            if self._tokens < 1:
                return (1 - self._tokens) / self.per_second
            self._tokens -= 1
            return 0.0

    def close(self, seconds: float) -> None:
        """Give no token for some time."""
        with self._lock:
            self.closed_until = max(self.closed_until, self.clock() + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An image for amd64."""

    digest: str
    content: bytes
    layers: Mapping[str, int]  # digest -> bytes, with the configuration
    config: str  # digest

    @property
    def size(self) -> int:
        return sum(self.layers.values())


class Registry:
    """A client for all hosts; may be used by many threads."""

    def __init__(self, credentials: Credentials, policy: RetryPolicy, rate: RateLimit) -> None:
        self._credentials, self._policy, self._rate = credentials, policy, rate
        self._client = httpx2.Client(timeout=httpx2.Timeout(READ_SECONDS), follow_redirects=True)
        self._buckets: dict[str, TokenBucket] = {}
        self._tokens: dict[str, tuple[str, float]] = {}  # repository address -> header, when it ends
        self._challenges: dict[str, str] = {}  # host -> what its first answer asked for
        self._reached: set[str] = set()
        self._unreached: dict[str, LaunchError] = {}
        self._lock = threading.Lock()
        self.waits: defaultdict[str, int] = defaultdict(int)  # reason -> times

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def digest(self, reference: Reference) -> str | None:
        """Return the digest of an image, None where there is none: a question that costs no pull on Docker Hub."""
        address = f"{reference.api}/manifests/{reference.tag}"

        def ask() -> str | None:
            with self._request("HEAD", address, reference) as answer:
                if answer.status_code == 404:
                    return None
                self._require_ok(answer, reference)
                return answer.headers.get("Docker-Content-Digest", "")

        return self._ask(ask, reference)

    def manifest(self, reference: Reference) -> Manifest:
        """Return the manifest for amd64; raises `PullError`."""
        digest, content = self._manifest(reference, reference.tag)
        document = _document(content, reference)
        if "manifests" in document:
            digest = _for_amd64(document, reference)
            digest, content = self._manifest(reference, digest)
            document = _document(content, reference)
        try:
            parts = [document["config"], *document["layers"]]
            layers = {str(part["digest"]): int(part["size"]) for part in parts}
        except (KeyError, TypeError, ValueError) as error:
            raise PullError("manifest", f"{reference}: {type(error).__name__} {error}") from error
        if wrong := [layer for layer in layers if not DIGEST.fullmatch(layer)]:
            raise PullError("manifest", f"{reference}: a layer without a sha256: {wrong[0][:80]}")
        return Manifest(digest=digest, content=content, layers=layers, config=str(document["config"]["digest"]))

    def _manifest(self, reference: Reference, name: str) -> tuple[str, bytes]:
        def ask() -> tuple[str, bytes]:
            with self._request("GET", f"{reference.api}/manifests/{name}", reference) as answer:
                if answer.status_code == 404:
                    raise PullError("missing", f"{reference}: not in the registry")
                self._require_ok(answer, reference)
                content = answer.read()
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            declared = name if DIGEST.fullmatch(name) else answer.headers.get("Docker-Content-Digest", digest)
            if declared != digest:
                raise TransientError(f"manifest with {digest[:19]} instead of {declared[:19]}")
            return digest, content

        return self._ask(ask, reference)

    def blob(self, reference: Reference, digest: str, target: Path, count: Callable[[int], None]) -> None:
        """Bring a blob to `target`; it appears there only when it is right. `count` is called with bytes received."""
        partial = target.with_name(f"{target.name}.partial")
        num_failures = size = 0
        for is_last in (False, False, True):  # of a blob that came whole and wrong
            while True:
                try:
                    self._receive(reference, digest, partial, count)
                    break
                except TransientError as failure:
                    now = partial.stat().st_size if partial.exists() else 0
                    num_failures, size = (1 if now > size else num_failures + 1), max(size, now)
                    self._wait_or_raise(failure, num_failures, reference)
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found == digest.removeprefix("sha256:"):
                partial.replace(target)
                return
            partial.unlink()
            size = 0
            self.waits["wrong digest"] += 1
            if is_last:
                raise PullError("digest", f"{reference} {digest[:19]}: the registry sends other bytes each time")

    def _receive(self, reference: Reference, digest: str, partial: Path, count: Callable[[int], None]) -> None:
        """Append what is missing to `partial`."""
        start = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._request("GET", f"{reference.api}/blobs/{digest}", reference, headers) as answer:
            if answer.status_code == 404:
                raise PullError("missing", f"{reference}: its layer {digest[:19]} is not in the registry")
            if answer.status_code == 416:
                partial.unlink(missing_ok=True)
                raise TransientError("nothing after what was received")
            self._require_ok(answer, reference)
            if answer.status_code != 206:
                start = 0
            declared = answer.headers.get("Content-Length")
            with partial.open("ab" if start else "wb") as file:
                for chunk in answer.iter_raw():  # as they come: a break loses none
                    file.write(chunk)
                    count(len(chunk))
                received = file.tell() - start
        if declared is not None and received < int(declared):
            raise TransientError(f"the registry ended after {received} of {declared} bytes")

    @contextmanager
    def _request(
        self, method: str, address: str, reference: Reference, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx2.Response]:
        """Ask once, with a token of the bucket, and with a new password ticket when the registry wants one."""
        try:
            for is_second in (False, True):
                self.bucket(reference.host).take()
                sent = {"Accept": ", ".join(MANIFESTS), "Accept-Encoding": "identity", **(headers or {})}
                if ticket := self._ticket(reference, is_known=not is_second):
                    sent["Authorization"] = ticket
                with self._client.stream(method, address, headers=sent) as answer:
                    self._reached.add(reference.host)
                    if answer.status_code == 401 and not is_second:
                        self._get_ticket(reference, answer.headers.get("WWW-Authenticate", ""))
                        continue
                    yield answer
                    return
        except httpx2.LocalProtocolError:  # its message holds the password or token
            raise PullError("access", f"{reference}: a password or token that no header can hold ({LOGIN})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise TransientError(f"{type(error).__name__} ({error})") from error

    def bucket(self, host: str) -> TokenBucket:
        """Return the bucket of a host."""
        with self._lock:
            if host not in self._buckets:
                self._buckets[host] = TokenBucket(per_second=self._rate.per_second, burst=self._rate.burst)
            return self._buckets[host]

    def _ticket(self, reference: Reference, *, is_known: bool) -> str | None:
        """Return the header for a repository; of a host whose question is known, it is got without being asked."""
        with self._lock:
            ticket, ends = self._tokens.get(reference.api, (None, 0.0))
            challenge = self._challenges.get(reference.host)
        if time.monotonic() < ends:
            return ticket
        if challenge is None or not is_known:
            return None
        self._get_ticket(reference, challenge)
        return self._ticket(reference, is_known=False)

    def _get_ticket(self, reference: Reference, challenge: str) -> None:
        """Answer a challenge: with the password itself, or with a token that the registry's server gives for it."""
        basic = self._credentials.basic(reference.host)
        kind, parts = challenge.partition(" ")[0].lower(), dict(CHALLENGE.findall(challenge))
        ticket, seconds = basic, TOKEN_SECONDS
        with self._lock:
            self._challenges[reference.host] = challenge
        if kind == "bearer":
            query = {"scope": f"repository:{reference.repository}:pull", "service": parts.get("service", "")}
            headers = {"Authorization": basic} if basic else {}
            answer = self._client.get(parts.get("realm", ""), params=query, headers=headers)
            if answer.status_code == 200:
                given = _document(answer.content, reference)
                ticket = f"Bearer {given.get('token') or given.get('access_token')}"
                seconds = min(TOKEN_SECONDS, 0.8 * float(given.get("expires_in") or TOKEN_SECONDS))
            elif answer.status_code in RETRIED_STATUSES:
                raise TransientError(
                    f"HTTP {answer.status_code} from the token server", retry_after=retry_after(answer.headers)
                )
            else:
                raise PullError("access", f"{reference}: HTTP {answer.status_code} from its token server ({LOGIN})")
        if ticket:
            with self._lock:
                self._tokens[reference.api] = (ticket, time.monotonic() + seconds)

    def _require_ok(self, answer: httpx2.Response, reference: Reference) -> None:
        status = answer.status_code
        if status in RETRIED_STATUSES:
            raise TransientError(f"HTTP {status}", retry_after=retry_after(answer.headers))
        if status in (401, 403):
            raise PullError("access", f"{reference}: HTTP {status} ({LOGIN})")
        if status >= 400:
            raise PullError("refused", f"{reference}: HTTP {status}")

    def _ask(self, ask: Callable[[], Answer], reference: Reference) -> Answer:
        """Return the answer to `ask`, which is tried again; a host that never answered is not asked any more."""

        def ask_once() -> Answer:
            if reference.host in self._unreached:
                raise self._unreached[reference.host]
            return ask()

        return call_with_retries(ask_once, lambda failure, count: self._wait_or_raise(failure, count, reference))

    def _wait_or_raise(self, failure: TransientError, num_failures: int, reference: Reference) -> None:
        """Wait before the next attempt, with every other thread when the registry limits the rate; or give up."""
        failure.is_reached = reference.host in self._reached
        seconds = self._policy.seconds_until_retry(num_failures, failure)
        if seconds is None:
            if self._policy.asks_too_long(failure):
                detail = f"{reference}: the registry asks to wait {failure.retry_after:.0f} s"
                raise PullError("limit", detail) from failure
            if not failure.is_reached:
                self._unreached[reference.host] = unreachable(reference, failure, num_failures)
                raise self._unreached[reference.host] from failure
            raise PullError("network", f"{reference}: {failure}") from failure
        self.waits[str(failure).split(" (", 1)[0]] += 1
        if seconds >= TOLD_SECONDS:
            print(f"sif: {reference.host}: {failure}; waiting {seconds:.0f} s", flush=True)
        if str(failure).startswith("HTTP 429"):
            self.bucket(reference.host).close(seconds)
        else:
            self._policy.sleep(seconds)


def unreachable(reference: Reference, failure: TransientError, num_failures: int) -> LaunchError:
    """Return the error that ends a run whose registry never answered."""
    fix = "check the network and the proxy (HTTPS_PROXY, no_proxy), or name a mirror: MIRROR=HOST[:PORT][/PREFIX]"
    wrong = f"the registry never answered: {failure}, {num_failures} times in a row"
    return LaunchError(Problem(where=reference.api.partition("/v2/")[0], wrong=wrong, fix=fix))


def _document(content: bytes, reference: Reference) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise PullError("manifest", f"{reference}: no JSON") from error
    if not isinstance(document, dict):
        raise PullError("manifest", f"{reference}: no JSON object")
    return document


def _for_amd64(index: Mapping[str, Any], reference: Reference) -> str:
    for entry in index["manifests"]:
        platform = entry.get("platform") or {}
        if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
            return str(entry["digest"])
    raise PullError("platform", f"{reference}: nothing for linux/amd64")
