"""`python -m tools.look.report --run-dir results/NAME`: write report.html and rollouts.html beside its metrics."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipes.files import write_atomically
from tools.command_line import exit_status
from tools.look.report.load import load_run
from tools.look.report.page import render
from tools.look.report.trajectory import browser


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Write the page and print its path; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.look.report", description="One HTML page about a run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run: results/<EXP_NAME>")
    parser.add_argument("--out", type=Path, help="file to write (default: report.html in the run directory)")
    parser.add_argument("--min-gain", type=float, help="smallest held-out gain that counts as learned, e.g. 0.25")
    arguments = parser.parse_args(argv)
    run = load_run(arguments.run_dir)
    page = render(run, min_gain=arguments.min_gain)
    out = arguments.out or arguments.run_dir / "report.html"
    # Half a surrogate pair in model output has no UTF-8 form; the page already shows its code.
    write_atomically(out, page.encode(errors="replace"))
    rollouts = out.with_name("rollouts.html")
    write_atomically(rollouts, browser(run).encode())
    print(f"{out}\n{rollouts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
