"""Where the policy's ranks meet: on one address of the machine, at a port that nobody else can take."""

from __future__ import annotations

import socket

import pytest

from recipes.policy.parallel import connect_store, open_store


def test_ranks_meet_on_the_address_they_were_given() -> None:
    store = open_store("127.0.0.1", timeout_s=30)
    store.set("key", "value")
    assert connect_store("127.0.0.1", store.port, timeout_s=30).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=30)
