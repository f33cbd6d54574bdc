"""The ports of this machine, and a run of the same name. The nodes of a job check theirs when Ray starts there.

What another engine makes of the configuration: what it has no key for, what it would train differently.

The copy of the code that a job runs from: it must hold the configuration that the launch was computed from.

The files of rows, which are there. Directories that the run writes: writable, with room for its checkpoints, and with
one to go on from; its mounts.

Nodes and GPUs: what this machine has against what the configuration needs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from recipes.cluster.ports import node_problems, ray_ports
from recipes.config.fits import FORM_FILE, form_problems, other_model_problems
from recipes.errors import CheckpointError, InputError, LaunchError, Problem
from recipes.files import nearest_existing, read_object
from recipes.generation.engine_args import has_experts
from recipes.grpo.checkpoint import complete_checkpoints, damage, load_state, lost_checkpoints, window_problems
from recipes.grpo.data import DataIdentity, PromptDataset, identity_problems
from recipes.weight_files import files_of
from tools.data.blends import BLENDS_FILE, load_blends
from tools.draft.contract import REQUIRED_ON_SLURM
from tools.draft.findings import Finding, as_finding, as_findings, found
from tools.draft.launch import Launch
from tools.draft.mounts import mount_problems
from tools.draft.nemo_rl.driver import code_problems, home_problems
from tools.draft.nemo_rl.export import exported_for, override_problems, rules
from tools.draft.provenance import read_run_lock
from tools.draft.run_dir import lock_problems
from tools.draft.slurm import NoAnswerError, ask
from tools.draft.snapshot import read_code, untracked
from tools.job.local import (
    LOCAL_RUNS,
    NCCL_BYTES,
    OBJECT_STORE_BYTES,
    SHARED_MEMORY,
    count_devices,
    count_gpus,
    limit_problems,
    shared_memory_problems,
    take_slot,
)
from tools.look.report.load import METRICS_FILE, load_steps


def check_engine(launch: Launch) -> Iterator[Finding]:
    """Hold the image against the engine, and translate the configuration for NeMo RL."""
    contract, loaded = launch.contract, launch.loaded
    if not contract.is_local and contract["CONTAINER_RUNTIME"] != "none":
        is_swe = launch.stage is not None and launch.stage.container == "swe" and launch.environ.get("SWE_CONTAINER")
        where = "SWE_CONTAINER" if is_swe else "CONTAINER"
        yield from as_findings("ENG009", image_problems(contract["ENGINE"], contract["CONTAINER"], where))
    if contract["ENGINE"] != "nemo_rl":
        return
    if contract.is_local or contract["CONTAINER_RUNTIME"] == "none":
        yield from as_findings("ENG001", home_problems(Path(contract["NEMO_RL_DIR"])))
    if contract.is_local and not contract["PERSISTENT_CACHE"]:
        meaning, fix = REQUIRED_ON_SLURM["PERSISTENT_CACHE"], "export PERSISTENT_CACHE=..."
        yield found("ENV001", where="PERSISTENT_CACHE", wrong=f"not set: {meaning}", fix=fix)
    model = launch.path("MODEL_PATH")
    if model is not None and not contract.is_set("TRUST_REMOTE_CODE"):
        yield from as_findings("ENG005", code_problems(model))
    if loaded is None or loaded.config is None or launch.run_dir is None:
        return
    exported = exported_for(loaded, contract, launch.run_dir)
    yield from as_findings("ENG002", exported.problems)
    yield from as_findings("ENG003", override_problems(exported, contract.extra_overrides))
    yield from as_findings("ENG004", exported.notes)


# The last part of the name of an image of NeMo RL, also of a file that one was imported to, and its version.
NEMO_RL_IMAGE = re.compile(r"(?:^|[/#+])nemo[-_]rl(?![a-z0-9])(?:[^/#]*?v(\d+)\.(\d+))?[^/#]*$")


def image_problems(engine: str, image: str, where: str = "CONTAINER") -> Iterator[Problem]:
    """Yield a problem where an image of NeMo RL is given to another engine, or an old one to its own.

    The published pages name such images, and mean a run of NeMo RL.
    """
    named = NEMO_RL_IMAGE.search(image)
    if named is None:
        return
    version, needed = rules()["version"], rules()["container"]
    build = "give an image of `make container`"
    wrong = f"{image} is an image of NeMo RL, and {{}}"
    if named[1] and (int(named[1]), int(named[2])) < tuple(int(part) for part in version.split(".")[:2]):
        wrong = wrong.format(f"ENGINE=nemo_rl writes for {version} or newer, which it is not")
        fix = f"give {needed} or what `make container ENGINE=nemo_rl` makes of it"
        fix = fix if engine == "nemo_rl" else f"set ENGINE=nemo_rl and {fix}, or {build}"
        yield Problem(where=where, wrong=wrong, fix=fix)
    elif engine == "native":
        wrong = wrong.format("ENGINE=native runs this project's own engine, which is not in it")
        yield Problem(where=where, wrong=wrong, fix=f"set ENGINE=nemo_rl, which runs NeMo RL in it, or {build}")


def check_code(launch: Launch) -> Iterator[Finding]:
    """Check a launch that copies the code; one from this checkout needs no copy."""
    loaded = launch.loaded
    if launch.runs_in_checkout or loaded is None or not launch.contract["EXP_NAME"]:
        return
    files = [launch.root / name for name in (*loaded.files, *sorted(set(loaded.sources.values())))]
    files = [file for file in dict.fromkeys(files) if file.is_file()]
    try:
        yield from untracked_findings(launch.root, files)
        snapshot = launch.code_dir(read_code(launch.root))
    except LaunchError as error:
        yield from as_findings("COD001", error.problems)
        return
    if snapshot.is_dir():
        yield from older_findings(launch.root, snapshot, files)


def untracked_findings(root: Path, files: Iterable[Path]) -> Iterator[Finding]:
    """Name the files of the configuration that a copy of the tracked files lacks."""
    for file in untracked(root, files):
        wrong = "git does not track this file, and the job runs from a copy of the tracked files"
        yield found("COD002", where=str(file), wrong=wrong, fix=f"git add {file.relative_to(root)}")


def older_findings(root: Path, snapshot: Path, files: Iterable[Path]) -> Iterator[Finding]:
    """Compare the configuration in a snapshot that is taken again with the one that sizes were computed from."""
    for file in files:
        if not file.is_relative_to(root):
            continue
        copy = snapshot / file.relative_to(root)
        if not copy.is_file() or copy.read_bytes() != file.read_bytes():
            wrong = f"differs from {file}" if copy.is_file() else f"no such file, though there is {file}"
            fix = "unset REFRESH_CODE_SNAPSHOT, or undo the change"
            yield found("COD003", where=str(copy), wrong=wrong, fix=fix)


MIN_FREE_BYTES = 2**30
MANY = 20  # a run that keeps all of its checkpoints should have room for so many
CHECKPOINT_FACTOR = 8  # bytes of one checkpoint per byte of bfloat16 weights: float32 master, two moments, export


def check_paths(launch: Launch) -> Iterator[Finding]:
    """Check the run directory, the directory of caches, and the mounts."""
    yield from as_findings("PTH002", mount_problems(launch))
    if launch.run_dir is not None:
        yield from writable(launch.run_dir, "RESULTS_DIR")
        model = launch.path("MODEL_PATH")
        saving = launch.config.checkpointing if launch.config else None
        kept = saving.keep_top_k if saving else None
        if saving is not None:
            root = launch.run_dir / saving.checkpoint_dir
            yield from as_findings("PTH007", lost_checkpoints(root))
            yield from started_over(launch.run_dir, root)
            if launch.contract["ENGINE"] == "native":
                yield from resume_findings(launch, root)
        yield from disk_findings(launch.run_dir, weight_bytes(model) if model else 0, kept)
    cache = launch.path("PERSISTENT_CACHE")
    if cache is not None and not launch.contract.is_local:
        yield from writable(cache, "PERSISTENT_CACHE")


def check_files(launch: Launch) -> Iterator[Finding]:
    """Check that the files of rows are there. What is in them is another subject, for it takes all verifiers."""
    for variable in ("TRAIN_PATH", "VAL_PATH"):
        path = launch.path(variable)
        if path is not None and not path.is_file():
            wrong = "this is a directory, and a JSONL file is needed" if path.is_dir() else "no such file"
            yield found("DAT001", where=str(path), wrong=wrong, fix=f"run `{maker_of(path)}`, or set {variable}")


def maker_of(path: Path) -> str:
    """Return the command that makes a missing file of rows, by the directory that a stage's rows are in."""
    name = path.parent.name.removesuffix("-good")
    if name.startswith("tiny-"):
        blends = {"tiny-nano": "tools", "tiny-tools": "tools", "tiny-taught": "teachers"}
        return f"make tiny BLEND={blends.get(name, 'wide')}"
    return f"make data BLEND={name}" if name in _blends() else "make data"


def _blends() -> Collection[str]:
    """Return the names of the published blends; none when their table cannot be read."""
    try:
        return load_blends(BLENDS_FILE)
    except InputError:
        return ()


def resume_findings(launch: Launch, root: Path) -> Iterator[Finding]:
    """Read the checkpoint that the run would go on from, and compare it with data and configuration, as a start does.

    Of large files only the sizes are looked at: a start reads those before it loads them.
    """
    assert launch.config is not None, "the caller has one"
    damaged: list[Problem] = []
    found_whole = None
    for path in reversed(complete_checkpoints(root).values()):
        if not (problems := damage(path, fix="restore it, or remove the directory")):
            found_whole = path
            break
        damaged += problems
    yield from as_findings("PTH010" if found_whole else "PTH009", damaged)
    if found_whole is None:
        return
    try:
        saved = load_state(found_whole)
    except CheckpointError as error:
        yield from as_findings("PTH009", error.problems)
        return
    yield from model_findings(launch, found_whole)
    yield from as_findings("CFG005", window_problems(saved, launch.config, found_whole))
    yield from form_findings(launch, found_whole)
    file = launch.path("TRAIN_PATH")
    if file is not None and file.is_file() and launch.config.data.on_change == "refuse":
        rows = PromptDataset(file)
        now = DataIdentity(
            sha256=rows.sha256, num_rows=len(rows), shuffle=launch.config.data.shuffle, seed=launch.config.grpo.seed
        )
        yield from as_findings("DAT014", identity_problems(saved.data, now, file, found_whole))


def model_findings(launch: Launch, path: Path) -> Iterator[Finding]:
    """Compare the model of a checkpoint with the one that the launch names, whose weights a resume does not read."""
    model = launch.path("MODEL_PATH")
    if model is None or launch.run_dir is None:
        return
    problems = other_model_problems(model, path)
    yield from as_findings("PTH011", problems)
    try:
        before = str((read_run_lock(launch.run_dir).get("model") or {}).get("path") or "")
    except LaunchError:  # the start names a damaged file
        return
    has_adapters = launch.config is not None and launch.config.policy.megatron_cfg.peft.enabled  # `form_findings`
    if before and not problems and not has_adapters and before not in (str(model), str(model.resolve())):
        wrong = f"the run began with {before}: it goes on from {path.name}, and reads no weights here"
        yield found("PTH012", where=str(model), wrong=wrong, fix="give another EXP_NAME to train these weights")


def form_findings(launch: Launch, path: Path) -> Iterator[Finding]:
    """Compare the optimizer of a checkpoint with the one that the configuration would build.

    A checkpoint of an older version does not say it in a file of its own; then the start alone compares them.
    """
    model, file = launch.path("MODEL_PATH"), path / "policy" / FORM_FILE
    if not file.is_file():
        wrong = f"an older version saved it, without {FORM_FILE}: whether its optimizer fits is not known from here"
        fix = "start the run with the parallel sizes and the optimizer of before: it compares them before it trains"
        yield found("CFG007", where=str(path), wrong=wrong, fix=fix)
        return
    if launch.config is None or model is None or not (model / "config.json").is_file():
        return
    problems = form_problems(launch.config.policy, read_object(file), path, model, has_experts=has_experts(model))
    yield from as_findings("CFG006", problems)


def started_over(run_dir: Path, root: Path) -> Iterator[Finding]:
    """Say that a run begins anew beside what it has logged: no checkpoint was saved, or somebody took them all."""
    last = max((record.step for record in load_steps(run_dir / METRICS_FILE)), default=0)
    if last and not complete_checkpoints(root) and not lost_checkpoints(root):
        wrong = f"steps up to {last} are logged, and there is no checkpoint in {root}: the run starts over from step 1"
        fix = "restore the checkpoints if there were any; what is logged is kept in set_aside/"
        yield found("PTH008", where=str(run_dir), wrong=wrong, fix=fix)


def writable(path: Path, variable: str) -> Iterator[Finding]:
    """Check that a directory can be written, or made."""
    place = nearest_existing(path)
    if not place.is_dir():
        fix = f"remove it, or set {variable} to another place"
        yield found("PTH001", where=str(path), wrong=f"{place} is a file, not a directory", fix=fix)
        return
    if not os.access(place, os.W_OK | os.X_OK):
        fix = f"ask for the right to write there, or set {variable} to another place"
        yield found("PTH001", where=str(path), wrong=f"{place} cannot be written", fix=fix)


def disk_findings(run_dir: Path, num_bytes: int, kept: int | None) -> Iterator[Finding]:
    """Check that the disk of the run has room for one more checkpoint of these weights, and for all that are kept."""
    free = shutil.disk_usage(nearest_existing(run_dir)).free
    one = CHECKPOINT_FACTOR * num_bytes
    got, where = f"{free / 2**30:.1f} GiB free", str(run_dir)
    if free < max(MIN_FREE_BYTES, one):
        expected = f"{max(MIN_FREE_BYTES, one) / 2**30:.1f} GiB, the size of a checkpoint"
        fix = "free some disk, or set RESULTS_DIR to another one"
        yield found("PTH004", where=where, got=got, expected=expected, fix=fix)
    elif free < (MANY if kept is None else kept + 1) * one:  # the one that is written comes before one is removed
        room = f"room for {free // one} checkpoints of {one / 2**30:.1f} GiB"
        keeps = "all of them" if kept is None else str(kept)
        fix = "lower checkpointing.keep_top_k, or watch the disk"
        yield found("PTH005", where=where, got=f"{got}, {room}", expected=f"room for {keeps} (keep_top_k)", fix=fix)


def weight_bytes(path: Path) -> int:
    """Return the size of the weights of a Hugging Face directory."""
    return sum(file.stat().st_size for file in files_of(path))


MAX_WORKERS_PER_PROCESSOR = 4  # `make smoke TP=2` has three on two; the wide tiny blend a few more
MAX_CPU_WEIGHTS_BYTES = 4 << 30


def check_allocation(launch: Launch) -> Iterator[Finding]:
    """Compare this machine with the sizes of the run."""
    sizes = launch.sizes
    if sizes is None:
        return
    if not launch.contract.is_local:
        return
    num_units, num_gpus = sizes.train_gpus + sizes.generation_gpus + sizes.judge_units, count_gpus()
    why = _too_large_for_processors(launch, num_units)
    if num_gpus:
        if num_gpus < num_units:
            yield found(
                "ALC002",
                where="this machine",
                got=f"{num_gpus} GPUs",
                expected=f"{num_units}, one per worker (cluster.gpus_per_node) and for the engines of judges",
                fix="lower cluster.gpus_per_node and what divides it, or use LAUNCHER=slurm",
            )
    elif why and not count_devices():
        yield found(
            "ALC003",
            where="this machine",
            wrong=f"no GPU here, but {why}",
            fix="start it on a machine with GPUs, or with LAUNCHER=slurm; SCALE=tiny is for machines without",
        )
    if why or count_devices() > num_gpus:
        yield from _torch_finding(launch, code="ENG007" if why else "ENG010")


def _too_large_for_processors(launch: Launch, num_units: int) -> str:
    """Return what of a run is too much for a machine without GPUs; empty for a run that it can do."""
    processors = len(os.sched_getaffinity(0))
    if num_units > MAX_WORKERS_PER_PROCESSOR * processors:
        return f"the run has {num_units} workers, each for a GPU, and there are {processors} processors"
    if launch.config is not None and launch.config.policy.precision != "float32":
        return f"policy.precision is {launch.config.policy.precision}, and processors train in float32"
    model = launch.path("MODEL_PATH")
    size = weight_bytes(model) if model else 0
    if size > MAX_CPU_WEIGHTS_BYTES:
        return f"the start weights have {size / 2**30:.1f} GiB"
    return ""


def _torch_finding(launch: Launch, *, code: str) -> Iterator[Finding]:
    """Say that torch cannot use a GPU, by the version of its package: importing it would take seconds."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return
    if torch.endswith("+cpu") and launch.contract["ENGINE"] == "native":
        wrong = f"torch {torch} is a CPU build: it uses no GPU"
        fix = "start the run with a Python whose torch is a CUDA build (PYTHON=...), such as that of the GPU image"
        yield found(code, where=sys.executable, wrong=wrong, fix=fix)


QUEUE_BYTES = 160 * 2**20  # of one engine with several ranks: ten chunks of 16 MiB


def check_machine(launch: Launch) -> Iterator[Finding]:
    """Check what a Ray head on this machine would need, when the run or its job could have one here."""
    if launch.contract.is_local:
        if launch.run_dir is not None:
            yield from as_findings("PTH003", lock_problems(launch.run_dir))
        sizes = launch.sizes
        num_units = sizes.train_gpus + sizes.generation_gpus + sizes.judge_units if sizes else 0
        yield from as_findings("ALC004", limit_problems(num_units))
        yield from shared_memory_findings(launch)
        try:
            take_slot()[1].close()
        except LaunchError as error:
            yield from (as_finding(code_of(problem), problem) for problem in error.problems)
        return
    problems = node_problems(ray_ports(), head=True)
    if problems and is_node_of(launch.contract["SLURM_PARTITION"]):
        yield from (as_finding(code_of(problem), problem) for problem in problems)


def shared_memory_findings(launch: Launch) -> Iterator[Finding]:
    """Compare /dev/shm with what the processes of a run on this machine share there."""
    if launch.sizes is None:
        return
    model, is_cpu = launch.path("MODEL_PATH"), not count_gpus()
    parts = {
        "weights for the engines": weight_bytes(model) if is_cpu and model else 0,
        "Ray's object store": OBJECT_STORE_BYTES,
        "messages of vLLM's ranks": QUEUE_BYTES * launch.sizes.num_engines if launch.sizes.gpus_per_engine > 1 else 0,
        "NCCL": 0 if is_cpu else NCCL_BYTES * launch.sizes.total_gpus,
    }
    yield from as_findings("PTH006", shared_memory_problems(parts, where=str(SHARED_MEMORY)))


def code_of(problem: Problem) -> str:
    """Return the code of a problem with ports."""
    if problem.where.startswith("net."):
        return "PRT002"
    return "PRT003" if problem.where == LOCAL_RUNS else "PRT001"


def is_node_of(partition: str) -> bool:
    """Whether a job of this partition could run on this machine."""
    host = socket.gethostname().partition(".")[0]
    try:
        answer = ask("sinfo", "--noheader", f"--partition={partition}", f"--nodes={host}", "--format=%D")
    except NoAnswerError:
        return False
    return answer.returncode == 0 and bool(answer.stdout.strip())
