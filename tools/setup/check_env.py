"""Compare an environment with a lock file. Runs on the standard library alone, inside that environment.

Without --final it prints the pins that must be (re)installed: absent, of another version, or with files that a
killed installation left out or cut short. With --final it fails on any such pin and on any CUDA package, imports
the large packages and prints their versions.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from importlib.metadata import Distribution, distributions
from pathlib import Path

IMPORTS = ("torch", "vllm", "ray", "megatron.core", "transformers")
CUDA_PACKAGE = re.compile(r"^(nvidia-|cuda-|triton$|pytorch-triton)")


def canonical(name: str) -> str:
    """Normalise a package name as the packaging standard does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, str]:
    """Map each pinned package to its version; comments and blank lines are skipped."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pins = (line.split("==") for line in lines if line)
    return {canonical(name): version for name, version in pins}


def is_intact(dist: Distribution) -> bool:
    """Whether every file that the installer recorded is there with its size."""
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
        expected = {version, f"{version}+cpu"} if name != "torch" else {f"{version}+cpu"}
        if dist is None or dist.version not in expected or not is_intact(dist):
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
    pins = read_lock(args.lock.read_text())
    if not args.final:
        for pin in unsatisfied(pins):
            print(pin)
        return 0
    problems = final_problems(pins)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        import_all()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
