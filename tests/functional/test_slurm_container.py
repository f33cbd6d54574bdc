"""A whole stage in containers on a real Slurm cluster: head, worker, driver and sandboxes, each in a root of its own.

The training image holds nothing but busybox and the way to Python; whatever the run needs, it must find behind the
mounts of the launch. Pyxis is stood in for on the nodes (pyxis_shim.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slurm.cluster import ROOT, Cluster
from slurm.jobs import launch, slurm_environment
from small_root import require, write_root
from tiny_run import launch_environment

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]
RUN_SECONDS = 300.0
STEPS, PROMPTS = 2, 2
OVERRIDES = {
    "cluster.num_nodes": 2,
    "cluster.gpus_per_node": 1,
    "grpo.num_prompts_per_step": PROMPTS,
    "grpo.num_generations_per_prompt": 2,
    "grpo.max_num_steps": STEPS,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "policy.generation.max_new_tokens": 8,
}
SHIM = Path(__file__).with_name("pyxis_shim.py")
VENV = ROOT / ".venv"


@pytest.fixture
def images(tmp_path: Path) -> dict[str, str]:
    """Write both images; return the variables that name them and what stands in for a full image."""
    require("bwrap", "mksquashfs", "unsquashfs")
    training = write_root(tmp_path / "images/training", programs=["bash"])
    for name in ("bin/python", "bin/python3", "bin/bash"):
        (training / name).unlink(missing_ok=True)
    (training / "bin/bash").symlink_to("/usr/bin/bash")
    (training / "etc/image-environment").write_text(
        f"PATH={VENV}/bin:/bin:/usr/bin\nPYTHONPATH=/nothing\n", encoding="utf-8"
    )
    sandbox = write_root(
        tmp_path / "images/sandbox", programs=["bash", "bwrap", "env", "setpriv", "prlimit"], python=True
    )
    (sandbox / "bin/bash").symlink_to("/usr/bin/bash")
    shutil.copytree(ROOT / "containers/sandbox", sandbox / "sandbox")
    shutil.copytree(ROOT / "recipes/confinement", sandbox / "sandbox/recipes/confinement")
    (sandbox / "start-with-nginx.sh").symlink_to("/sandbox/start.sh")
    (sandbox / "etc/image-environment").write_text("PATH=/usr/bin:/bin\n", encoding="utf-8")
    for root in (training, sandbox):
        subprocess.run(
            ["mksquashfs", root, f"{root}.sqsh", "-quiet", "-no-progress", "-comp", "zstd", "-Xcompression-level", "1"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    (tmp_path / "state").mkdir()
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin/srun"
    srun.write_text(
        f'#!/bin/sh\nPYXIS_SRUN={shutil.which("srun")} exec {sys.executable} {SHIM} "$@"\n', encoding="utf-8"
    )
    srun.chmod(0o755)
    return {
        "CONTAINER_RUNTIME": "pyxis",
        "CONTAINER": f"{training}.sqsh",
        "SANDBOX_CONTAINER": f"{sandbox}.sqsh",
        "EXTRA_MOUNTS": ",".join(
            f"{place}:{place}:ro" for place in dict.fromkeys(("/usr", str(VENV), sys.base_prefix))
        ),
        "PYXIS_STATE": str(tmp_path / "state"),
    }


def test_a_stage_runs_in_containers_that_see_only_what_the_launch_mounts(
    slurm_cluster: Cluster, tmp_path: Path, images: dict[str, str]
) -> None:
    env = launch_environment(tmp_path, num_rows=STEPS * PROMPTS + 4, overrides=OVERRIDES) | images
    env |= slurm_environment(tmp_path) | {"PATH": f"{tmp_path}/bin:{env['PATH']}"}
    job = launch(slurm_cluster, "stage1.1", env)
    assert job.wait(seconds=RUN_SECONDS) == "COMPLETED", job.everything()
    records = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert {path.name for path in (tmp_path / "state").iterdir()} == set(slurm_cluster.nodes)
    assert not list((tmp_path / "state").glob("n*/pyxis_*"))  # each went with its step
    for node in slurm_cluster.nodes:
        assert "ready on port 6000" in (job.run_dir / "logs/attempt_1" / f"sandbox_{node}.log").read_text(
            encoding="utf-8"
        )
