"""Record the command of every stage, scale and platform in tests/golden/launch, one word per line.

    python -m tools.dev.golden --write tests/golden/launch

The environment is fixed and names no machine. The checkout is written as /repo, its interpreter as PYTHON, the code
snapshot as CODE. Scale tiny is recorded twice: for a run on this machine and for one on Slurm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.config.load import CPU, Stage, load_stages
from tools.draft.launch import ROOT, read_launch
from tools.launch.command import command_of

ENVIRONMENT = {
    "MODEL_PATH": "/shared/models/sft",
    "CONTAINER": "registry.example#training:1",
    "SANDBOX_CONTAINER": "registry.example#sandbox:1",
    "PERSISTENT_CACHE": "/shared/cache",
    "SLURM_PARTITION": "batch",
    "SLURM_ACCOUNT": "lab",
    "SIF_DIR": "/shared/sif",
    "RESULTS_DIR": "/shared/results",
    "CODE_SNAPSHOT_DIRNAME": "/shared/code_snapshots",
}


def environment(stage: Stage, scale: str, platform: str) -> dict[str, str]:
    """Return the variables with which a stage is recorded; platform `cpu` is scale tiny on this machine."""
    chosen = {"SCALE": scale, "LAUNCHER": "local" if platform == CPU else "slurm"}
    if scale != "tiny":
        chosen["PLATFORM"] = platform
    left_out = {"MODEL_PATH"} if stage.after else set()  # a later stage takes its parent's export
    left_out |= set() if "sif" in stage.requires else {"SIF_DIR"}
    return {name: value for name, value in ENVIRONMENT.items() if name not in left_out} | chosen


def combinations(stages: Sequence[Stage]) -> Iterator[tuple[Stage, str, str]]:
    """Yield every stage, scale and platform that has a configuration; tiny on `slurm`, too."""
    for stage in stages:
        for scale, platforms in stage.configs.items():
            for platform in platforms:
                yield stage, scale, platform
            if scale == "tiny":
                yield stage, scale, "slurm"


def content(argv: Sequence[str]) -> str:
    """Return the words of a command, one per line, without what differs between machines and between commits."""
    # The longest first: the interpreter may lie in the checkout.
    replaced = {sys.executable: "PYTHON", str(ROOT): "/repo"}
    snapshot = next((Path(word).name for word in argv if word.startswith("--chdir=")), "")
    if snapshot:
        replaced[snapshot] = "CODE"
    words = list(argv)
    for old, new in replaced.items():
        words = [word.replace(old, new) for word in words]
    return "".join(f"{in_order(word)}\n" for word in words)


def in_order(word: str) -> str:
    """Sort the mounts: their order follows the name of the checkout."""
    option, _, mounts = word.partition("=")
    return f"{option}={','.join(sorted(mounts.split(',')))}" if option == "--mounts" else word


def name_of(stage: Stage, scale: str, platform: str) -> str:
    """Return the name of a recorded file."""
    return f"{stage.id}-{scale}-{platform}.txt"


def golden_files() -> dict[str, str]:
    """Return file name -> content of every recorded command."""
    files = {}
    for stage, scale, platform in combinations(load_stages()):
        launch = read_launch(stage.id, (), environment(stage, scale, platform), ROOT)
        files[name_of(stage, scale, platform)] = content(command_of(launch).argv)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files that have changed, and remove files that belong to no stage."""
    parser = argparse.ArgumentParser(prog="tools.dev.golden", description="Record the command of every stage.")
    parser.add_argument("--write", type=Path, required=True, metavar="DIR", help="directory of the recorded files")
    directory = parser.parse_args(argv).write
    directory.mkdir(parents=True, exist_ok=True)
    files = golden_files()
    stale = [path for path in directory.glob("*.txt") if path.name not in files]
    changed = {
        directory / name: text
        for name, text in files.items()
        if not (directory / name).is_file() or (directory / name).read_text(encoding="utf-8") != text
    }
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    for path in stale:
        path.unlink()
    print(f"golden: {len(files)} commands, {len(changed)} changed, {len(stale)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
