"""What another engine makes of the configuration: what it has no key for, what it would train differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.nemo_rl.driver import code_problems, home_problems
from tools.nemo_rl.launch import exported_for, override_problems
from tools.planning.contract import REQUIRED_ON_SLURM
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings, found


def check(draft: Draft) -> Iterator[Finding]:
    """Translate the configuration for NeMo RL; nothing to do for the native engine."""
    contract, loaded = draft.contract, draft.loaded
    if contract["ENGINE"] != "nemo_rl":
        return
    if contract.is_local or contract["CONTAINER_RUNTIME"] == "none":
        yield from as_findings("ENG001", home_problems(Path(contract["NEMO_RL_DIR"])))
    if contract.is_local and not contract["PERSISTENT_CACHE"]:
        meaning, fix = REQUIRED_ON_SLURM["PERSISTENT_CACHE"], "export PERSISTENT_CACHE=..."
        yield found("ENV001", where="PERSISTENT_CACHE", wrong=f"not set: {meaning}", fix=fix)
    model = draft.path("MODEL_PATH")
    if model is not None and not contract.is_set("TRUST_REMOTE_CODE"):
        yield from as_findings("ENG005", code_problems(model))
    if loaded is None or loaded.config is None or draft.run_dir is None:
        return
    exported = exported_for(loaded, contract, draft.run_dir)
    yield from as_findings("ENG002", exported.problems)
    yield from as_findings("ENG003", override_problems(exported.tree, contract.extra_overrides))
    yield from as_findings("ENG004", exported.notes)
