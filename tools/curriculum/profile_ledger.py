"""The ledger of a profile: one line per row, appended when its last answer is scored, so that a kill loses little.

The lines are appended to a hidden file beside the result. The result is written once, at the end, in row order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from recipes.errors import DataError, Problem
from recipes.files import sha256_of, write_atomically
from tools.files.manifest import TOOL_VERSION, describe, differences, manifest_of, read_manifest, write_manifest
from tools.planning.provenance import model_digest

if TYPE_CHECKING:
    from recipes.config.tree import Config

RESULT = "pass_rates.jsonl"


@dataclass(slots=True)
class ProfileLedger:
    """The rows that have a pass rate, by line number from 1."""

    result: Path
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def known_rows(self) -> Path:
        """The file that rows are appended to until the end. `atomic_writer` uses another name beside the result."""
        return self.result.with_name(f".{self.result.name}.known")

    @classmethod
    def open(cls, directory: Path, known: Mapping[str, Any]) -> ProfileLedger:
        """Return the ledger of a directory with the rows of earlier starts.

        `known` is what decides the result, as `what_is_measured` returns it. Raises `DataError` when an earlier start
        measured something else.
        """
        ledger = cls(directory / RESULT)
        manifest_file = manifest_of(ledger.result)
        manifest = read_manifest(manifest_file)
        if manifest is None:
            directory.mkdir(parents=True, exist_ok=True)
            write_manifest(manifest_file, known)
        elif found := differences({key: manifest.get(key) for key in known}, known):
            wrong = f"it holds the profile of something else: {'; '.join(found)}"
            fix = "name another --run-dir, or remove this one"
            raise DataError(Problem(where=str(directory), wrong=wrong, fix=fix))
        for source in (ledger.result, ledger.known_rows):
            if source.is_file():
                ledger._read(source)
        return ledger

    def _read(self, source: Path) -> None:
        content = source.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a kill may leave half a line; its row is sampled again
        for line in whole.splitlines():
            entry = orjson.loads(line)
            if entry["pass_rate"] is not None:  # a row without a verdict is sampled again
                self.entries[entry["line"]] = entry
        if len(whole) < len(content) and source == self.known_rows:
            os.truncate(source, len(whole))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Record one row."""
        self.entries[entry["line"]] = dict(entry)
        with self.known_rows.open("ab") as file:
            file.write(orjson.dumps(entry) + b"\n")

    def is_finished(self, num_rows: int) -> bool:
        """Return whether the result has a pass rate for every row and no start has appended rows since."""
        return self.result.is_file() and not self.known_rows.exists() and len(self.entries) == num_rows

    def finish(self, known: Mapping[str, Any]) -> dict[str, int]:
        """Write the result and its manifest; return the counts."""
        entries = [self.entries[line] for line in sorted(self.entries)]
        write_atomically(self.result, b"".join(orjson.dumps(entry) + b"\n" for entry in entries))
        self.known_rows.unlink(missing_ok=True)
        rates = [entry["pass_rate"] for entry in entries if entry["pass_rate"] is not None]
        counts = {
            "rows": len(entries),
            "without_verdict": len(entries) - len(rates),
            "always_solved": sum(rate == 1 for rate in rates),
            "never_solved": sum(rate == 0 for rate in rates),
        }
        size = self.result.stat().st_size
        output = {"file": self.result.name, "sha256": sha256_of(self.result), "bytes": size, "rows": len(entries)}
        write_manifest(manifest_of(self.result), {**known, "counts": counts, "outputs": [output]})
        return counts


def what_is_measured(config: Config, rows: Path, *, samples: int, pass_reward: float) -> dict[str, Any]:
    """Return the manifest entries that decide the result: rows, weights and sampling."""
    cfg = config.policy.generation
    parameters = {
        "samples": samples,
        "pass_reward": pass_reward,
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_new_tokens": cfg.max_new_tokens,
        "max_model_len": cfg.vllm_cfg.max_model_len,
        "model": model_digest(Path(config.policy.model_name)),
    }
    return {"tool": "profile", "tool_version": TOOL_VERSION, "inputs": [describe(rows)], "parameters": parameters}
