"""Nodes and GPUs: what is asked for against what the configuration needs."""

from __future__ import annotations

from collections.abc import Iterator

from tools.job.local import count_gpus
from tools.planning.draft import Draft
from tools.planning.findings import Finding, found


def check(draft: Draft) -> Iterator[Finding]:
    """Compare the allocation, or this machine, with the sizes of the run."""
    sizes = draft.sizes
    if sizes is None:
        return
    if not draft.contract.is_local:
        asked = draft.contract["SBATCH_NUM_NODES"]
        if asked and int(asked) < sizes.num_nodes:
            parts = (sizes.num_train_nodes, sizes.num_generation_nodes, sizes.num_judge_nodes)
            needs = "{} train + {} generation + {} judges".format(*parts)
            yield found(
                "ALC001",
                where="SBATCH_NUM_NODES",
                got=asked,
                expected=f"at least {sizes.num_nodes} ({needs})",
                fix="unset it, or change cluster.num_nodes and generation.colocated.resources.num_nodes",
            )
        return
    num_units, num_gpus = sizes.train_gpus + sizes.generation_gpus + sizes.judge_units, count_gpus()
    if 0 < num_gpus < num_units:
        yield found(
            "ALC002",
            where="this machine",
            got=f"{num_gpus} GPUs",
            expected=f"{num_units}, one per worker (cluster.gpus_per_node) and for the engines of judges",
            fix="lower cluster.gpus_per_node and what divides it, or use LAUNCHER=slurm",
        )
