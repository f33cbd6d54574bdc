"""The errors that users cause or meet, the form of their messages, and the limits that the system meets them with.

`RecipeError` is the base; `exit_code` is what the entrypoints return: 2 for a wrong input, 1 for a failed run, 69 for
one that failed on some of its nodes before it began.
To add an error, inherit from the category it belongs to.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One wrong input, as one line a user can act on. It has one of two forms.

    A value that is wrong:               `where: got X, expected Y; fix`
    What is missing or cannot be done:   `where: wrong; fix`
    """

    where: str  # file:line, file: key, environment variable, ...
    fix: str  # what to do, as an instruction
    got: str = ""  # the value as the user wrote it
    expected: str = ""  # the values that are accepted; words such as "it" or "none" say nothing: use `wrong`
    wrong: str = ""  # what is missing or impossible, as a sentence without a full stop

    def __post_init__(self) -> None:
        if bool(self.wrong) == bool(self.got and self.expected):
            raise ValueError(f"a problem has either `got` and `expected` or `wrong`: {self!r}")

    @property
    def what(self) -> str:
        """What is wrong, without where and without what to do about it."""
        return self.wrong or f"got {self.got}, expected {self.expected}"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like `name`, None when none is; `cutoff` in [0, 1], 1 = equal."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean X?", or the known names when none is close."""
    names = sorted(known)
    close = nearest(name, names)
    return f"did you mean '{close}'?" if close else f"choose from: {', '.join(names)}"


_RESOURCES = {  # of an OSError: what it means where its own words do not say it, and what to do
    errno.ENOSPC: ("", "make room there, or name another place"),
    errno.EDQUOT: ("", "make room there, or name another place"),
    errno.EFBIG: ("", "raise the limit of file sizes (ulimit -f), or name another place"),
    errno.EROFS: ("it is mounted for reading only", "name another place"),
    errno.EACCES: ("this user may not do that there", "ask for the right, or name another place"),
    errno.EPERM: ("this user may not do that there", "ask for the right, or name another place"),
    errno.EMFILE: ("this process has too many open files", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("this machine has too many open files", "close some, or raise fs.file-max"),
    errno.ENOMEM: ("", "free some memory of this machine, or of the job's limit"),
    errno.EAGAIN: ("no more processes may be started", "raise the limit of processes (ulimit -u)"),
}


def resource_problem(error: OSError, where: str) -> Problem:
    """Return what the system refused, at `where` if the error names no file, and what to do about it."""
    place = str(error.filename or where)
    otherwise = "correct the path, or what is wrong there, and run it again" if error.filename else "run it again"
    why, fix = _RESOURCES.get(error.errno or 0, ("", otherwise))
    said = error.strerror or f"{type(error).__name__} {error}"
    return Problem(where=place, wrong=f"{said}: {why}" if why else said, fix=fix)


CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MACHINE = Path("/proc/vmstat")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def control_groups(controller: str) -> list[Path]:
    """Return the directories of the control groups with this controller that this process is in, the inmost first."""
    found: list[Path] = []
    with suppress(OSError):
        for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = CONTROL_GROUPS / controller if controllers else CONTROL_GROUPS  # version 1, else 2
            inmost = root / (path.strip("/") if ".." not in path else "")  # of a container that sees only its own
            found += [group for group in (inmost, *inmost.parents) if group.is_relative_to(root) and group.is_dir()]
    return found


def group_limit(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files of a control group that has one; version 1 writes a huge one."""
    for name in names:
        with suppress(OSError, ValueError):
            number = int((group / name).read_text(encoding="utf-8"))
            return number if number < 1 << 60 else None
    return None


def memory_kills() -> dict[Path, int]:
    """Return how many processes the kernel has ended for want of memory: of each group around this one, of all."""
    groups = control_groups("memory")
    kills: dict[Path, int] = {}
    for file in (*(group / name for group in groups for name in ("memory.events", "memory.oom_control")), MACHINE):
        with suppress(OSError):
            if counted := _KILLS.search(file.read_text(encoding="utf-8")):
                kills[file] = int(counted[1])
    return kills


def memory_cause(before: Mapping[Path, int]) -> str:
    """Say so when the kernel has ended processes for want of memory since `memory_kills` was called, else nothing."""
    for file, count in memory_kills().items():
        more = count - before.get(file, 0)
        if more <= 0:
            continue
        limit = group_limit(file.parent, "memory.max", "memory.limit_in_bytes")
        whose = "this machine" if file == MACHINE else "this job"
        size = f" ({limit / 2**30:.1f} GiB, {file.parent})" if limit else ""
        return (
            f"the kernel ended {more} process{'es' if more > 1 else ''}: the memory of {whose} is full{size}; "
            "ask for more (--mem of the job, --memory of the container), or see what a run needs with `make plan`"
        )
    return ""


class RecipeError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code = 1


class InputError(RecipeError, ValueError):
    """One or more wrong inputs, all found before anything was started."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[list[Problem]]]:
        """Pickle the problems themselves, so that another process gets more than their text."""
        return type(self), (self.problems,)


class ConfigError(InputError):
    """A configuration file, an override or a combination of keys is wrong."""


class DataError(InputError):
    """A data file or one of its rows is wrong."""


class CheckpointError(InputError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class LaunchError(InputError):
    """An environment variable, path or resource of a launch is wrong."""


class RunError(RecipeError, RuntimeError):
    """The run failed after it had started."""


class BringUpError(RunError):
    """Parts of the run did not start on some of its nodes, and did on others; the message's last line names these."""

    exit_code = 69  # so that the job starts again without these nodes: tools/job/requeue.sh


class EngineError(RunError):
    """A generation engine died or did not answer in time; the message names it."""


class RequestError(RecipeError):
    """One generation request failed or was late. It fails its rollout only, with the message as the reason."""


class PolicyError(RunError):
    """A policy worker died or did not answer in time; the message names it."""


class TokensLostError(RunError):
    """The tokens of finished groups lay on a node that is gone, so that these groups must be sampled again."""


class StalledError(RunError):
    """Nothing progressed within its deadline; the message names what was waited for."""
