"""The hidden tests of tiny repositories in real containers: right, wrong and hostile patches, and what agents can find.

The containers are bubblewrap's. The images are those that the tiny scale makes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest
from small_root import require

from recipes.environments.swe.containers.check import check_runtime
from recipes.environments.swe.containers.runtime import BwrapRuntime
from recipes.environments.swe.contract import Container, ContainerLimits, Evaluation, SweTask
from recipes.environments.swe.evaluation import TestRun, evaluate_gold, prepare
from recipes.environments.swe.task import images_of, parse_task
from tools.environments.check.checks import Status
from tools.environments.check.repositories import (
    PASSING,
    REPOSITORY,
    TEST,
    WRONG,
    changed,
    check_repositories,
    module,
    new_file,
)
from tools.tiny.repositories import metadata_of
from tools.tiny.task_images import give_away, make_images

pytestmark = pytest.mark.functional

LIMITS = ContainerLimits(memory_mib=128)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> SweTask:
    require("bwrap", "git")
    place = tmp_path_factory.mktemp("images")
    make_images(place, [REPOSITORY])
    row = {"responses_create_params": {"input": [], "metadata": metadata_of(REPOSITORY)}}
    return images_of(f"{place}/{{instance_id}}").with_image(parse_task(row))


def run(task: SweTask, patch: str, *, seconds: float = 60.0, runtime: Any = None) -> Evaluation:
    evaluate = TestRun(runtime=runtime or BwrapRuntime(), limits=LIMITS, seconds=seconds)
    return asyncio.run(evaluate(task, patch))  # type: ignore[arg-type]


def test_the_solution_passes_and_nothing_else_does(task):
    evaluate = TestRun(runtime=BwrapRuntime(), limits=LIMITS, seconds=60)
    gold = asyncio.run(evaluate_gold(evaluate, task))
    assert gold.resolved and gold.reason == "all 2 tests did what they do in a solved instance"
    assert gold.peak_memory_mib > 0
    assert run(task, task.gold_patch.replace("\n", "\r\n")).resolved is False
    wrong = run(task, module("def f(a, b):\n    return a + b\n"))
    assert (wrong.resolved, wrong.failed) == (False, "") and "test_result" in wrong.reason
    broken = run(task, module("def f(a, b:\n"))
    assert not broken.resolved and not broken.failed


def test_the_check_of_a_launch_can_use_these_images(task):
    asyncio.run(check_runtime(BwrapRuntime(), task.image))  # which hold few programs


def test_an_empty_patch_starts_nothing(task):
    found = run(replace(task, image="/no/such/image"), " \n")
    assert found == Evaluation(resolved=False, reason="the patch is empty")


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("garbage", "the patch does not apply"),
        (new_file("../outside.py", "x = 1\n"), "the patch does not apply"),
        (new_file(".git/hooks/post-checkout", "exit 1\n"), "the patch changes git's own files"),
        (
            "diff --git a/x.bin b/x.bin\nnew file mode 100644\nindex 0000000..1111111\n"
            "Binary files /dev/null and b/x.bin differ\n",
            "the patch changes a binary file without its content",
        ),
    ],
    ids=["garbage", "outside", "git", "binary"],
)
def test_a_patch_that_does_not_apply_is_unresolved(task, patch, reason):
    found = run(task, patch)
    assert (found.resolved, found.failed) == (False, "")
    assert found.reason.startswith(reason)


def test_what_a_patch_does_to_tests_is_taken_back(task):
    before = REPOSITORY.files("-")[TEST]
    assert not run(task, changed(TEST, before, PASSING)).resolved
    link = "diff --git a/tests/__init__.py b/tests/__init__.py\ndeleted file mode 100644\nindex e69de29..0000000\n"
    link += f"diff --git a/{TEST} b/{TEST}\ndeleted file mode 100644\n--- a/{TEST}\n+++ /dev/null\n"
    link += f"@@ -1,{len(before.splitlines())} +0,0 @@\n" + "".join(f"-{line}\n" for line in before.splitlines())
    link += "diff --git a/tests b/tests\nnew file mode 120000\n--- /dev/null\n+++ b/tests\n"
    link += "@@ -0,0 +1 @@\n+mine\n\\ No newline at end of file\n"
    assert not run(task, link + new_file("mine/test_module.py", PASSING)).resolved
    assert run(task, task.gold_patch + changed(TEST, before, PASSING)).resolved  # the right solution still counts


def test_no_dishonest_work_is_rewarded():
    results = asyncio.run(check_repositories())
    others = [result for result in results if result.status is not Status.PASS]
    assert [(result.status, result.check.partition(":")[2]) for result in others] == [
        (Status.KNOWN, " bash -c 'python -m unittest tests.test_module'")  # a command that is left whole
    ]
    assert not [result for result in results if result.why.startswith("no verdict") and "patch" in result.check]
    assert len(results) > 20


def test_tests_that_hang_or_take_all_memory_are_told_apart(task):
    late = run(task, module("while True:\n    pass\n"), seconds=3)
    assert (late.resolved, late.is_late, late.failed) == (False, True, "")
    full = run(task, module("x = bytearray(b'x') * 2**29\nimport time\ntime.sleep(30)\n"))
    assert (full.resolved, full.out_of_memory, full.failed) == (False, True, "")


def test_a_flood_of_output_hides_no_result(task):
    flood = "import os\n\nfor _ in range(64):\n    os.write(1, b'FAILED\\n' * 2**17)\n\n\n"
    assert run(task, module(f"{flood}def f(a, b):\n    return a * b\n")).resolved
    assert not run(task, module(f"{flood}{WRONG.strip()}\n")).resolved


def test_a_patch_that_fills_the_disk_fails_the_tests(task):
    limits = replace(LIMITS, disk_mib=8)
    large = task.gold_patch + new_file("large.txt", "x\n" * 2**22)
    found = asyncio.run(TestRun(runtime=BwrapRuntime(), limits=limits, seconds=60)(task, large))
    assert (found.resolved, found.failed) == (False, ""), found


@dataclass(frozen=True)
class Killing:
    """Bubblewrap, whose containers are killed from outside once they run."""

    runtime: BwrapRuntime

    async def start(self, image: str, limits: ContainerLimits) -> Container:
        container = await self.runtime.start(image, limits)
        os.kill(container.init, signal.SIGKILL)
        return container


def test_what_fails_by_itself_gives_no_verdict(task):
    assert run(task, task.gold_patch, runtime=Killing(BwrapRuntime())).failed
    assert "cannot be read" in run(replace(task, image="/no/such/image"), task.gold_patch).failed
    assert "does not hold the base commit" in run(replace(task, base_commit="0" * 40), task.gold_patch).failed
    misfit = run(replace(task, test_patch=changed("nowhere.py", "x\n", "y\n")), task.gold_patch)
    assert "the test patch does not fit the image" in misfit.failed


def in_agents_container(task: SweTask, use: Callable[[Container], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        container = await BwrapRuntime().start(task.image, LIMITS)
        try:
            await prepare(container, task)
            return await use(container)
        finally:
            await container.close()

    return asyncio.run(main())


PROBES = """cd /testbed
git log --all --reflog --format=%s
git stash list
git remote
git worktree list | wc -l
git fsck --full --lost-found --unreachable
ls .git .git/refs/heads
cat .git/packed-refs
for id in {commits}; do git cat-file -t $id 2>&1; done
git cat-file --batch-all-objects --batch
grep -rlE 'return a [*] b|FunctionTes[t]|test_resul[t]' /testbed /tmp /root /etc /var /run /dev/shm
env
cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -E 'return a [*] b|test_resul[t]'
echo end"""


def test_the_fix_and_the_hidden_tests_are_out_of_an_agents_reach(task):
    commits = " ".join(REPOSITORY.history.commits)

    async def probe(container: Container) -> str:
        shell = await container.open_shell()
        return (await shell.run(PROBES.format(commits=commits), seconds=60, max_characters=100_000)).output

    said = in_agents_container(task, probe)
    assert said.endswith("end\n") and said.startswith("Begin\n1\n")
    assert "commit\nfatal: " in said  # the base commit is there, the fix is not
    for secret in ("return a * b", "FunctionTest", "test_result", "future", "Fix TomRome"):
        assert secret not in said, secret


def test_hidden_tests_of_the_image_are_gone_for_agents_and_there_for_the_verdict(task, tmp_path):
    place = tmp_path / "images"
    make_images(place, [REPOSITORY])
    root = place / REPOSITORY.id
    summary = 'echo "=== short test summary info ==="\npython -c "import r2e_tests.check" 2>&1'
    for name, text in (
        ("testbed/r2e_tests/check.py", "import TomRome\n\nword = 'PASSED' if TomRome.f(7, 3) == 21 else 'FAILED'\n"),
        ("run_tests.sh", f"{summary}\n"),
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    with (root / "testbed/r2e_tests/check.py").open("a", encoding="utf-8") as file:
        file.write("print(word, 'r2e_tests/test_1.py::T::test_a')\n")
    give_away(root)
    facts = {
        **task.facts,
        "dataset_name": "R2E-Gym",
        "log_parser": None,
        "expected_output_json": {"T.test_a": "PASSED"},
    }
    r2e = replace(task, image=str(root), facts=facts, test_patch="")

    async def look(container: Container) -> str:
        shell = await container.open_shell()
        return (await shell.run("ls /testbed / | grep -E 'r2e|run_tests'", seconds=60, max_characters=1000)).output

    assert in_agents_container(r2e, look) == ""
    assert run(r2e, r2e.gold_patch).resolved
    assert not run(r2e, module("def f(a, b):\n    return a + b\n")).resolved
    passes = new_file("run_tests.sh", summary.split("\n")[0] + "\necho PASSED x::T::test_a\n")
    assert not run(r2e, passes).resolved
