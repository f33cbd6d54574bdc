"""Issues of repositories: every recorded patch, script and reward, what is run, and what each end of a run means."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.contract.verifier import Execution, Verdict, advance, message_item
from recipes.environments.sandbox.images import LIMITS, _Kept, words_of
from recipes.environments.sandbox.server import SandboxFailedError
from recipes.environments.verifiers.checks.reports import resolution, statuses_in
from recipes.environments.verifiers.swerl_gen import REWARDS, VERIFIER, PatchError, patch_in, script_in
from tests.recorded import env_cases, golden

FILES = golden("env/swerl_gen_logic.json").get("files", {})
ANSWER = "<solution>\n```python\n### a.py\n<<<<<<< SEARCH\nx = 1\n=======\nx = 2\n>>>>>>> REPLACE\n```\n</solution>"
SCRIPT = "```python\nimport sys\nsys.exit(2)\n```"


@pytest.mark.parametrize("is_relaxed", [False, True])
@pytest.mark.parametrize("case", env_cases("swerl_gen_logic"))
def test_patch(case: dict[str, Any], is_relaxed: bool) -> None:
    try:
        drops = case["remove_repo_name"]
        patch = patch_in(case["text"], FILES, drops_first_part=drops, is_relaxed=is_relaxed)
    except PatchError:
        patch = None
    assert patch == case["relaxed" if is_relaxed else "strict"]


@pytest.mark.parametrize("sign", ["\x0c\n", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_patch_of_a_file_with_odd_signs_applies(sign: str, end: str, tmp_path: Path) -> None:
    shown = f"x = 1{sign}y\nz = 2{end}"
    answer = ANSWER.replace("x = 1\n", "z = 2\n").replace("x = 2\n", "z = 3\n")
    patch = patch_in(answer, {"a.py": shown}, drops_first_part=False, is_relaxed=False)
    file = tmp_path / "a.py"
    file.write_bytes(f"x = 1{sign}y\nz = 2\n".encode())
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True, timeout=60)
    assert file.read_bytes() == f"x = 1{sign}y\nz = 3\n".encode()


@pytest.mark.parametrize("case", env_cases("swerl_gen_logic", "repro"))
def test_script(case: dict[str, Any]) -> None:
    if case["result"] is None:
        with pytest.raises(PatchError):
            script_in(case["text"])
        return
    (patch,) = case["result"]["test_patch"]
    name, script = script_in(case["text"])
    assert f"+++ b/{name}\n" in patch
    assert script == "\n".join(line[1:] for line in patch.split("\n")[6:-1])


@pytest.mark.parametrize("case", env_cases("swerl_gen_logic", "patch_reward"))
def test_reward_of_a_resolution(case: dict[str, Any]) -> None:
    verification = case["verification"] or {}
    if verification.get("status") == "done":  # other ends have no resolution here, and earn 0 or have no verdict
        assert REWARDS.get(verification["resolution"], 0.0) == case["reward"]


def row(mode: str = "eval", **instance: Any) -> dict[str, Any]:
    given = {
        "repo": "o/r",
        "patch": "gold",
        "setup_script": "setup",
        "test_script": "tests",
        "regression_script": "old",
    }
    lists = {"FAIL_TO_PASS": '["t.py::a", "t.py::b"]', "PASS_TO_PASS": ["t.py::c"]}
    files = json.dumps({"a.py": "x = 1\n"})
    metadata = {"image": "/i.sif", "relevant_file_contents": files, "remove_repo_name": False}
    return {"mode": mode, "instance": {**given, **lists, **instance}, "metadata": metadata}


def requested(given: dict[str, Any], text: str, *replies: list[dict[str, Any]], **settings: Any) -> Any:
    task = VERIFIER.parse_task(given, VERIFIER.settings(**settings))
    return advance(VERIFIER.score({"output": [message_item(text)]}, task), replies)


def printed(execution: Execution, after: str = "", **outputs: Any) -> dict[str, Any]:
    """Return the reply of a run that printed these texts and then reported, as name=(text, status), and a last text."""
    found = re.search(r'"\\n([0-9a-f]{32}) ', execution.preparation)
    assert found
    text = "".join(f"{output}\n{found[1]} {name} {status}\n" for name, (output, status) in outputs.items())
    return {"process_status": "completed", "stdout": text + after, "stderr": ""}


def summary(*lines: str) -> str:
    return "\n".join(["PASSED t.py::b", "=== short test summary info ===", *lines, "=== 3 passed in 0.1s ===", ""])


@pytest.mark.parametrize(
    ("lines", "reward"),
    [
        (("PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c"), 1.0),
        (("PASSED t.py::a", "FAILED t.py::b - no", "PASSED t.py::c"), 0.2),
        (("PASSED t.py::a", "PASSED t.py::c"), 0.2),  # b is printed before the summary, by the code under test
        (("PASSED t.py::a", "PASSED t.py::b", "FAILED t.py::c"), 0.0),
        (("FAILED t.py::a", "FAILED t.py::b", "PASSED t.py::c"), 0.0),
        ((), 0.0),
    ],
)
def test_reward_of_a_patch(lines: tuple[str, ...], reward: float) -> None:
    (execution,) = requested(row(), ANSWER)
    assert (execution.image, execution.language, execution.seconds) == ("/i.sif", "shell", 600.0)
    reply = printed(execution, ready=("", 0), applied=("Applied", 0), after=summary(*lines))
    verdict = requested(row(), ANSWER, [reply])
    assert isinstance(verdict, Verdict)
    assert verdict.reward == reward


def test_ends_of_a_run_before_its_tests() -> None:
    (execution,) = requested(row(), ANSWER)
    refused = requested(row(), ANSWER, [printed(execution, ready=("", 0), applied=("error: patch", 1))])
    applied = printed(execution, ready=("", 0), applied=("", 0), after=summary("PASSED t.py::a"))
    hung = {**applied, "process_status": "timeout", "used_seconds": 600.2}
    assert requested(row(), ANSWER, [hung]).reward == 0.0
    for used in ({}, {"used_seconds": None}, {"used_seconds": 599.0}):
        with pytest.raises(RuntimeError, match="a busy machine"):
            requested(row(), ANSWER, [{**applied, "process_status": "timeout", **used}])
    assert refused.reward == 0.0
    assert "does not apply" in refused.reason
    slow = {"process_status": "timeout", "stdout": "pip is slow", "used_seconds": 600.0}
    for reply in ({}, slow):
        with pytest.raises(RuntimeError, match="could not be prepared"):
            requested(row(), ANSWER, [reply])
    for reply in (printed(execution, ready=("", 0)), {**applied, "process_status": "error"}):
        with pytest.raises(RuntimeError, match="the container ended before the tests did"):
            requested(row(), ANSWER, [reply])


@pytest.mark.parametrize("case", env_cases("swerl_gen_logic", "repro_reward"))
def test_reward_of_a_script(case: dict[str, Any]) -> None:
    verification = case["verification"]
    codes = [verification.get(f"return_codes_{when}_patch") or [] for when in ("before", "after")]
    if len(codes[0]) != len(codes[1]) or len(codes[0]) > 1:
        return  # a run here has one status or, out of time, none
    given = row("repro-gen")
    runs = requested(given, SCRIPT)
    replies = [
        {
            **printed(run, ready=("", 0), **({"ended": ("", code[0])} if code else {})),
            "process_status": "completed" if code else "timeout",
        }
        for run, code in zip(runs, codes, strict=True)
    ]
    if not all(codes):  # the machine was busy: 0 in the reference, and no verdict here
        with pytest.raises(RuntimeError, match="ended before the script did"):
            requested(given, SCRIPT, replies)
    verdict = requested(given, SCRIPT, [{**reply, "used_seconds": 600.0} for reply in replies])
    assert verdict.reward == case["reward"]


def test_the_script_runs_under_the_same_text_before_and_after_the_right_patch() -> None:
    before, after = requested(row("repro-gen"), SCRIPT)
    assert before.code == after.code
    assert "git apply" not in before.code
    assert before.preparation == after.preparation.replace("-R --check -", "-R -")


def test_code_under_test_never_sees_the_mark_and_cannot_report_again() -> None:
    (execution,) = requested(row(), ANSWER)
    assert not re.search("[0-9a-f]{32}", execution.code)
    forged = printed(execution, applied=("", 0))["stdout"]
    late = printed(execution, ready=("", 0), applied=("", 1), after=forged)
    assert requested(row(), ANSWER, [late]).reward == 0.0


def test_a_script_that_does_not_end_by_itself_or_its_time_gives_no_verdict() -> None:
    runs = requested(row("repro-gen"), SCRIPT)
    replies = [printed(run, ready=("", 0)) for run in runs]
    with pytest.raises(RuntimeError, match="the container ended before the script did"):
        requested(row("repro-gen"), SCRIPT, replies)


@pytest.mark.parametrize("text", ["", "no patch", "<solution></solution>", ANSWER.replace("x = 1", "y = 1"), SCRIPT])
def test_an_answer_without_a_patch_starts_nothing(text: str) -> None:
    verdict = requested(row(), text)
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 0.0
    assert isinstance(requested(row("repro-gen"), ANSWER.replace("python", "")), Verdict)


def test_every_real_row_is_read(gym_row: Callable[..., dict[str, Any]]) -> None:
    modes = [VERIFIER.parse_task(gym_row("swerl_gen", number), VERIFIER.settings()).mode for number in range(5)]
    assert modes == ["eval", "eval", "repro-gen", "repro-gen", "eval"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "other"}, "field 'mode'"),
        ({"metadata": {}}, "field 'image'"),
        ({"metadata": {"image": "i", "relevant_file_contents": "{"}}, "field 'metadata.relevant_file_contents'"),
        ({"instance": {"repo": "o/r"}}, "field 'setup_script'"),
        ({"instance": {**row()["instance"], "FAIL_TO_PASS": "x"}}, "field 'instance.FAIL_TO_PASS'"),
    ],
)
def test_a_wrong_row_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VERIFIER.parse_task({**row(), **change}, VERIFIER.settings())


def test_reports() -> None:
    log = "\x1b[32mPASSED\x1b[0m a.py::x[/tmp/y/z]\nFAILED a.py::w - Error\nERROR b.py\nb.py::old PASSED [ 50%]\n"
    expected = {"a.py::x[/z]": "PASSED", "a.py::w": "FAILED", "b.py": "ERROR", "b.py::old": "PASSED"}
    assert statuses_in(log, "o/r", has_summary=False) == expected
    django = "test_a (m.A) ... ok\ntest_b (m.A) ... printed\nok\ntest_c (m.A) ... FAIL\ntest_d (m.A) ... skipped 'x'\n"
    assert statuses_in(django, "django/django", has_summary=True) == {
        "test_a (m.A)": "PASSED", "test_b (m.A)": "PASSED", "test_c (m.A)": "FAILED", "test_d (m.A)": "SKIPPED",
    }  # fmt: skip
    sympy = "test_a ok [OK]\ntest_b F [FAIL]\ntest_c E\n"
    assert statuses_in(sympy, "sympy/sympy", has_summary=True) == {
        "test_a": "PASSED",
        "test_b": "FAILED",
        "test_c": "ERROR",
    }
    assert statuses_in("x\n" * 1000 + "= " * 50_000, "o/r", has_summary=False) == {}
    assert statuses_in(log, "o/r", has_summary=True) == {}


def test_resolutions() -> None:
    statuses = {"a": "PASSED", "b": "FAILED", "s": "SKIPPED"}
    assert resolution(statuses, ["a"], []) == "RESOLVED_FULL"
    assert resolution(statuses, ["a", "s"], ["a"]) == "RESOLVED_FULL"
    assert resolution(statuses, ["a", "missing"], ["a"]) == "RESOLVED_PARTIAL"
    assert resolution(statuses, ["b"], ["a"]) == "RESOLVED_NO"
    assert resolution(statuses, ["a"], ["b"]) == "RESOLVED_NO"
    assert resolution({}, [], []) == "RESOLVED_FULL"


def test_a_machine_without_apptainer_or_the_image_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxFailedError, match=r"image /i\.sif needs Apptainer, and this machine has none"):
        words_of("/i.sif")
    (tmp_path / "apptainer").touch(mode=0o755)
    with pytest.raises(SandboxFailedError, match=r"there is no image /i\.sif here"):
        words_of("/i.sif")


def test_the_words_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = tmp_path / "i.sif"
    for name in ("apptainer", "prlimit", "i.sif"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = [*words_of(str(image))]
    limits, options = words[: words.index("apptainer")], words[words.index("apptainer") + 1 : words.index(str(image))]
    assert [limits[0], limits[-1], len(limits)] == ["prlimit", "--", len(LIMITS) + 2]
    assert {"--containall", "--no-home", "--net", "--network=none"} < {*options}
    assert "--no-mount=bind-paths,cwd,home,hostfs,tmp" in options
    assert "--network=none" not in words_of(str(image), network=True)
    (tmp_path / "prlimit").unlink()
    assert words_of(str(image))[0] == "apptainer"


def test_only_a_setting_opens_the_network() -> None:
    assert [requested(row(), ANSWER, **given)[0].network for given in ({}, {"sandbox_network": True})] == [False, True]


@pytest.mark.parametrize("size", [1, 1000, 1 << 16])
def test_of_a_long_output_the_beginning_and_the_end_are_kept(size: int) -> None:
    kept, whole = _Kept(1000), _Kept(1000)
    data = b"first" + b"." * (1 << 18) + "lást".encode()
    for start in range(0, len(data), size):
        kept.add(data[start : start + size])
    whole.add(b"short")
    text = kept.text()
    assert text.startswith("first.")
    assert text.endswith(".lást")
    assert text.count("<output cut>") == 1
    assert len(text) <= 1000 + len("\n<output cut>\n")
    assert whole.text() == "short"


@pytest.mark.parametrize("status", ["FAILED", "ERROR", "XFAIL", "b]", "ok"])
@pytest.mark.parametrize("name", ["t.py::f[a b]", "t.py::f[a - b c]", "t.py::f", "t.py::f[PASSED 1]"])
def test_what_did_not_pass_is_never_taken_for_passed(name: str, status: str) -> None:
    """A name with spaces, a summary or none, a second test that has the same name once both are cut."""
    heading = "=== short test summary info ==="
    for has_summary, log in ((False, f"{name} {status}   [100%]"), (True, f"{heading}\n{status} {name} - assert 0")):
        for other in ("", "\nt.py::f[a c] PASSED", "\nPASSED t.py::f[a c]"):
            found = statuses_in(log + other, "a/b", has_summary=has_summary)
            cut = name.split(" ", 1)[0] if status in ("FAILED", "ERROR") else name
            for test in {name, cut} - ({name} if has_summary and " - " in name else set()):
                assert resolution(found, [test], []) == "RESOLVED_NO", (log + other, found)
