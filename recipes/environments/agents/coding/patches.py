"""What an agent has changed, as a patch against the state in which it found the repository.

The state is kept in a git directory of our own, outside the repository. So the configuration, the hooks, the filters
and the attributes that the agent may leave in the repository's own one do not run, and what the image itself had
changed or left untracked is no part of the patch. Ignored files are left out, as `git add` leaves them out.

A patch is text in UTF-8. Where a changed file has bytes of another kind, all files are written as git's binary patches.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import dataclass

from recipes.environments.swe.contract import Container

SECONDS = 300.0  # a large repository is read whole
MAX_PATCH = 8 << 20  # bytes
MAX_SHOWN = 300  # characters of an output in a reason
# Git reads no configuration but that of the directory of our own, and asks nobody.
SETTING = """
export LC_ALL=C HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
export GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 GIT_NO_REPLACE_OBJECTS=1
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_CONFIG_PARAMETERS GIT_EXTERNAL_DIFF
"""
BEGIN = """(
set -eu
{setting}
cd -- {workspace}
head=$(GIT_DIR=$PWD/.git git rev-parse --verify 'HEAD^{{tree}}')
git init -q --bare --template= {own}
mkdir -p {own}/objects/info {own}/info
printf '%s\\n' "$PWD/.git/objects" >{own}/objects/info/alternates
export GIT_DIR={own} GIT_WORK_TREE={workspace}
git config core.bare false
git read-tree "$head"
git add -A --ignore-errors . 2>/dev/null || true
git write-tree >{own}/begun
)"""
END = """(
set -eu
{setting}
cd -- {workspace}
export GIT_DIR={own} GIT_WORK_TREE={workspace}
rm -f {own}/index.lock {own}/info/attributes
git add -A --ignore-errors . 2>/dev/null || true
{attributes}
git diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames \\
  --src-prefix=a/ --dst-prefix=b/ {tree} | head -c {limit} >{own}/patch
[ "${{PIPESTATUS[0]}}" -eq 0 ] || [ "$(wc -c <{own}/patch)" -eq {limit} ]
)"""
ALL_BINARY = "printf '* binary\\n' >{own}/info/attributes"


class NoPatchError(Exception):
    """What the agent left is no patch: the reason says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The state of a repository before the agent began."""

    workspace: str
    own: str  # our git directory
    tree: str  # id of the state


async def begin(container: Container, workspace: str) -> Beginning:
    """Keep the state of a repository; raises `NoPatchError` where there is none, and `ContainerEndedError`."""
    own = f"/tmp/.{secrets.token_hex(8)}"
    script = BEGIN.format(setting=SETTING, workspace=shlex.quote(workspace), own=own)
    await _run(container, script)
    tree = (await _read(container, f"{own}/begun", 100)).decode("ascii", "replace").strip()
    return Beginning(workspace=workspace, own=own, tree=tree)


async def read_patch(container: Container, beginning: Beginning) -> str:
    """Return what has changed since then, "" for nothing; raises `NoPatchError` and `ContainerEndedError`."""
    for attributes in ("", ALL_BINARY.format(own=beginning.own)):
        script = END.format(
            setting=SETTING,
            workspace=shlex.quote(beginning.workspace),
            own=beginning.own,
            attributes=attributes,
            tree=beginning.tree,
            limit=MAX_PATCH + 1,
        )
        await _run(container, script)
        patch = await _read(container, f"{beginning.own}/patch", MAX_PATCH + 1)
        if len(patch) > MAX_PATCH:
            raise NoPatchError(f"the patch has more than {MAX_PATCH} bytes")
        try:
            return patch.decode("utf-8")
        except UnicodeDecodeError:
            continue
    raise NoPatchError("the patch is not text")


async def _run(container: Container, script: str) -> None:
    shell = await container.open_shell()
    done = await shell.run(script, seconds=SECONDS, max_characters=MAX_SHOWN)
    if done.status is None:
        raise NoPatchError(f"git did not read the repository within {SECONDS:g} s")
    if done.status != 0:
        raise NoPatchError(f"git could not read the repository: {done.output.strip() or f'status {done.status}'}")


async def _read(container: Container, path: str, max_bytes: int) -> bytes:
    try:
        return await container.read_file(path, max_bytes=max_bytes)
    except FileNotFoundError:
        raise NoPatchError("what git said of the repository is gone") from None
