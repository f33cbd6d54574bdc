"""What the set-up decides to install: missing, other version, cut short; and what it refuses at the end."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def check_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_env", ROOT / "tools" / "dev" / "check_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages directory that is the only one searched, with torch and one package in it."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "some.package", "1.0")
    return tmp_path


def install(site: Path, name: str, version: str) -> None:
    info = site / f"{name.replace('.', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    module = site / f"{name.replace('.', '_')}.py"
    module.write_text("x = 1\n", encoding="utf-8")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"{module.name},sha256={digest},{module.stat().st_size}\n", encoding="utf-8")


PINS = {"torch": "2.13.0+cpu", "some-package": "1.0"}


def test_lock_lines_are_read_whatever_the_spelling(check_env):
    lock = (
        "# head\nSome_Package==1.0 --hash=sha256:00 --hash=sha256:11  # source\n\ntorch==2.13.0+cpu --hash=sha256:22\n"
    )
    assert check_env.read_lock(lock) == PINS


def test_satisfied_environment_needs_nothing(check_env, site):
    assert check_env.unsatisfied(PINS) == []
    assert check_env.final_problems(PINS) == []


def test_absent_and_other_versions_are_installed(check_env, site):
    assert check_env.unsatisfied({**PINS, "some-package": "2.0", "other": "3"}) == ["some-package==2.0", "other==3"]


def test_cuda_build_of_torch_is_replaced(check_env, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    install(tmp_path, "torch", "2.13.0")
    assert check_env.unsatisfied({"torch": "2.13.0+cpu"}) == ["torch==2.13.0+cpu"]


def test_what_a_killed_installation_left_is_installed_again(check_env, site):
    (site / "some_package.py").write_text("x", encoding="utf-8")
    assert check_env.unsatisfied(PINS) == ["some-package==1.0"]
    (site / "some_package.py").unlink()
    assert check_env.unsatisfied(PINS) == ["some-package==1.0"]


def test_missing_record_counts_as_damaged(check_env, site):
    (site / "some_package-1.0.dist-info" / "RECORD").unlink()
    assert check_env.unsatisfied(PINS) == ["some-package==1.0"]


def test_cuda_package_is_refused(check_env, site):
    install(site, "nvidia-cublas", "13.1")
    assert check_env.final_problems(PINS) == ["nvidia-cublas: a CUDA package in a CPU environment"]


def test_every_pin_of_both_locks_has_its_hash():
    for name in ("cpu", "gpu"):
        lines = (ROOT / f"containers/requirements-{name}.lock").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert len(pins) > 200
        assert not [
            pin for pin in pins if not re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+(  # source)?", pin)
        ]
