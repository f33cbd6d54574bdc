"""A crowd of connections to the ports of a run: a program for another user of the machine.

    {"1200": 1000, ...}     from standard input: connections that it makes to each port, and keeps
    {"1200": {...}, ...}    to standard output, a line for each: how many of all were refused, closed by the other side,
                            are held, or wait in the queue of the port; and what was answered

A connection sends half a request and then nothing. It uses the standard library alone.
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import sys
import time

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
QUIET_SECONDS = 2.0  # without news, nothing more is waited for
MOST_SECONDS = 60.0


class Crowd:
    """Its connections and what became of them."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.found: dict[str, dict[str, int]] = {}
        self.answers: dict[str, str] = {}

    def join(self, port: str, number: int) -> None:
        """Begin so many connections."""
        for _ in range(number):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", int(port)))
            self.selector.register(one, selectors.EVENT_WRITE, port)
            self.count(port, "waiting")

    def count(self, port: str, fate: str, before: str | None = None) -> None:
        fates = self.found.setdefault(port, dict.fromkeys(("waiting", "held", "closed", "refused"), 0))
        fates[fate] += 1
        if before:
            fates[before] -= 1

    def settle(self) -> None:
        """Go on until nothing happens any more."""
        end, quiet = time.monotonic() + MOST_SECONDS, time.monotonic() + QUIET_SECONDS
        while time.monotonic() < min(end, quiet):
            for key, _ in self.selector.select(timeout=0.2):
                one, port = key.fileobj, key.data
                quiet = time.monotonic() + QUIET_SECONDS
                try:
                    if key.events & selectors.EVENT_WRITE:
                        one.sendall(HALF)  # raises when it was refused
                        self.selector.modify(one, selectors.EVENT_READ, port)
                        self.count(port, "held", "waiting")
                    elif answer := one.recv(4096):
                        self.answers[port] = answer[:200].decode("latin-1")
                    else:
                        self.end(one, port, "closed", "held")
                except OSError:
                    is_new = bool(key.events & selectors.EVENT_WRITE)
                    self.end(one, port, *(("refused", "waiting") if is_new else ("closed", "held")))

    def end(self, one: socket.socket, port: str, fate: str, before: str) -> None:
        self.selector.unregister(one)
        one.close()
        self.count(port, fate, before)


def main() -> None:
    """Answer each line."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd()
    for line in sys.stdin:
        for port, number in json.loads(line).items():
            crowd.join(port, number)
        crowd.settle()
        told = {port: {**fates, "answer": crowd.answers.get(port, "")} for port, fates in crowd.found.items()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
