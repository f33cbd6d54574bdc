"""What runs below a process."""

from __future__ import annotations

from pathlib import Path


def below(parent: int) -> list[int]:
    """Return the ids of all processes below one, nearest first."""
    try:
        tasks = list(Path(f"/proc/{parent}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text(encoding="utf-8").split()]
    except OSError:
        return []
    return children + [process for child in children for process in below(child)]
