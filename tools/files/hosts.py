"""The hosts that files come from: one session, how long a failing host is tried again, and what its refusals mean."""

from __future__ import annotations

import email.utils
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from recipes.errors import DataError, Problem

if TYPE_CHECKING:
    import httpx2

Answer = TypeVar("Answer")

TIMEOUT_SECONDS = 60.0  # without a byte
CONNECT_SECONDS = 10.0  # a firewall answers nothing at all
MAX_BACK_OFF_SECONDS = 60.0
UNREACHED_RETRIES = 3  # of a host that nothing came from yet: it is out of reach more often than it is down
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
RESUME = "run the same command again; it goes on where it stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Who serves files."""

    name: str  # in messages
    variable: str  # environment variable that names another address
    if_limited: str  # what helps against its limits


HUB = Host(name="the hub", variable="HF_ENDPOINT", if_limited="set HF_TOKEN, which has higher limits")
GITHUB = Host(name="GitHub", variable="GITHUB_RAW_ENDPOINT", if_limited="name a mirror in GITHUB_RAW_ENDPOINT")


class TransientError(Exception):
    """A failure that may pass; `asked` is how long the host wants to be left alone, in seconds."""

    def __init__(self, reason: str, *, asked: float | None = None, is_reached: bool = True) -> None:
        super().__init__(reason)
        self.asked = asked
        self.is_reached = is_reached  # the host, by this attempt or by one before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a transfer that makes no progress is tried again."""

    retries: int = 8  # in a row, without one more byte
    first_seconds: float = 1.0  # doubles each time
    longest_wait: float = 900.0  # that a Retry-After may ask for
    sleep: Callable[[float], None] = field(default=time.sleep)

    def retries_after(self, failure: TransientError) -> int:
        """Return how often something is tried again that fails so."""
        return self.retries if failure.is_reached else min(self.retries, UNREACHED_RETRIES)

    def wait(self, attempt: int, failure: TransientError, where: str) -> None:
        """Wait before attempt number `attempt` + 1."""
        backed_off = min(self.first_seconds * 2**attempt, MAX_BACK_OFF_SECONDS)
        seconds = max(backed_off, failure.asked or 0.0)
        times = f"{attempt + 1} of {self.retries_after(failure)}"
        print(f"download: {where}: {failure}; trying again in {seconds:.1f} s ({times})")
        self.sleep(seconds)


def persist(ask: Callable[[], Answer], patience: Patience, where: str) -> Answer:
    """Return the hub's answer to `ask`, tried again with back-off while its failures may pass."""
    for attempt in range(patience.retries + 1):
        try:
            return ask()
        except TransientError as failure:
            give_up_or_wait(failure, attempt, patience, where, HUB)
    raise AssertionError("the last attempt either answers or raises")


def give_up_or_wait(failure: TransientError, attempt: int, patience: Patience, where: str, host: Host) -> None:
    """Wait before the next attempt; raises `DataError` when there is none, or when the host asks for too long."""
    got = f"{failure}, {attempt + 1} times in a row"
    if failure.asked is not None and failure.asked > patience.longest_wait:
        got = f"{failure}, and {host.name} asks to wait {failure.asked:.0f} s"
        fix = f"run it again in {failure.asked:.0f} s, or {host.if_limited}"
    elif attempt < patience.retries_after(failure):
        patience.wait(attempt, failure, where)
        return
    elif failure.is_reached:
        fix = f"{RESUME}; if {host.name} limits the rate, {host.if_limited}"
    else:
        fix = (
            f"check the network and the proxy (HTTPS_PROXY, no_proxy, SSL_CERT_FILE), or name a mirror in "
            f"{host.variable}; or run the same command where there is a network and copy what it wrote to here: "
            "nothing that is complete is asked for again"
        )
    raise DataError(Problem(where=where, got=got, expected="an answer", fix=fix)) from failure


@contextmanager
def session_with(host: Host, where: str) -> Iterator[httpx2.Client]:
    """Give huggingface_hub's session with deadlines, and turn its failures into `TransientError` or `DataError`."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        session = get_session()
    except (ImportError, ValueError) as error:  # as for a SOCKS proxy
        got, expected = str(error).split(",", 1)[0], "a proxy of the form http://HOST:PORT"
        raise DataError(
            Problem(
                where="HTTPS_PROXY, HTTP_PROXY or ALL_PROXY", got=got, expected=expected, fix="correct it, or unset it"
            )
        ) from error
    session.timeout = httpx2.Timeout(TIMEOUT_SECONDS, connect=CONNECT_SECONDS)
    try:
        yield session
    except UnicodeEncodeError as error:
        got = f"{error.object[error.start : error.end]!r} in it"
        raise DataError(
            Problem(where="HF_TOKEN", got=got, expected="letters and digits", fix="copy it again")
        ) from error
    except httpx2.LocalProtocolError:  # its message holds the token
        got, expected = "a character that no header can hold", "letters and digits"
        raise DataError(Problem(where="HF_TOKEN", got=got, expected=expected, fix="copy it again")) from None
    except OfflineModeIsEnabled as error:
        problem = Problem(where=where, got="HF_HUB_OFFLINE", expected="the network", fix="unset it to download")
        raise DataError(problem) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in RETRIED:
            raise TransientError(f"HTTP {status}", asked=retry_after(error.response.headers)) from error
        refusal = hub_refusal if host is HUB else file_refusal
        raise DataError(refusal(where, status, error)) from error
    except json.JSONDecodeError as error:
        fix = f"check {host.variable} and the proxy settings"
        got = f"an answer of {host.name} that is no JSON"
        raise DataError(Problem(where=where, got=got, expected="a list of files", fix=fix)) from error
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        got = repr(os.environ.get(host.variable, ""))
        raise DataError(
            Problem(where=host.variable, got=got, expected="an address: https://HOST", fix="correct it, or unset it")
        ) from error
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
        reason = f"no connection to {error.request.url.host} ({error})"
        raise TransientError(reason, is_reached=False) from error
    except httpx2.TransportError as error:
        raise TransientError(f"{type(error).__name__} ({error})") from error


def retry_after(headers: Any) -> float | None:
    """Return the seconds that a Retry-After header asks for, given as a number or as a date."""
    value = str(headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def hub_refusal(where: str, status: int, error: Exception) -> Problem:
    """Return the problem of an answer of the hub that will not change by asking again."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RevisionNotFoundError

    dataset = where.split("@", 1)[0]
    got, expected = f"HTTP {status}", "access"
    if isinstance(error, GatedRepoError) or status == 403:
        got += " (gated: its terms were not accepted, or the token may not read it)"
        fix = (
            f"accept the terms on https://huggingface.co/datasets/{dataset} and set HF_TOKEN to a token of that account"
        )
    elif isinstance(error, RevisionNotFoundError):
        got, expected, fix = "no such commit", "one of this data set", "correct the revision"
    elif isinstance(error, RemoteEntryNotFoundError):
        got, expected, fix = "no such file", "it at this commit", "correct the file name or the revision"
    elif status == 401 and get_token():
        got, fix = got + " (the token is not valid)", "set HF_TOKEN to a token that has not expired"
    elif status == 401:
        fix = "set HF_TOKEN: the hub answers this way for what is private, gated or not there"
    elif status == 404:
        got, expected = got + " (no such data set, or the token may not see it)", "the data set"
        fix = "check the name, HF_ENDPOINT and HF_TOKEN"
    else:
        fix = "check HF_ENDPOINT and the proxy settings"
    return Problem(where=where, got=got, expected=expected, fix=fix)


def file_refusal(where: str, status: int, _: Exception) -> Problem:
    """Return the problem of an answer of GitHub's raw address, which is asked without a token."""
    got, expected = f"HTTP {status}", "the file"
    if status == 404:
        fix = "correct repository, revision, path or name in the table of side files; what is private cannot be had"
    elif status in (401, 403):
        fix = "check GITHUB_RAW_ENDPOINT and the proxy settings: this address is asked without a token"
    else:
        fix = "check GITHUB_RAW_ENDPOINT and the proxy settings"
    return Problem(where=where, got=got, expected=expected, fix=fix)
