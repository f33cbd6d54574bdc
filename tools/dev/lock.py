"""Write the hashes of every pin into a lock, and check that pins agree: `python -m tools.dev.lock LOCK`.

Run this after a change of a pin. Needs a package index. Each pin gets the sha256 of every file that a
machine with Python 3.11 and Linux on x86_64 can install: wheels, or, where there is none, the source, which is marked
`# source`. A pin with a local version, as torch==2.13.0+cpu, is in no common index and keeps its line.

A lock is installed without its dependencies, so no installer says what a pin asks for in vain. What each asks for is
read from the files of the index, without the files themselves where they are wheels, and written to LOCK's name with
`.json`. A test compares. A line of the lock `# accepted: A asks for B: WHY` accepts one conflict.
"""

from __future__ import annotations

import argparse
import email
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

PYTHON = (3, 11)
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)), "manylinux2014_x86_64"]
PLATFORMS += ["manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
TARGET = {"python_version": "3.11", "python_full_version": "3.11.0", "implementation_name": "cpython"} | {
    "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix",
    "platform_python_implementation": "CPython"}  # fmt: skip
ACCEPTED = re.compile(r"^# accepted: (.+ asks for .+?): .+")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)")
COMPILE = [
    str(Path(sys.executable).with_name("uv")),
    "pip",
    "compile",
    "--quiet",
    "--no-deps",
    "--no-annotate",
    "--no-header",
    "--format",
    "pylock.toml",
]


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


def wheels_of(package: Mapping[str, Any], tags: frozenset[Tag]) -> list[dict[str, Any]]:
    """Return the wheels of a package that the target can install."""
    names = [(wheel, wheel.get("name") or wheel["url"].rpartition("/")[2]) for wheel in package.get("wheels", ())]
    return [wheel for wheel, name in names if parse_wheel_filename(name)[3] & tags]


def line_of(package: Mapping[str, Any], tags: frozenset[Tag]) -> str:
    """Return the line of one package; raises `SystemExit` where the target cannot install any of its files."""
    pin, mark = f"{package['name']}=={package['version']}", ""
    hashes = [wheel["hashes"]["sha256"] for wheel in wheels_of(package, tags)]
    if not hashes and "sdist" in package:
        hashes, mark = [package["sdist"]["hashes"]["sha256"]], "  # source"
    if not hashes:
        sys.exit(f"lock: {pin}: the index has no file for the target; pin another version")
    return " ".join([pin, *(f"--hash=sha256:{value}" for value in sorted(hashes))]) + mark


def requirements_of(package: Mapping[str, Any], tags: frozenset[Tag]) -> list[str]:
    """Read what a package asks for: of a wheel only the bytes of its metadata are fetched."""
    wheels = wheels_of(package, tags)
    with fsspec.open(wheels[0]["url"] if wheels else package["sdist"]["url"], block_size=2**17) as file:
        if wheels:
            with zipfile.ZipFile(file) as archive:
                [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
                text = archive.read(name)
        else:
            with tarfile.open(fileobj=io.BytesIO(file.read())) as archive:
                [name] = [name for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
                member = archive.extractfile(name)
                text = member.read() if member else b""
    return email.message_from_bytes(text).get_all("Requires-Dist") or []


def asked_by(requires: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return what each pin asks for on the target, with the extras that others ask of it, by pin.

    Args:
        requires: the requirements of each pin as its package states them.
    """
    pins = {canonicalize_name(pin.partition("==")[0]): pin for pin in requires}
    found: dict[str, set[str]] = {pin: set() for pin in requires}
    seen, coming = set(), [(name, "") for name in pins]
    while coming:
        if (one := coming.pop()) in seen:
            continue
        seen.add(one)
        name, extra = one
        for asked in map(Requirement, requires[pins[name]] if name in pins else ()):
            if asked.marker is None or asked.marker.evaluate(TARGET | {"extra": extra}):
                other = canonicalize_name(asked.name)
                found[pins[name]].add(f"{other}{asked.specifier}")
                coming += [(other, wanted) for wanted in asked.extras]
    return {pin: sorted(lines) for pin, lines in found.items()}


def conflicts(lock: str, asked: Mapping[str, list[str]]) -> list[str]:
    """Return what pins ask for and a lock does not give, and what it accepts without need.

    Args:
        lock: the text of the lock.
        asked: what `asked_by` returns.
    """
    pins = {str(canonicalize_name(match[1])): match[2] for line in lock.splitlines() if (match := PIN.match(line))}
    accepted = {match[1] for line in lock.splitlines() if (match := ACCEPTED.match(line))}
    found = {
        f"{pin.partition('==')[0]} asks for {one}"
        for pin, lines in asked.items()
        for one in map(Requirement, lines)
        if one.name not in pins or not one.specifier.contains(pins[one.name], prereleases=True)
    }
    return sorted(found - accepted) + [f"accepted without need: {text}" for text in sorted(accepted - found)]


def rewritten(text: str, packages: list[dict[str, Any]], tags: frozenset[Tag]) -> Iterator[str]:
    """Yield the lines of a lock with new hashes; comments stay."""
    new = {package["name"]: line_of(package, tags) for package in packages}
    for line in text.splitlines():
        match = PIN.match(line)
        name = re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
        yield line if match is None or "+" in match[2] else new[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", type=Path)
    lock: Path = parser.parse_args().lock
    text, tags = lock.read_text(encoding="utf-8"), installable()
    pins = [match[0] for line in text.splitlines() if (match := PIN.match(line)) and "+" not in match[2]]
    packages = packages_of(pins)
    text = "".join(f"{line}\n" for line in rewritten(text, packages, tags))
    with ThreadPoolExecutor(8) as threads:
        lines = list(threads.map(lambda package: requirements_of(package, tags), packages))
    asked = asked_by({f"{one['name']}=={one['version']}": found for one, found in zip(packages, lines, strict=True)})
    lock.write_text(text, encoding="utf-8")
    lock.with_suffix(".json").write_text(json.dumps(asked, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if found := conflicts(text, asked):
        sys.exit("\n".join(f"lock: {line}" for line in found))


if __name__ == "__main__":
    main()
