"""Find everything that would end a planned launch, before anything is started. No torch, no Ray.

One function per subject; each returns its problems, none raises. `preflight` collects them all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.environments.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.grpo.config import refusals, require_valid, unset
from recipes.grpo.data import check_file
from recipes.grpo.errors import InputError, LaunchError, Problem
from recipes.grpo.types import Row
from tools.launch.local import count_gpus, take_slot
from tools.launch.run_dir import lock_problems
from tools.launch.walltime import walltime_problems

if TYPE_CHECKING:
    from tools.launch.plan import Plan

MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
MIN_FREE_BYTES = 2**30
CHECKPOINT_FACTOR = 8  # bytes of one checkpoint per byte of bfloat16 weights: float32 master, two moments, export


def preflight(plan: Plan) -> list[Problem]:
    """Return every problem of the launch."""
    model = model_problems(plan.model_path)
    problems = [*unset(plan.loaded), *refusals(plan.loaded), *model]
    check_row: Callable[[Row], list[str]] = _accept
    if not model:
        check_row, environment = row_checker(plan)
        problems += environment
    for path in plan.data_paths:
        problems += check_file(path, check_row)
    problems += disk_problems(plan.run_dir, weight_bytes(plan.model_path))
    if plan.contract.is_local:
        problems += lock_problems(plan.run_dir) + machine_problems(plan.sizes.train_gpus + plan.sizes.generation_gpus)
    else:
        problems += image_problems(plan)
        must_save_by = require_valid(plan.loaded).checkpointing.checkpoint_must_save_by
        problems += walltime_problems(must_save_by, plan.contract["SLURM_TIME_LIMIT"])
    return problems


def model_problems(path: Path) -> list[Problem]:
    """Check that the start weights are a Hugging Face directory with tokenizer and whole weight files."""
    fix = "set MODEL_PATH to a Hugging Face checkpoint; `make tiny` makes the tiny one"
    if not path.is_dir():
        return [Problem(where=f"MODEL_PATH={path}", got="no such directory", expected="start weights", fix=fix)]
    problems = [
        Problem(where=str(path), got=f"no {name}", expected="a complete Hugging Face directory", fix=fix)
        for name in MODEL_FILES
        if not (path / name).is_file()
    ]
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        problems.append(Problem(where=str(path), got="no *.safetensors", expected="weights", fix=fix))
    return problems + [problem for file in weights for problem in weight_file_problems(file)] + _index_problems(path)


def weight_file_problems(path: Path) -> list[Problem]:
    """Compare the size of a safetensors file with what its header declares: a cut copy is found without reading it."""
    size = path.stat().st_size
    with path.open("rb") as content:
        header_size = int.from_bytes(content.read(8), "little")
        header = content.read(header_size) if header_size < size else b""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        declared = 8 + header_size + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        declared = -1
    if declared == size:
        return []
    expected = f"{declared} bytes, as its header says" if declared > 0 else "a safetensors header"
    return [Problem(where=str(path), got=f"{size} bytes", expected=expected, fix="copy or export the file again")]


def _index_problems(path: Path) -> list[Problem]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    files = set(json.loads(index.read_text())["weight_map"].values())
    return [
        Problem(where=str(index), got=f"no {name}", expected="every file of the index", fix="copy the checkpoint again")
        for name in sorted(files)
        if not (path / name).is_file()
    ]


def row_checker(plan: Plan) -> tuple[Callable[[Row], list[str]], list[Problem]]:
    """Return the check of one row by the configured environments, and what is wrong with their configuration."""
    config = require_valid(plan.loaded)
    try:
        return Environments.from_config(config.env, ChatCodec.from_config(config.policy)).check_row, []
    except InputError as error:
        return _accept, error.problems


def _accept(_row: Row) -> list[str]:
    return []


def weight_bytes(path: Path) -> int:
    """Return the size of the weights of a Hugging Face directory."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def disk_problems(run_dir: Path, num_bytes: int) -> list[Problem]:
    """Check that the file system of the run holds at least one more checkpoint."""
    place = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    needed = max(MIN_FREE_BYTES, CHECKPOINT_FACTOR * num_bytes)
    if free >= needed:
        return []
    return [
        Problem(
            where=str(run_dir),
            got=f"{free / 2**30:.1f} GiB free",
            expected=f"{needed / 2**30:.1f} GiB, the size of a checkpoint",
            fix="free some disk, or set RESULTS_DIR to another one",
        )
    ]


def machine_problems(num_units: int) -> list[Problem]:
    """Check ports and accelerators of this machine for a run with `num_units` workers."""
    problems = []
    try:
        take_slot()[1].close()
    except LaunchError as error:
        problems += error.problems
    if 0 < count_gpus() < num_units:
        problems.append(
            Problem(
                where="this machine",
                got=f"{count_gpus()} GPUs",
                expected=f"{num_units}, one per worker (cluster.gpus_per_node)",
                fix="lower cluster.gpus_per_node and what divides it, or use LAUNCHER=slurm",
            )
        )
    return problems


def image_problems(plan: Plan) -> list[Problem]:
    """Check that images given as files are there; a registry URI is left to the cluster."""
    names = ("CONTAINER", "SANDBOX_CONTAINER") if plan.contract["CONTAINER_RUNTIME"] != "none" else ()
    return [
        Problem(where=name, got=f"{plan.contract[name]}: no such file", expected="an image", fix="build or import it")
        for name in names
        if plan.contract[name].startswith(("/", ".")) and not Path(plan.contract[name]).exists()
    ]
