"""Read every file of a checkpoint and compare it with its checksum.

    make verify-checkpoint CHECKPOINT=results/RUN/checkpoints/step_000010

A start reads the large files in parts, one on each rank of the policy; this reads them all, in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import InputError, Problem
from recipes.grpo.checkpoint import require_whole
from tools.command_line import exit_status


@exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and return 0, or 2 with every file that is missing or differs."""
    parser = argparse.ArgumentParser(prog="verify_checkpoint", description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of a step: .../step_000010")
    given: Path = parser.parse_args(arguments).checkpoint
    checkpoint = given.resolve()
    if not checkpoint.is_dir():
        fix = "give the directory of a step: CHECKPOINT=results/RUN/checkpoints/step_000010, or .../latest"
        raise InputError(Problem(where=str(given), wrong="there is no such directory", fix=fix))
    print(f"{checkpoint}: reading every file", flush=True)
    require_whole(checkpoint)
    print(f"{checkpoint}: whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
