"""What the profiles of jails have in common and where they differ, and that the sandbox image has what it imports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from recipes import confinement
from recipes.confinement import jails
from tools.images.table import IMAGES

ROOT = Path(__file__).resolve().parents[3]
SANDBOX = ROOT / "containers/sandbox"
HERE = Path("/some/where")
PROFILES = {
    "program": jails.program(disk_bytes=4096, filter_descriptor=9, shown=("--ro-bind-data", "8", "/main")),
    "scorer": jails.scorer([HERE / "python"]),
    "task": jails.task(root=HERE / "root", shared_memory=HERE / "shm", shells=HERE / "pipes", filter_descriptor=9),
    "checked_image": jails.checked_image(root=HERE / "root", inputs=HERE / "inputs", network=False),
    "repository": jails.repository(HERE / "git"),
}
SHOWING = ("--bind", "--ro-bind", "--ro-bind-try", "--dev-bind")
WRITABLE = {
    "program": {"/dev/shm", "/tmp"},
    "scorer": {"/tmp"},
    "task": {"/", "/dev/shm"},
    "checked_image": {"/"},
    "repository": {"/tmp", "/repository"},
}


def after(words: list[str], option: str, count: int) -> list[list[str]]:
    return [words[i + 1 : i + 1 + count] for i, word in enumerate(words) if word == option]


@pytest.mark.parametrize(("name", "words"), PROFILES.items())
def test_a_profile_takes_network_processes_rights_and_terminal(name, words):
    assert words[0] == "bwrap" and words[-1] == "--"
    assert {"--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"} <= set(words)
    assert after(words, "--cap-drop", 1) == [["ALL"]]
    assert not {"--share-net", "--cap-add", "--dev-bind"} & set(words)
    assert after(words, "--proc", 1) == [["/proc"]] and after(words, "--dev", 1) == [["/dev"]]


@pytest.mark.parametrize(("name", "words"), PROFILES.items())
def test_a_profile_shows_no_more_than_it_says(name, words):
    shown = {pair[0] for option in SHOWING for pair in after(words, option, 2)}
    assert not {path for path in shown if path.startswith(("/home", "/root", "/etc/passwd", "/proc", "/dev"))}
    assert "/" not in shown and "/etc" not in shown
    writable = {pair[1] for pair in after(words, "--bind", 2)} | {pair[0] for pair in after(words, "--tmpfs", 1)}
    assert writable == WRITABLE[name]


def test_only_a_checked_image_can_have_the_network():
    words = jails.checked_image(root=HERE, inputs=HERE, network=True)
    assert words.index("--unshare-all") < words.index("--share-net")


def test_programs_and_tasks_are_under_the_filter_and_in_bounded_memory():
    for name in ("program", "task"):
        assert after(PROFILES[name], "--seccomp", 1) == [["9"]] and "--as-pid-1" in PROFILES[name]
    words = PROFILES["program"]
    assert [words[i - 2 : i] for i, word in enumerate(words) if word == "--tmpfs"] == [["--size", "4096"]] * 2
    for name in ("program", "scorer"):  # what bubblewrap makes itself has no limit
        assert after(PROFILES[name], "--remount-ro", 1) == [["/dev"], ["/"]]


def test_an_agents_program_has_processes_of_its_own_where_bubblewrap_is(monkeypatch):
    monkeypatch.setattr(jails.shutil, "which", lambda name: f"/bin/{name}")
    assert "--unshare-pid" in jails.agent() and jails.agent()[-1] == "--"
    monkeypatch.setattr(jails.shutil, "which", lambda name: None)
    assert jails.agent() == []


@pytest.mark.parametrize(
    ("user", "ranges", "expected"),
    [
        (1000, "0 0 4294967295", 1000),
        (0, "0 0 4294967295", jails.NOBODY),
        (0, "0 1000 1", 0),  # an unprivileged container
        (0, "0 1000 1\n1 100000 65536", jails.NOBODY),
        (0, "0 1000 1\n1 100000 65533", 0),
    ],
)
def test_root_becomes_nobody_where_there_is_that_user(monkeypatch, user, ranges, expected):
    monkeypatch.setattr(jails.os, "geteuid", lambda: user)
    monkeypatch.setattr(jails.Path, "read_text", lambda *_, **__: ranges)
    assert jails.confined_user() == expected
    assert jails.nobody_words()[:2] == ([] if expected == user else ["setpriv", "--reuid=65534"])


def test_every_profile_is_in_the_table():
    names = [f"jails.{name}" for name in (*PROFILES, "agent")] + ["filters.jail", "filters.scorer"]
    assert re.findall(r"^    ((?:jails|filters)\.\w+)", confinement.__doc__ or "", re.MULTILINE) == names


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, of `from package import module` both."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_sandbox_image_has_all_that_its_server_imports():
    image = IMAGES["sandbox"]
    text = (ROOT / image.dockerfile).read_text(encoding="utf-8").replace("\\\n", " ")
    copied = {word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[1:-1]}
    assert {path for path in copied if not (ROOT / path).is_file()} == set()
    assert all(any(Path(path).is_relative_to(given) for given in image.inputs) for path in copied), "inputs of its lock"
    modules = [ROOT / path for path in copied if path.endswith(".py")]
    here = {path.stem for path in modules if path.parent == SANDBOX}
    room = {f"recipes.confinement.{path.stem}" for path in modules if path.parent.name == "confinement"}
    for path in modules:
        ours = {name for name in imports(path) if name.split(".")[0] not in sys.stdlib_module_names}
        ours = {name for name in ours if name.split(".")[0] not in here}
        ours = {name for name in ours if not name.startswith(tuple(f"{module}." for module in room))}
        assert ours <= {"recipes.confinement", *room}, path
    assert {path.stem for path in SANDBOX.glob("*.py")} == here
