"""Pass rates: the share of a checkpoint's answers to a row that earned their reward, from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson

from recipes.errors import DataError, Problem
from recipes.types import Row


def pass_rate_of(row: Row) -> float | None:
    """Return the pass rate that a row holds, or None when it was never profiled.

    The published blends have it in `pass_rate`. NeMo Gym writes it to `reward_profiles`, where the last profile counts.
    """
    profiles = row.get("reward_profiles")
    last = profiles[-1] if isinstance(profiles, list) and profiles and isinstance(profiles[-1], Mapping) else {}
    for value in (row.get("pass_rate"), last.get("pass_rate")):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
    return None


def read_pass_rates(path: Path) -> dict[str, float]:
    """Return row id -> pass rate, as `make profile` recorded them; a row without a verdict is left out.

    So is a last line that was cut: whoever wrote it was killed, or writes it now.
    """
    rates, content = {}, path.read_bytes()
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = orjson.loads(line)
            row, rate = str(entry["row_id"]), entry["pass_rate"]
            if rate is not None and not 0 <= rate <= 1:
                raise ValueError(f"pass_rate {rate}")
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not content.endswith(b"\n"):
                break
            wrong = f"it has no row_id with a pass_rate from 0 to 1 ({type(error).__name__}: {error})"
            fix = "give the file that `make profile` or a run wrote"
            raise DataError(Problem(where=f"{path}:{number}", wrong=wrong, fix=fix)) from error
        if rate is not None:
            rates[row] = float(rate)
    return rates
