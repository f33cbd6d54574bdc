"""A planned launch, and what is written before it starts: run directory, run.lock.json, code snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.config.keys.derive import Derived
from recipes.config.load import LoadedConfig
from tools.nemo_rl.launch import write_config
from tools.planning.contract import REQUIRED_WITH_CONTAINERS, Contract
from tools.planning.provenance import LaunchRecord, write_run_lock
from tools.planning.snapshot import CodeVersion, add_side_files, read_snapshot, write_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is known before anything is started."""

    root: Path  # the checkout
    contract: Contract
    stage: str  # empty when the environment alone says what to run
    loaded: LoadedConfig
    sizes: Derived
    run_dir: Path
    code_dir: Path  # where the job runs: the snapshot, or the checkout
    code: CodeVersion
    argv: tuple[str, ...]

    @property
    def model_path(self) -> Path:
        return Path(self.contract["MODEL_PATH"])

    @property
    def data_paths(self) -> list[Path]:
        return [Path(self.contract["TRAIN_PATH"]), Path(self.contract["VAL_PATH"])]


def prepare(plan: Plan, *, is_model_there: bool = True) -> list[str]:
    """Prepare the launch; return what the user should know, one line each.

    Without `is_model_there` the start weights are an export that the parent stage has still to write.
    """
    code = plan.code
    if plan.code_dir != plan.root:
        write_snapshot(plan.root, plan.code_dir, plan.code)
        add_side_files(plan.root, plan.code_dir)
        code = read_snapshot(plan.code_dir)  # an older one, with REFRESH_CODE_SNAPSHOT=false
    (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if cache := plan.contract["PERSISTENT_CACHE"]:
        Path(cache).mkdir(parents=True, exist_ok=True)  # no container runtime mounts what is not there
    if plan.contract["ENGINE"] == "nemo_rl":
        write_config(plan.loaded, plan.contract, plan.run_dir)
    record = LaunchRecord(
        code=code,
        stage=plan.stage,
        config_path=plan.loaded.path,
        config=plan.loaded.tree,
        data_paths=plan.data_paths,
        model_path=plan.model_path,
        is_model_there=is_model_there,
        images=images(plan.contract),
    )
    changed = write_run_lock(plan.run_dir, record)
    sizes = plan.sizes
    return [
        f"run directory {plan.run_dir}",
        f"{sizes.num_train_nodes} train + {sizes.num_generation_nodes} generation + {sizes.num_judge_nodes} judge nodes"
        if not plan.contract.is_local
        else f"{sizes.train_gpus} policy workers + {sizes.generation_gpus} engine workers"
        + (f" + {sizes.judge_units} judge workers" if sizes.judge_units else "")
        + " on this machine",
        *([] if is_model_there else [f"start weights {plan.model_path}, found and checked when the job starts"]),
        *(f"differs from the last start: {change}" for change in changed),
    ]


def unprepared(plan: Plan) -> list[str]:
    """Return what a printed command needs and a dry run does not write."""
    if plan.code_dir.is_dir():
        return []
    return [f"the launch itself writes {plan.code_dir}; set SKIP_CODE_SNAPSHOT=true for a command that needs no copy"]


def images(contract: Contract) -> dict[str, str]:
    """Return the images of a launch, by variable; without containers there are none."""
    if contract.is_local or contract["CONTAINER_RUNTIME"] == "none":
        return {}
    return {name: contract[name] for name in REQUIRED_WITH_CONTAINERS}
