"""The ports of a local run: any user of the machine can take some, and that stops no run."""

from __future__ import annotations

import socket
from contextlib import closing

from tools.job.local import take_slot


def test_a_slot_with_a_port_that_another_program_took_is_passed_over() -> None:
    ports, held = take_slot()
    held.close()
    with closing(socket.create_server(("127.0.0.1", ports.metrics))):
        others, held = take_slot()
    held.close()
    assert others.gcs != ports.gcs
