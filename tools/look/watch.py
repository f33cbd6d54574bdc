"""Follow a run until it ends: a live view in a terminal, one line per change elsewhere.

Exit status: 0 the run ended well, 1 it failed or died, 2 there is no such run; 130 on Ctrl-C, which leaves it running.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live

from tools.command_line import INTERRUPTED, exit_status
from tools.draft.slurm import Queue
from tools.look.run_state import ObservedRun, RunStatus, ask_slurm, find_run, read_run
from tools.look.status import headline, parse, plain, render, waits

REFRESH_SECONDS = 1.0
QUEUE_SECONDS = 30.0  # between two questions to Slurm's controller, which others need too


def follow(
    read: Callable[[Queue], ObservedRun],
    ask: Callable[[], Queue],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[ObservedRun]:
    """Yield the state every second until the run is over, the last one included."""
    queue, asked = ask(), clock()
    while True:
        state = read(queue)
        yield state
        if state.status.is_over:
            return
        sleep(REFRESH_SECONDS)
        if clock() - asked >= QUEUE_SECONDS:
            queue, asked = ask(), clock()


def changes(states: Iterator[ObservedRun]) -> Iterator[tuple[ObservedRun, str]]:
    """Yield what to print where nothing can be redrawn: a line when step or state changed, and the whole end."""
    seen: tuple[int, RunStatus, int | None] | None = None
    for state in states:
        key = (state.step, state.status, state.saved_step)
        if state.status.is_over:
            yield state, plain(state)
        elif key != seen:
            saved = f"saved step {state.saved_step}" if state.saved_step is not None else "nothing saved"
            yield state, "  ".join([headline(state), saved, *(waits(state) or [state.why])]).rstrip()
        seen = key


def _redraw(console: Console, states: Iterator[ObservedRun]) -> ObservedRun:
    state = next(states)
    with Live(render(state), console=console, auto_refresh=False) as live:
        for state in states:
            live.update(render(state), refresh=True)
    return state


def _print(states: Iterator[ObservedRun]) -> ObservedRun:
    for last, text in changes(states):  # noqa: B007 (the last state is the result)
        print(text, flush=True)
    return last


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Follow one run."""
    args = parse(argv)
    run_dir = find_run(args.results, args.exp_name)
    console = Console()
    states = follow(lambda queue: read_run(run_dir, queue), lambda: ask_slurm(run_dir))
    try:
        last = _redraw(console, states) if console.is_terminal else _print(states)
    except KeyboardInterrupt:  # as meant: the run goes on
        return INTERRUPTED
    return last.status.exit_code


if __name__ == "__main__":
    sys.exit(main())
