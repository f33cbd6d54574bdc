"""What happens around a local run, and does not stop it: others that take ports, an output that cannot be written."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tools.job.local import take_slot

ROOT = Path(__file__).resolve().parents[4]


def test_a_slot_with_a_port_that_another_program_took_is_passed_over() -> None:
    ports, held = take_slot()
    held.close()
    with closing(socket.create_server(("127.0.0.1", ports.metrics))):
        others, held = take_slot()
    held.close()
    assert others.gcs != ports.gcs


def test_what_is_copied_to_a_full_disk_is_lost_and_the_copy_goes_on(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from tools.job.local import echo
out, full, log = os.dup(1), os.open("/dev/full", os.O_WRONLY), Path({str(tmp_path / "log")!r})
with echo(log):
    os.dup2(full, 1)
    log.write_text("first\\n")
    time.sleep(1)
    os.dup2(out, 1)
    with log.open("a") as file:
        file.write("second\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("second\n")
    assert (done.returncode, done.stderr) == (0, "")
