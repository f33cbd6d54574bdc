"""Mutation run: change the source in small ways, one at a time, and see whether a test notices.

    python -m tests.mutation [--threshold 0.9] [recipes/policy/packing.py ...]

A mutant that no test notices has survived. The run fails (status 1) when fewer than the threshold of a module's mutants
are killed; those listed as equivalent in targets.py do not count. mutmut and what it needs are installed to
build/mutation, and work on a copy of the tracked files there. About one second per mutant and core.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.targets import EQUIVALENT, TARGETS, Equivalent
from tools.packages import install_packages

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PLACE = ROOT / "build" / "mutation"
PACKAGES, TREE, LOG = PLACE / "packages", PLACE / "tree", PLACE / "mutmut.log"
DEADLINE_SECONDS = 3 * 3600.0
KILLED = frozenset({"killed", "timeout"})  # a mutant that never ends is noticed, too
SETTINGS = """[mutmut]
source_paths=
    recipes/
    tools/
only_mutate=
    {modules}
pytest_add_cli_args_test_selection=
    {tests}
pytest_add_cli_args=
    -p
    no:cacheprovider
also_copy=
    configs/
    containers/
    tests/
    pyproject.toml
process_isolation=forkserver
"""  # A fork of a process that has run torch's backward pass cannot run it again; the fork server never does.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one line."""

    name: str
    module: str
    status: str
    before: str = ""
    after: str = ""

    @property
    def is_killed(self) -> bool:
        return self.status in KILLED


def copy_tree() -> None:
    """Copy the tracked files as they are in the working tree."""
    shutil.rmtree(TREE, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)


def environment() -> dict[str, str]:
    """Return the environment of mutmut: its packages, one thread, and the recorded numbers of the reference."""
    golden = os.environ.get("GOLDEN_DIR") or str(ROOT.parent / "shared" / "golden")
    return {
        **os.environ,
        "PYTHONPATH": str(PACKAGES),
        "GOLDEN_DIR": str(Path(golden).resolve()),
        "OMP_NUM_THREADS": "1",
    }


def mutmut(*words: str) -> str:
    """Run a command of mutmut that prints its answer."""
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=TREE, env=environment(), capture_output=True, text=True, check=True).stdout


def run(modules: Sequence[str]) -> list[Mutant]:
    """Mutate the modules; return every mutant with its status, and the lines of those that survived."""
    tests = sorted({test for module in modules for test in TARGETS[module]})
    (TREE / "setup.cfg").write_text(
        SETTINGS.format(modules="\n    ".join(modules), tests="\n    ".join(tests)), encoding="utf-8"
    )
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(os.cpu_count() or 1)]
    with LOG.open("wb") as log:
        done = subprocess.run(
            command, cwd=TREE, env=environment(), stdout=log, stderr=log, timeout=DEADLINE_SECONDS, check=False
        )
    if done.returncode:
        raise SystemExit(f"mutation: mutmut ended with status {done.returncode}; see {LOG}")
    return [
        read(name, status) for name, status in re.findall(r"^ +(\S+): (.+)$", mutmut("results", "--all", "true"), re.M)
    ]


def read(name: str, status: str) -> Mutant:
    """Return one mutant; its lines are asked for when it was not killed."""
    module = name.rpartition(".")[0].replace(".", "/") + ".py"
    if module not in TARGETS:  # a method: the class is part of the name
        module = name.rsplit(".", 2)[0].replace(".", "/") + ".py"
    if status in KILLED:
        return Mutant(name=name, module=module, status=status)
    lines = mutmut("show", name).splitlines()
    before, after = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign) and not line.startswith(sign * 3))
        for sign in ("-", "+")
    )
    return Mutant(name=name, module=module, status=status, before=before, after=after)


def equivalents(mutants: Sequence[Mutant], module: str) -> Mapping[Equivalent, Mutant]:
    """Return the listed equivalents of a module that survived."""
    survived = {(mutant.before, mutant.after): mutant for mutant in mutants if not mutant.is_killed}
    listed = [one for one in EQUIVALENT if one.module == module]
    return {one: survived[one.before, one.after] for one in listed if (one.before, one.after) in survived}


def report(mutants: Sequence[Mutant], module: str, threshold: float) -> bool:
    """Print what survived in a module; return whether enough was killed and the list of equivalents is true."""
    same = equivalents(mutants, module)
    counted = [mutant for mutant in mutants if mutant not in same.values()]
    killed = sum(mutant.is_killed for mutant in counted)
    share = killed / len(counted) if counted else 0.0
    verdict = "ok" if share >= threshold else f"BELOW {threshold:g}"
    print(f"{module}: {killed} of {len(counted)} killed ({share:.3f}), {len(same)} equivalent: {verdict}")
    for mutant in counted:
        if not mutant.is_killed:
            print(f"  {mutant.status}: {mutant.name}\n    - {mutant.before}\n    + {mutant.after}")
    stale = [one for one in EQUIVALENT if one.module == module and one not in same]
    for one in stale:
        print(f"  listed as equivalent, but no survivor: {one.before} -> {one.after}; remove it from targets.py")
    return share >= threshold and not stale


def main() -> int:
    """Run the command line: 0 when enough mutants are killed, 1 when not, 2 for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threshold", type=float, default=0.9, help="share of mutants that must be killed")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="default: every module in targets.py")
    options = parser.parse_args()
    modules = options.modules or list(TARGETS)
    if unknown := sorted(set(modules) - TARGETS.keys()):
        parser.error(f"got {', '.join(unknown)}, expected some of {', '.join(TARGETS)}")
    golden = Path(environment()["GOLDEN_DIR"])
    if any("tests/unit/test_golden.py" in TARGETS[module] for module in modules) and not golden.is_dir():
        parser.error(f"{golden}: there is no such directory; set GOLDEN_DIR to the recorded numbers of the reference")
    install_packages(REQUIREMENTS, PACKAGES)
    copy_tree()
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in run(modules):
        by_module[mutant.module].append(mutant)
    return 0 if all([report(by_module[module], module, options.threshold) for module in modules]) else 1


if __name__ == "__main__":
    sys.exit(main())
