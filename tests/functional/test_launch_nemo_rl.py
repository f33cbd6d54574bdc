"""ENGINE=nemo_rl on this machine: a real supervisor, Ray and driver, with a program in place of NeMo RL's own.

What the program is given is what NeMo RL would be given; that it trains with it needs its container and GPUs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from speed import patiently
from tiny_run import launch_environment

from recipes.config.load import load_config
from tools.draft.nemo_rl.drift import table
from tools.draft.nemo_rl.export import export
from tools.draft.nemo_rl.import_file import base_path

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import argparse, json, os
import ray
from omegaconf import OmegaConf
parser = argparse.ArgumentParser()
parser.add_argument("--config")
args, overrides = parser.parse_known_args()
config = OmegaConf.merge(OmegaConf.load(args.config), OmegaConf.from_dotlist(overrides))
config = OmegaConf.to_container(config, resolve=True)
ray.init(address="auto", runtime_env={"env_vars": dict(os.environ)}, logging_level="ERROR")

@ray.remote(num_cpus=0, resources={"worker_units": 1})
def environment():
    return os.environ["VLLM_ATTENTION_BACKEND"], os.environ["PYTHONPATH"]

found = {
    "units": ray.cluster_resources()["worker_units"], "worker": ray.get(environment.remote()),
    "model": config["policy"]["model_name"], "tokenizer": config["policy"]["tokenizer"]["name"],
    "seed": config["grpo"]["seed"], "steps": config["grpo"]["max_num_steps"],
    "checkpoints": config["checkpointing"]["checkpoint_dir"],
}
print("found", json.dumps(found), flush=True)
"""


def test_entrypoint_runs_in_the_cluster_on_the_written_file(tmp_path: Path) -> None:
    home = tmp_path / "nemo-rl"
    program = home / "examples" / "nemo_gym" / "run_grpo_nemo_gym.py"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM, encoding="utf-8")
    (home / "nemo_rl").mkdir()
    (home / "nemo_rl" / "package_info.py").write_text("MAJOR = 0\nMINOR = 7\n", encoding="utf-8")
    env = launch_environment(tmp_path, num_rows=24, overrides={}) | {
        "ENGINE": "nemo_rl",
        "EXTRA_HYDRA_ARGS": "grpo.seed=7",  # alone: their engine has none of our deadlines
        "NEMO_RL_DIR": str(home),
        "MODEL_PATH": str(tmp_path / "model"),
        "PERSISTENT_CACHE": str(tmp_path / "cache"),
        "EXP_NAME": "theirs",
    }
    result = subprocess.run(
        ["./super_launch.sh", "stage1.1", "grpo.max_num_steps=3"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(180), check=False,
    )  # fmt: skip
    run_dir = tmp_path / "theirs"
    assert result.returncode == 0, result.stderr
    log = (run_dir / "logs" / "latest" / "driver.log").read_text(encoding="utf-8")
    (line,) = [line for line in log.splitlines() if line.startswith("found ")]
    assert json.loads(line.removeprefix("found ")) == {
        "units": 2.0,
        "worker": ["FLASH_ATTN", str(home)],
        "model": str(tmp_path / "model"),
        "tokenizer": str(tmp_path / "model"),
        "seed": 7,
        "steps": 3,
        "checkpoints": str(run_dir / "checkpoints"),
    }
    assert "note: ENG004" in result.stderr
    assert (run_dir / "run.lock.json").is_file()


def test_the_drift_of_all_published_files_is_told_in_seconds(tmp_path: Path) -> None:
    """Twelve files in their form. 3 s on a free machine; the limit here is for a busy one."""
    for group in table().values():
        for name, ours in group["files"].items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            tree = export(load_config(base_path(ours))).tree
            (tmp_path / name).write_text(yaml.safe_dump(json.loads(json.dumps(tree))), encoding="utf-8")
    command = [sys.executable, "-m", "tools.draft.nemo_rl.drift", "--upstream", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"drift: \d+ differences, \d+ without a reason, in ([0-9.]+) s", last)
    assert found is not None and done.returncode == 1, done.stderr  # reasons that explain nothing here
    assert float(found[1]) < 30
