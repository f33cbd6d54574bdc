"""Report every problem of a planned launch at once: `make doctor STAGE=stage1.1 SCALE=small PLATFORM=h100`.

    python -m tools.doctor [--stage STAGE] [--json] [--force] [KEY=VALUE ...]
    python -m tools.doctor --codes                  the table of codes

It reads what super_launch.sh reads, and that runs the same checks before it starts anything. Exit status: 0 nothing
that refuses the launch, 2 errors, 1 the doctor itself failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recipes.errors import InputError
from tools.doctor.examine import SUBJECTS, examine
from tools.draft.findings import CODES, Finding, errors, forced
from tools.draft.launch import Launch, read_launch


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print, and return the exit status."""
    args = parse(argv)
    if args.codes:
        print(table())
        return 0
    start = time.monotonic()
    launch = read_launch(args.stage, args.overrides, os.environ)
    findings = forced(examine(launch)) if args.force else examine(launch)
    status = InputError.exit_code if errors(findings) else 0
    if args.json:
        print(json.dumps(as_json(launch, findings, status), indent=2))
    else:
        print(as_text(findings, time.monotonic() - start))
    return status


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="tools.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", default="", help="id or name of a stage; without one the environment says it all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--force", action="store_true", help="make notes of the errors that may be forced")
    parser.add_argument("--codes", action="store_true", help="print the table of codes and stop")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides")
    return parser.parse_intermixed_args(argv)


def as_text(findings: Sequence[Finding], seconds: float) -> str:
    """Return the report for a reader: errors first, each with what to do, then notes, then the sum."""
    lines = []
    for title, severity in (("errors", "error"), ("notes", "note")):
        chosen = [finding for finding in findings if finding.severity == severity]
        if chosen:
            lines.append(f"{title}:")
        for finding in chosen:
            problem = finding.problem
            lines.append(f"  {finding.code}  {problem.where}: {problem.what}")
            lines.append(f"          {problem.fix}{' (forced)' if finding.is_forced else ''}")
    num_errors = len(errors(findings))
    able = sum(finding.can_force for finding in errors(findings))
    more = f" ({able} could be forced)" if able else ""
    notes = len(findings) - num_errors
    counts = f"{num_errors} error{'s' * (num_errors != 1)}{more}, {notes} note{'s' * (notes != 1)}"
    lines.append(f"doctor: {counts}, {len(SUBJECTS)} subjects in {seconds:.1f} s")
    return "\n".join(lines)


def as_json(launch: Launch, findings: Sequence[Finding], status: int) -> dict[str, Any]:
    """Return the report for a program."""
    return {
        "exit_status": status,
        "stage": launch.stage.id if launch.stage else None,
        "experiment": launch.contract["EXP_NAME"],
        "num_nodes": launch.sizes.num_nodes if launch.sizes else None,
        "findings": [
            {
                "code": finding.code,
                "severity": finding.severity,
                "forced": finding.is_forced,
                "can_force": finding.can_force,
                **asdict(finding.problem),
            }
            for finding in findings
        ],
    }


def table() -> str:
    """Return the codes with their meanings."""
    kinds = {
        code: entry.severity if not entry.can_force else f"{entry.severity}, can be forced"
        for code, entry in CODES.items()
    }
    width = max(len(kind) for kind in kinds.values())
    return "\n".join(f"{code}  {kinds[code]:<{width}}  {CODES[code].meaning}" for code in CODES)


if __name__ == "__main__":
    sys.exit(main())
