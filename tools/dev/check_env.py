"""Compare an environment with a lock file. Runs on the standard library alone, inside that environment.

Without --final it prints the lock's lines of the packages to install: those that are absent, have another version, or
lack files because an installation was killed. With --final it fails on any such package and on any CUDA package,
imports the large packages and prints their versions.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

IMPORTS = ("torch", "vllm", "ray", "megatron.core", "transformers")
CUDA_PACKAGE = re.compile(r"^(nvidia-|cuda-|triton$|pytorch-triton)")


def canonical(name: str) -> str:
    """Normalise a package name as the packaging standard does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, str]:
    """Return package -> version of a lock; hashes, comments and blank lines are skipped."""
    return {name: version for name, version, _ in lock_entries(text)}


def lock_entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (package, version, line) of each pin of a lock."""
    for line in text.splitlines():
        if pin := line.split("#")[0].split():
            name, _, version = pin[0].partition("==")
            yield canonical(name), version, line


def is_intact(dist: Distribution) -> bool:
    """Whether every file that the installer recorded exists with its size."""
    if dist.read_text("RECORD") is None:
        return False
    for file in dist.files or ():
        if file.name.endswith(".pyc") or file.size is None:
            continue
        path = Path(str(dist.locate_file(file)))
        if not path.is_file() or path.stat().st_size != file.size:
            return False
    return True


def unsatisfied(pins: dict[str, str]) -> list[str]:
    """List the pins that the running environment does not satisfy."""
    installed = {canonical(dist.name): dist for dist in distributions() if dist.name}
    wrong = []
    for name, version in pins.items():
        dist = installed.get(name)
        if dist is None or dist.version not in (version, f"{version}+cpu") or not is_intact(dist):
            wrong.append(f"{name}=={version}")
    return wrong


def final_problems(pins: dict[str, str]) -> list[str]:
    """Say everything that is wrong with a finished environment."""
    problems = [f"{pin}: missing or damaged" for pin in unsatisfied(pins)]
    names = sorted(canonical(dist.name) for dist in distributions() if dist.name)
    problems += [f"{name}: a CUDA package in a CPU environment" for name in names if CUDA_PACKAGE.match(name)]
    return problems


def import_all() -> None:
    """Import the large packages and print their versions."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # Megatron says on import that it runs without its CUDA companions
    for name in IMPORTS:
        module = importlib.import_module(name)
        print(f"  {name:<14} {module.__version__}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument("--final", action="store_true")
    args = parser.parse_args()
    pins = read_lock(args.lock.read_text(encoding="utf-8"))
    if not args.final:
        missing = set(unsatisfied(pins))
        for name, version, line in lock_entries(args.lock.read_text(encoding="utf-8")):
            if f"{name}=={version}" in missing:
                print(line)
        return 0
    problems = final_problems(pins)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        import_all()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
