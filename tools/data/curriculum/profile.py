"""Profile a checkpoint: sample several answers to each row, score them, and record the row's pass rate.

    python -m tools.data.curriculum.profile --stage stage1.1 --model DIR --data F --run-dir DIR [--samples 8]

Starts a one-node Ray cluster with the engines of the configuration and no policy. The same command resumes after a
kill: rows that have a pass rate are not sampled again. `make curriculum` reads the result, RUN_DIR/pass_rates.jsonl.

The ledger of a profile: one line per row, appended when its last answer is scored, so that a kill loses little.

The lines are appended to a hidden file beside the result. The result is written once, at the end, in row order.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from recipes.config.keys.derive import derive, started_judges
from recipes.config.load import config_path, find_stage, load_config, require_runnable
from recipes.errors import CheckpointError, ConfigError, DataError, Problem
from recipes.files import sha256_of, write_atomically
from recipes.grpo.data import PromptDataset
from recipes.grpo.metrics import PASS_REWARD
from tools.command_line import exit_status, positive
from tools.data.files.fetch import model_of
from tools.data.files.manifest import TOOL_VERSION, describe, differences, manifest_of, read_manifest, write_manifest
from tools.data.files.row_blocks import require_file
from tools.draft.launch import TINY_MODEL
from tools.draft.provenance import model_digest
from tools.job.local import LocalRun, supervise

if TYPE_CHECKING:
    from recipes.config.tree import Config


RESULT = "pass_rates.jsonl"
GREEDY = "greedy"  # directory in that of a profile: one answer per row, without sampling


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
            fix = "remove this directory, or measure into another one"
            raise DataError(Problem(where=str(directory), wrong=wrong, fix=fix))
        for source in (ledger.result, ledger.known_rows):
            if source.is_file():
                ledger._read(source)
        return ledger

    def _read(self, source: Path) -> None:
        content = source.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a kill may leave half a line; its row is sampled again
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = orjson.loads(line)
                if entry["pass_rate"] is not None:  # a row without a verdict is sampled again
                    self.entries[int(entry["line"])] = entry
            except (ValueError, TypeError, KeyError) as error:
                wrong = f"it is no pass rate of a line ({type(error).__name__}: {error})"
                fix = f"remove {self.result.parent}, or name another --run-dir"
                raise DataError(Problem(where=f"{source}:{number}", wrong=wrong, fix=fix)) from error
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


def what_is_measured(
    config: Config, rows: Path, *, samples: int, pass_reward: float, model: object = None
) -> dict[str, Any]:
    """Return the manifest entries that decide the result: rows, weights and sampling.

    Reads the weights, unless `model` says what is measured in their place.
    """
    cfg = config.policy.generation
    parameters = {
        "samples": samples,
        "pass_reward": pass_reward,
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_new_tokens": cfg.max_new_tokens,
        "max_model_len": cfg.vllm_cfg.max_model_len,
        "model": model or model_digest(Path(config.policy.model_name)),
    }
    return {"tool": "profile", "tool_version": TOOL_VERSION, "inputs": [describe(rows)], "parameters": parameters}


def greedy(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the same measurement with one answer per row, without sampling."""
    return {**known, "parameters": {**known["parameters"], "samples": 1, "temperature": 0.0}}


SETTINGS = (  # a profile validates nothing
    "data.validation.data_path=null",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
)


def settings(model: str, rows: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a profile, the user's last."""
    return [f"policy.model_name={model}", f"data.train.data_path={rows.resolve()}", *SETTINGS, *overrides]


def checked_config(path: Path, overrides: Sequence[str]) -> Config:
    """Return a configuration; raises `ConfigError` for one that nothing can be measured with."""
    config = require_runnable(load_config(path, overrides))
    if judges := started_judges(config):
        fix = "give its base_url, or take an environment without it: SCALE=tiny, --config, or other rows and keys"
        raise ConfigError([Problem(where=one.key, wrong="a profile starts no judge", fix=fix) for one in judges])
    return config


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the profile. Return 0 when every row has a pass rate, 1 when a row has no verdict, 2 for a wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.data.curriculum.profile", description=__doc__.split("\n", 1)[0]
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--stage", help="stage whose engines and environments are used, at SCALE on PLATFORM")
    which.add_argument("--config", type=Path, help="configuration file to use instead of a stage's")
    parser.add_argument("--model", required=True, help="checkpoint in Hugging Face format, or its name on the hub")
    parser.add_argument("--data", type=Path, required=True, help="rows to profile")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the result and the logs")
    parser.add_argument("--samples", type=positive, default=8, help="answers per row")
    parser.add_argument("--pass-reward", type=float, default=PASS_REWARD, help="smallest reward that counts as solved")
    parser.add_argument("--greedy", action="store_true", help="then also score one answer per row without sampling")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides, the last wins")
    args = parser.parse_intermixed_args(arguments)
    run_dir, model = args.run_dir.resolve(), model_of(args.model)
    require_file(args.data, fix="make the data, or correct --data")
    if not (model / "config.json").is_file():
        wrong = f"{model} is no checkpoint in Hugging Face format: it has no config.json"
        fix = f"give MODEL_PATH=DIR; `make tiny` makes {TINY_MODEL}"
        raise CheckpointError(Problem(where="--model", wrong=wrong, fix=fix))
    config = args.config or config_path(
        find_stage(args.stage), os.environ.get("SCALE") or "prod", os.environ.get("PLATFORM") or "h100"
    )
    overrides = settings(str(model.resolve()), args.data, args.overrides)
    checked = checked_config(config, overrides)
    known = what_is_measured(checked, args.data, samples=args.samples, pass_reward=args.pass_reward)
    ledgers = [ProfileLedger.open(run_dir, known)]
    if args.greedy:
        ledgers.append(ProfileLedger.open(run_dir / GREEDY, greedy(known)))
    num_rows = len(PromptDataset(args.data))
    if all(ledger.is_finished(num_rows) for ledger in ledgers):
        print(f"profile: {ledgers[0].result} is up to date")
        return 0
    derived = derive(checked)
    places = {"--config": config, "--run-dir": run_dir, "--data": args.data.resolve()}
    numbers = {"--samples": args.samples, "--pass-reward": args.pass_reward}
    words = [str(word) for pair in (places | numbers).items() for word in pair] + ["--greedy"] * args.greedy
    command = (sys.executable, "-u", "-m", "tools.data.curriculum.profile_driver", *words, *overrides)
    num_units = derived.num_engines * derived.gpus_per_engine
    return supervise(LocalRun(run_dir=run_dir, command=command, num_units=num_units))


if __name__ == "__main__":
    sys.exit(main())
