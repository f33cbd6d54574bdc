"""Imported by every Python process of a traced run (PYTHONPATH): appends each distinct stack of calls into the code.

A line of CALL_TRACE_FILE is one stack, the outermost call first, as `file:function file:function ...` with files
relative to CALL_TRACE_ROOT. Only frames of files below `CALL_TRACE_ROOT/recipes` are in it.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

ROOT = os.environ["CALL_TRACE_ROOT"].rstrip("/") + "/"
PLACE = f"{ROOT}recipes/"
ENDS = tuple(os.environ["CALL_TRACE_ENDS"].split())  # functions whose stacks are written
_seen: set[str] = set()


def _record(frame: FrameType, event: str, _argument: Any) -> None:
    code = frame.f_code
    if event != "call" or code.co_qualname not in ENDS or not code.co_filename.startswith(PLACE):
        return
    names = []
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_filename.startswith(PLACE):
            names.append(f"{at.f_code.co_filename.removeprefix(ROOT)}:{at.f_code.co_qualname}")
        at = at.f_back
    line = " ".join(reversed(names)).replace("<locals>", "locals")
    if line not in _seen:
        _seen.add(line)
        with open(os.environ["CALL_TRACE_FILE"], "a", encoding="utf-8") as file:  # noqa: PTH123 (cheap to import)
            file.write(line + "\n")


sys.setprofile(_record)
threading.setprofile(_record)
