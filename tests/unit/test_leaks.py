"""Nothing that is committed names the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE_PATH = re.compile(r"(?<![\w./$}*-])/(?:work|home|Users|lustre|root|opt/(?:wheels|pypi))/[\w.]")
SECRET = re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|ghp_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16}|BEGIN [A-Z ]*PRIVATE KEY)")
MAX_BYTES = 2 * 2**20


def tracked_files() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_no_machine_path_or_secret_is_committed():
    wrong = []
    checkout_parent = str(ROOT.parent)
    for path in tracked_files():
        for number, line in enumerate(path.read_text(errors="replace", encoding="utf-8").splitlines(), start=1):
            is_here = len(checkout_parent) > 4 and f"{checkout_parent}/" in line
            if is_here or MACHINE_PATH.search(line) or SECRET.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not wrong


def test_no_large_file_is_committed():
    assert not [str(path) for path in tracked_files() if path.stat().st_size > MAX_BYTES]
