"""Write the hashes of every pin into a lock: `python tools/dev/lock_hashes.py containers/requirements-cpu.lock`.

Run this after a change of a pin. Needs uv on PATH and a package index. Each pin gets the sha256 of every file that a
machine with Python 3.11 and Linux on x86_64 can install: wheels, or, where there is none, the source, which is marked
`# source`. A pin with a local version, as torch==2.13.0+cpu, is in no common index and keeps its line.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

PYTHON = (3, 11)
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)), "manylinux2014_x86_64"]
PLATFORMS += ["manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)")
COMPILE = ["uv", "pip", "compile", "--quiet", "--no-deps", "--no-annotate", "--no-header", "--format", "pylock.toml"]


def installable() -> frozenset[Tag]:
    """Return the tags of the wheels that the target can install."""
    tags = [*cpython_tags(PYTHON, None, PLATFORMS), *compatible_tags(PYTHON, "cp311", PLATFORMS)]
    return frozenset(tags)


def packages_of(pins: list[str]) -> list[dict[str, Any]]:
    """Ask the index for the files of all pins, each with its hash."""
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place) / "pins.in", Path(place) / "pylock.toml"
        asked.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        words = [*COMPILE, "--python-version", "3.11", "--output-file", str(answer), str(asked)]
        subprocess.run(words, check=True)
        packages: list[dict[str, Any]] = tomllib.loads(answer.read_text(encoding="utf-8"))["packages"]
        return packages


def line_of(package: dict[str, Any], tags: frozenset[Tag]) -> str:
    """Return the line of one package; raises `SystemExit` where the target cannot install any of its files."""
    pin, hashes, mark = f"{package['name']}=={package['version']}", [], ""
    for wheel in package.get("wheels", ()):
        file = wheel.get("name") or wheel["url"].rpartition("/")[2]
        if parse_wheel_filename(file)[3] & tags:
            hashes.append(wheel["hashes"]["sha256"])
    if not hashes and "sdist" in package:
        hashes, mark = [package["sdist"]["hashes"]["sha256"]], "  # source"
    if not hashes:
        sys.exit(f"lock_hashes: {pin}: the index has no file for the target; pin another version")
    return " ".join([pin, *(f"--hash=sha256:{value}" for value in sorted(hashes))]) + mark


def rewritten(text: str) -> Iterator[str]:
    """Yield the lines of a lock with new hashes; comments stay."""
    lines = text.splitlines()
    pins = [match[0] for line in lines if (match := PIN.match(line)) and "+" not in match[2]]
    tags = installable()
    new = {re.split("==", line, maxsplit=1)[0]: line for line in (line_of(entry, tags) for entry in packages_of(pins))}
    for line in lines:
        match = PIN.match(line)
        name = re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
        yield line if match is None or "+" in match[2] else new[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", type=Path)
    lock: Path = parser.parse_args().lock
    lock.write_text("".join(f"{line}\n" for line in rewritten(lock.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
