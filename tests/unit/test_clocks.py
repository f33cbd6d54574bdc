"""A deadline is counted on a clock that nobody sets: the time of day is read only where it is shown or sent."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# File -> calls that read the time of day, and what each file does with it.
SHOWN = {
    "recipes/environments/agents/by_url/session.py": 2,  # `created` of an answer
    "recipes/environments/chat/template.py": 1,  # the date in a prompt
    "recipes/grpo/log.py": 2,  # of a record
    "recipes/heartbeat.py": 2,  # of status.json
    "recipes/retry.py": 1,  # against a Retry-After that is a date
    "recipes/stop.py": 1,  # once, against the end of a Slurm job, which is a time of day; then it is counted
    "tools/bench/bring_up_cost.py": 2,  # what Slurm would give
    "tools/draft/run_dir.py": 1,  # since when a run is held
    "tools/draft/slurm.py": 1,  # when Slurm was asked
    "tools/job/barrier.py": 3,  # seconds since the start of the job, in its log
    "tools/look/run_state.py": 1,  # how old status.json is
}
CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}


def reads_clock(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    of = node.func.value
    name = of.id if isinstance(of, ast.Name) else getattr(of, "attr", "")
    return (name, node.func.attr) in CLOCKS


def test_no_deadline_is_counted_on_a_clock_that_may_be_set() -> None:
    files = [path for top in ("recipes", "tools", "containers") for path in (ROOT / top).rglob("*.py")]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    found = Counter(name for name, tree in trees.items() for node in ast.walk(tree) if reads_clock(node))
    assert found == SHOWN, "count a deadline with time.monotonic(), or add what the time of day is shown for"
