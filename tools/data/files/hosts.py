"""The hosts that data files come from: the HTTP session for each, and what its failures mean for the user.

The lowest speed of a transfer: a host that sends a byte now and then is given up like one that sends nothing.

The read deadline of a connection starts again with every byte, so that alone it never ends such a transfer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.errors import DataError, Problem
from recipes.retry import RetryPolicy, TransientError, is_transient, retry_after

if TYPE_CHECKING:
    import httpx2


LOWEST_SPEED = 1000.0  # bytes per second; far below what each of many transfers over one thin line gets
WINDOW_SECONDS = 120.0  # over which this is the average; longer than a pause of a busy host
SHORT_SECONDS = 10.0  # the speed of a connection that breaks off sooner says little


def fast_enough(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pass on the chunks of an answer as they come; raises `TransientError` for bytes slower than the lowest speed.

    The last chunk of a transfer is passed on in any case: what is complete need not be fast.
    """
    begin, received, slow = time.monotonic(), 0, ""
    for chunk in chunks:
        if slow:
            raise TransientError(slow)
        received += len(chunk)
        seconds = time.monotonic() - begin
        if seconds >= WINDOW_SECONDS:
            if received < LOWEST_SPEED * seconds:
                slow = f"too slow ({received} bytes in {seconds:.0f} s; {LOWEST_SPEED:g} bytes a second are the least)"
            begin, received = begin + seconds, 0
        yield chunk


class Tries:
    """Counts the failed tries in a row of one transfer, each of which goes on where the one before it ended.

    A try that came further than all before it starts a new row, unless its bytes came slower than the lowest speed.
    """

    def __init__(self, received: int) -> None:
        """Start at `received` bytes, which an earlier run received."""
        self.furthest = received
        self._num_failures = 0
        self._begin = time.monotonic()

    def chunks(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        """Pass on the chunks of this try's answer, as `fast_enough` does; waits before the answer are not its time."""
        self._begin = time.monotonic()
        yield from fast_enough(answer)

    def failed(self, received: int) -> int:
        """Count the failure of a try that ended at `received` bytes; return the number of failures in a row."""
        gained, seconds = received - self.furthest, time.monotonic() - self._begin
        is_progress = gained > 0 and (seconds < SHORT_SECONDS or gained >= LOWEST_SPEED * seconds)
        self._num_failures = 1 if is_progress else self._num_failures + 1
        self.furthest = max(self.furthest, received)
        return self._num_failures


READ_SECONDS = 60.0  # without a byte; tools/data/files/hosts.py has the lowest speed
CONNECT_SECONDS = 10.0  # a firewall may drop every packet, so a connection needs a deadline of its own
RESUME = "run the same command again; it goes on where it stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A server of files."""

    name: str  # in messages
    variable: str  # environment variable that names another address
    if_limited: str  # what to do when the host limits the rate


HUB = Host(name="the hub", variable="HF_ENDPOINT", if_limited="set HF_TOKEN, which has higher limits")
GITHUB = Host(name="GitHub", variable="GITHUB_RAW_ENDPOINT", if_limited="name a mirror in GITHUB_RAW_ENDPOINT")


def wait_or_raise(failure: TransientError, num_failures: int, policy: RetryPolicy, where: str, host: Host) -> None:
    """Wait before the next attempt; raises `DataError` after too many failures or when the host asks for too long."""
    seconds = policy.seconds_until_retry(num_failures, failure)
    if seconds is not None:
        times = f"{num_failures} of {policy.retries_after(failure)}"
        print(f"download: {where}: {failure}; trying again in {seconds:.1f} s ({times})")
        policy.sleep(seconds)
        return
    wrong = f"{failure}, {num_failures} times in a row"
    if policy.asks_too_long(failure):
        wrong = f"{failure}, and {host.name} asks to wait {failure.retry_after:.0f} s"
        fix = f"run it again in {failure.retry_after:.0f} s, or {host.if_limited}"
    elif failure.is_reached:
        fix = f"{RESUME}; if {host.name} limits the rate, {host.if_limited}"
    else:
        fix = (
            f"check the network and the proxy (HTTPS_PROXY, no_proxy, SSL_CERT_FILE), or name a mirror in "
            f"{host.variable}; or run the same command on a machine with a network and copy its files here: "
            "complete files are not downloaded again"
        )
    raise DataError(Problem(where=where, wrong=wrong, fix=fix)) from failure


@contextmanager
def session_with(host: Host, where: str) -> Iterator[httpx2.Client]:
    """Give huggingface_hub's session with deadlines, and turn its failures into `TransientError` or `DataError`."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        session = get_session()
    except (ImportError, ValueError) as error:  # a proxy of a kind that is not supported, such as SOCKS
        got, expected = str(error).split(",", 1)[0], "a proxy of the form http://HOST:PORT"
        raise DataError(
            Problem(
                where="HTTPS_PROXY, HTTP_PROXY or ALL_PROXY", got=got, expected=expected, fix="correct it, or unset it"
            )
        ) from error
    session.timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    try:
        yield session
    except UnicodeEncodeError as error:
        got = f"{error.object[error.start : error.end]!r} in it"
        raise DataError(
            Problem(where="HF_TOKEN", got=got, expected="letters and digits", fix="copy it again")
        ) from error
    except httpx2.LocalProtocolError:  # the message of this error holds the token, so it is not chained
        got, expected = "a character that no header can hold", "letters and digits"
        raise DataError(Problem(where="HF_TOKEN", got=got, expected=expected, fix="copy it again")) from None
    except OfflineModeIsEnabled as error:
        wrong = "HF_HUB_OFFLINE is set, so nothing can be downloaded"
        raise DataError(Problem(where=where, wrong=wrong, fix="unset HF_HUB_OFFLINE")) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if is_transient(status):
            raise TransientError(f"HTTP {status}", retry_after=retry_after(error.response.headers)) from error
        refusal = hub_refusal if host is HUB else file_refusal
        raise DataError(refusal(where, status, error)) from error
    except json.JSONDecodeError as error:
        wrong, fix = f"{host.name} answered with something other than JSON", _check_address(host)
        raise DataError(Problem(where=where, wrong=wrong, fix=fix)) from error
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


def hub_refusal(where: str, status: int, error: Exception) -> Problem:
    """Return the problem of an answer of the hub that asking again will not change."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RemoteEntryNotFoundError, RevisionNotFoundError

    repository = where.split("@", 1)[0]
    wrong, fix = f"the hub refuses access (HTTP {status})", _check_address(HUB)
    if isinstance(error, GatedRepoError) or status == 403:
        wrong += ": it is gated, and its terms were not accepted or the token may not read it"
        folder = "datasets/" if isinstance(error, HfHubHTTPError) and "/datasets/" in str(error.response.url) else ""
        page = f"https://huggingface.co/{folder}{repository}"
        fix = f"accept the terms on {page} and set HF_TOKEN to a token of that account"
    elif isinstance(error, RevisionNotFoundError):
        wrong, fix = "the data set or model has no such commit", "correct the revision"
    elif isinstance(error, RemoteEntryNotFoundError):
        wrong, fix = "the data set or model has no such file at this commit", "correct the file name or the revision"
    elif status == 401 and get_token():
        wrong, fix = wrong + ": the token is not valid", "set HF_TOKEN to a token that has not expired"
    elif status == 401:
        fix = "set HF_TOKEN: the hub answers this way for a data set or a model that is private, gated or absent"
    elif status == 404:
        wrong = f"the hub has no such data set or model, or the token may not see it (HTTP {status})"
        fix = "check the name, HF_ENDPOINT and HF_TOKEN"
    return Problem(where=where, wrong=wrong, fix=fix)


def file_refusal(where: str, status: int, _: Exception) -> Problem:
    """Return the problem of an answer of GitHub's raw address, which gets no token."""
    wrong, fix = f"GitHub refuses the file (HTTP {status})", _check_address(GITHUB)
    if status == 404:
        wrong = f"GitHub has no such file, or it is private (HTTP {status})"
        fix = "correct repository, revision, path or name in the table of side files"
    elif status in (401, 403):
        fix += ": this address gets no token"
    return Problem(where=where, wrong=wrong, fix=fix)


def _check_address(host: Host) -> str:
    return f"check {host.variable} and the proxy settings"
