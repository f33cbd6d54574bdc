"""A directory of Ray as a start leaves it."""

from __future__ import annotations

from pathlib import Path


def write_logs(temp: Path) -> None:
    """Write the logs of one session of Ray below `temp`, a link that points nowhere among them."""
    logs = temp / "ray" / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("x", encoding="utf-8")
    (logs / "gone").symlink_to("nowhere")
    (temp / "ray" / "session_latest").symlink_to("session_2026-01-01")
