"""The throw-away cluster itself: separate nodes, fake GPUs, and nothing left on the machine."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest
from slurm.cluster import ROOT, TURN, Cluster

from tools.launch.command import gres_words

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]


def test_tests_of_slurm_take_turns() -> None:
    """Any other process would wait until this test is over."""
    with TURN.open("a", encoding="utf-8") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def traces(directory: Path) -> list[str]:
    """List what on this machine names `directory` or was left by the test's script."""
    needle, found = os.fsencode(directory), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if process.name != str(os.getpid()) and needle in words + (process / "environ").read_bytes():
                found.append(os.fsdecode(words.replace(b"\0", b" ")))
        except OSError:
            continue
    mounts = [
        line for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines() if str(directory) in line
    ]
    return found + mounts + [str(path) for top in ("/tmp", "/dev/shm") for path in Path(top).glob("only-n*")]


def test_nodes_are_separate_machines_and_nothing_is_left(tmp_path: Path) -> None:
    with Cluster(gpus=8, shared=[tmp_path]) as cluster:
        script = (
            "touch /tmp/only-$(hostname) /dev/shm/only-$(hostname);"
            "sleep 1; echo $(hostname) $(hostname -I) $CUDA_VISIBLE_DEVICES $(ls /tmp/only-* /dev/shm/only-*)"
        )
        done = cluster.run(["srun", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8", "bash", "-c", script])
        assert sorted(done.stdout.splitlines()) == [
            f"n{n} 10.77.0.{10 + n} 0,1,2,3,4,5,6,7 /dev/shm/only-n{n} /tmp/only-n{n}" for n in (1, 2)
        ]
        cluster.run(["srun", "--nodes=1", "touch", str(tmp_path / "seen-by-all")])
        assert (tmp_path / "seen-by-all").exists()
        cluster.kill_node("n2")
        assert cluster.run(["srun", "--nodelist=n1", "hostname"]).stdout == "n1\n"
        cluster.start_node("n2")
        cluster.wait_for_nodes(["n2"])
        assert cluster.run(["srun", "--nodelist=n2", "hostname"]).stdout == "n2\n"
        assert traces(tmp_path)
    assert traces(tmp_path) == []


def test_accounts_are_real_with_slurmdbd(tmp_path: Path) -> None:
    with Cluster(num_nodes=1, accounting=True, shared=[tmp_path]) as cluster:
        refused = cluster.run(["sbatch", "--account=nobody", "--wrap=true"], check=False)
        assert refused.returncode != 0
        assert "Invalid account" in refused.stderr
        job = cluster.run(
            ["sbatch", "--parsable", "--wait", "--account=lab", f"--output={tmp_path}/out", "--wrap=exit 3"],
            check=False,
        )
        listed = cluster.run(
            ["sacct", "--noheader", "--parsable2", f"--jobs={job.stdout.strip()}", "--format=Account,State,ExitCode"]
        )
        assert listed.stdout.splitlines()[0] == "lab|FAILED|3:0"


def test_a_cluster_that_counts_no_gpus_is_asked_for_none(tmp_path: Path) -> None:
    """Slurm refuses a resource that it does not count, and an empty SBATCH_GRES of the shell if no word replaces it."""
    say = "from tools.draft.slurm import asked_gres; print(repr(asked_gres('auto')))"
    job = ["sbatch", "--parsable", "--wait", f"--output={tmp_path}/out", "--wrap=true"]
    with Cluster(num_nodes=1, gpus=0, shared=[tmp_path]) as cluster:
        assert cluster.run([sys.executable, "-c", say], cwd=ROOT).stdout == "''\n"
        cluster.run(job)
        for given in ("", "auto"):
            cluster.run(["env", f"SBATCH_GRES={given}", *job[:-1], *gres_words("", 8, is_given=True), job[-1]])
            assert cluster.run(["env", f"SBATCH_GRES={given}", *job], check=False).returncode != 0
        refused = cluster.run([*job[:-1], "--gres=gpu:8", "--wrap=true"], check=False)
        assert refused.returncode != 0 and "Invalid generic resource" in refused.stderr
    with Cluster(num_nodes=1, gpus=2, shared=[tmp_path]) as cluster:
        assert cluster.run([sys.executable, "-c", say], cwd=ROOT).stdout == "'gpu'\n"
