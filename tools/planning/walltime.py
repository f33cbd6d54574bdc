"""Compare the time by which a run must save with the time that its job has."""

from __future__ import annotations

import re

from recipes.errors import Problem
from recipes.stop import parse_duration

SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
UNLIMITED = ("0", "infinite", "unlimited")
KEY = "checkpointing.checkpoint_must_save_by"
SIGNAL_SECONDS = 600  # from Slurm's signal to the end of the job: the driver finishes its step and saves


def walltime_problems(must_save_by: str | None, time_limit: str) -> list[Problem]:
    """Return a problem for a time limit that Slurm cannot read, or that ends before the run has to save."""
    if time_limit.lower() in UNLIMITED:
        return []
    seconds = slurm_seconds(time_limit)
    if seconds is None:
        expected = "minutes, [D-]H:M:S, M:S, D-H or D-H:M"
        return [Problem(where="SLURM_TIME_LIMIT", got=time_limit, expected=expected, fix="write e.g. 4:00:00")]
    if must_save_by is None or parse_duration(must_save_by) < seconds:
        return []
    expected = f"less than SLURM_TIME_LIMIT = {time_limit}"
    return [Problem(where=KEY, got=must_save_by, expected=expected, fix="the job would end before it saves; lower it")]


def slurm_seconds(text: str) -> int | None:
    """Return the seconds of a Slurm time, None for a text that is not one."""
    match = SLURM_TIME.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # M, M:S
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def signal_option(time_limit: str) -> tuple[str, ...]:
    """Return the option that makes Slurm signal the job before its end; nothing for a short limit.

    The driver itself stops in time for the end that the job had when it started; this is for a limit that was changed
    since. Slurm sends it up to a minute early.
    """
    limit = None if time_limit.lower() in UNLIMITED else slurm_seconds(time_limit)
    return () if limit is not None and limit < 4 * SIGNAL_SECONDS else (f"--signal=B:TERM@{SIGNAL_SECONDS}",)
