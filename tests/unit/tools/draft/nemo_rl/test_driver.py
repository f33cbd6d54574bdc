"""Becoming NeMo RL's driver, with a stand-in for its checkout that records how it was called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.config.keys.schema import CONFIG_DIR
from tools.draft.nemo_rl.accepted import accepted
from tools.draft.nemo_rl.driver import home_problems
from tools.draft.nemo_rl.export import installed_version

PROGRAM = """
import json, os, sys
names = ("HF_MODULES_CACHE", "PYTHONPATH", "A_NAME")
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}}))
sys.exit(7)
"""


def checkout(path: Path, version: str = "MAJOR = 0\nMINOR = 7\nPATCH = 0\n") -> Path:
    program = path / "examples" / "nemo_gym" / "run_grpo_nemo_gym.py"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM, encoding="utf-8")
    (path / "nemo_rl").mkdir()
    (path / "nemo_rl" / "package_info.py").write_text(version, encoding="utf-8")
    return path


def test_version_is_read_without_importing_it(tmp_path: Path) -> None:
    assert installed_version(checkout(tmp_path / "a")) == "0.7"
    assert installed_version(tmp_path) == ""


@pytest.mark.parametrize(("version", "got"), [("MAJOR = 0\nMINOR = 6\n", "version 0.6"), ("", "version unknown")])
def test_other_version_is_refused(version: str, got: str, tmp_path: Path) -> None:
    (problem,) = home_problems(checkout(tmp_path / "a", version))
    assert problem.got.startswith(got)
    assert "NEMO_RL_DIR" in problem.fix
    assert home_problems(checkout(tmp_path / "b")) == []


def test_a_newer_checkout_is_told_by_the_keys_that_it_reads(tmp_path: Path) -> None:
    home = checkout(tmp_path / "main", "MAJOR = 0\nMINOR = 6\n")  # main keeps the number of an older release
    names = {key.rpartition(".")[2] for key in accepted() if key.startswith(("grpo.", "loss_fn."))}
    (home / "nemo_rl" / "grpo.py").write_text("".join(f"    {name}: int\n" for name in sorted(names)), encoding="utf-8")
    assert home_problems(home) == []
    older = checkout(tmp_path / "older", "MAJOR = 0\nMINOR = 6\n")
    names.remove("advantage_clip_low")
    (older / "nemo_rl" / "grpo.py").write_text(
        "".join(f"    {name}: int\n" for name in sorted(names)), encoding="utf-8"
    )
    (problem,) = home_problems(older)
    assert "does not read grpo.advantage_clip_low" in problem.got


def become(home: Path, cache: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    names = ("DG_JIT_CACHE_DIR", "FLASHINFER_CUBIN_DIR", "HF_MODULES_CACHE", "MEGATRON_CONFIG_LOCK_DIR")
    words = [f"--home={home}", "--config=/run/nemo_rl.yaml", *(f"--env={name}={cache / name}" for name in names)]
    command = [sys.executable, "-m", "tools.draft.nemo_rl.driver", *words, "--env=A_NAME=a=b c", "--", *overrides]
    env = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_it_becomes_their_program_with_its_environment_and_all_words(tmp_path: Path) -> None:
    home = checkout(tmp_path / "nemo-rl")
    result = become(home, tmp_path / "cache", 'policy.model_name="/no/model"', "logger.wandb.name=two words")
    assert result.returncode == 7, result.stderr
    assert json.loads(result.stdout) == {
        "argv": ["--config=/run/nemo_rl.yaml", 'policy.model_name="/no/model"', "logger.wandb.name=two words"],
        "cwd": str(home),
        "HF_MODULES_CACHE": str(tmp_path / "cache" / "HF_MODULES_CACHE"),
        "PYTHONPATH": str(home),
        "A_NAME": "a=b c",
    }
    assert (tmp_path / "cache" / "MEGATRON_CONFIG_LOCK_DIR").is_dir()


CODE = """
import pathlib
from transformers import PretrainedConfig
pathlib.Path("RAN").touch()
class Config(PretrainedConfig):
    model_type = "made-up"
"""


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_the_weights_does_not_run_unless_that_is_asked_for(tmp_path: Path, file: str) -> None:
    home, model, ran = checkout(tmp_path / "nemo-rl"), tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "code.py").write_text(CODE.replace("RAN", str(ran)), encoding="utf-8")
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / file).write_text(
        json.dumps({"model_type": "made-up", "auto_map": {"AutoConfig": "code.Config"}}), encoding="utf-8"
    )
    result = become(home, tmp_path / "cache", f"policy.model_name={model}")
    assert result.returncode == 2
    assert f"{model / file}: `auto_map` names code that comes with the weights" in result.stderr
    assert "set TRUST_REMOTE_CODE=true" in result.stderr
    assert not ran.exists()
    assert not (tmp_path / "cache").exists()


def test_without_its_checkout_it_ends_with_the_fix(tmp_path: Path) -> None:
    result = become(tmp_path / "none", tmp_path / "cache", "policy.model_name=/m")
    assert result.returncode == 2
    assert "run_grpo_nemo_gym.py; start in its container" in result.stderr
    assert not (tmp_path / "cache").exists()
