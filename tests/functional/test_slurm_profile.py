"""A job on a real Slurm gets the variables of its cluster's profile beside those that it inherits."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm.cluster import Cluster

from tools.draft.profiles import with_variables

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]


def test_job_has_the_profiles_variables(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    script = f'srun bash -c \'printf "%s|%s|%s" "$GREETING" "$LEVEL" "$INHERITED" >{shown}\''
    argv = with_variables(
        ("sbatch", "--wait", f"--output={tmp_path}/out", f"--wrap={script}"),
        {"GREETING": "two words=here", "LEVEL": "2"},
    )
    with Cluster(num_nodes=1, shared=[tmp_path]) as cluster:
        cluster.run(["env", "INHERITED=yes", *argv])
    assert shown.read_text(encoding="utf-8") == "two words=here|2|yes"
