"""A patch in the container of the tests: what it does to tests is taken back, however it writes their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.environments.swe.contract import ContainerLimits, SweTask
from recipes.environments.swe.evaluation import _apply
from tests.directory_container import DirectoryRuntime
from tests.unit.environments.agents.test_patches import git

BASE = {"calc.py": "x = 1\n", "conftest.py": "base\n", "tests/__init__.py": "", "tests/data.txt": "base\n"}
LINE = "@@ -0,0 +1 @@\n+mine\n"
CHANGED = "--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
MOVED = "@@ -1,2 +1,2 @@\n-x = 1\n+x = 2\n nothing of the kind\n"  # git refuses it; `patch` does not mind


def added(name: str) -> str:
    """Return git's patch that adds a file, whose name is in quotes with git's escapes."""
    return f'diff --git "a/{name}" "b/{name}"\nnew file mode 100644\n--- /dev/null\n+++ "b/{name}"\n{LINE}'


def removed(name: str, line: str = "base") -> str:
    head = f"diff --git a/{name} b/{name}\ndeleted file mode 100644\n--- a/{name}\n+++ /dev/null\n"
    return f"{head}@@ -1 +0,0 @@\n-{line}\n"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    place = tmp_path / "image"
    for name, text in BASE.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "base")
    (place / "left.pyc").write_text("untracked\n", encoding="utf-8")
    return place


async def apply(image: Path, patch: str) -> tuple[str, dict[str, str]]:
    """Return why the patch was refused, and the files of the workspace after it."""
    runtime = DirectoryRuntime(image.parent)
    base = git(image, "rev-parse", "HEAD").strip()
    names = {"id": "a__b-1", "dataset": "tiny", "repository": "a/b", "problem": "x", "gold_patch": "", "test_patch": ""}
    tests = {"fail_to_pass": (), "pass_to_pass": ()}
    facts = {"instance_id": "a__b-1", "dataset_name": "tiny", "FAIL_TO_PASS": ["x"]}
    task = SweTask(**names, **tests, base_commit=base, image=str(image), workspace=runtime.workspace, facts=facts)
    container = await runtime.start(str(image), ContainerLimits(memory_mib=256))
    try:
        shell = await container.open_shell()
        place = image.parent / "place"
        place.mkdir()
        await shell.run(f"cd {runtime.workspace}", seconds=30, max_characters=1000)
        wrong = await _apply(container, shell, task, patch, str(place))
        work = Path(runtime.workspace)
        files = [path for path in work.rglob("*") if path.is_file() and ".git" not in path.relative_to(work).parts]
        return wrong, {str(path.relative_to(work)): path.read_text(encoding="utf-8") for path in files}
    finally:
        await container.close()


UNCHANGED = {**BASE, "left.pyc": "untracked\n"}


@pytest.mark.parametrize(
    "patch",
    [
        added(r"conft\145st.py"),
        added(r"tests/a\nb/test_c.py"),
        added(r"a\nb/conftest.py"),
        "--- x/conftest.py\n+++ x/conftest.py\n@@ -1 +1 @@\n-base\n+mine\n",
        f"--- x/tests/__init__.py\n+++ x/tests/__init__.py\n{LINE}",
        removed("conftest.py"),
        removed("tests/data.txt"),
        "diff --git a/conftest.py b/other.py\nsimilarity index 100%\nrename from conftest.py\nrename to other.py\n",
    ],
    ids=["quoted", "newline", "in a directory", "not git's", "new, not git's", "removed", "removed data", "renamed"],
)
async def test_what_a_patch_does_to_tests_is_taken_back(image: Path, patch: str) -> None:
    patch = patch if "conft\\" not in patch else removed("conftest.py") + patch
    wrong, files = await apply(image, CHANGED + patch)
    files.pop("other.py", None)
    assert (wrong, files) == ("", {**UNCHANGED, "calc.py": "x = 2\n"})


async def test_other_files_stay_with_any_name(image: Path) -> None:
    wrong, files = await apply(image, added(r"a\nb.py") + removed("calc.py", "x = 1"))
    expected = {**UNCHANGED, "a\nb.py": "mine\n"}
    del expected["calc.py"]
    assert (wrong, files) == ("", expected)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (".git/info/attributes", "the patch changes git's own files"),
        (".venv/lib/x.pth", "the patch changes installed packages"),
    ],
)
async def test_what_another_program_than_git_wrote_is_seen(image: Path, name: str, reason: str) -> None:
    patch = f"--- x/calc.py\n+++ x/calc.py\n{MOVED}--- x/{name}\n+++ x/{name}\n{LINE}"
    assert (await apply(image, patch))[0] == reason
