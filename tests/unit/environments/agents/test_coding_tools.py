"""The tools of a coding agent, with arguments as a hostile model writes them, in a real shell and on real files."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from recipes.environments.agents.coding import editor as editing
from recipes.environments.agents.coding.agent import Workbench
from recipes.environments.agents.coding.calls import offered_names
from recipes.environments.agents.coding.editor import MAX_FILE, Editor
from recipes.environments.agents.coding.harness import Harness, harnesses
from recipes.environments.agents.coding.terminal import Terminal
from tests.directory_container import DirectoryContainer

LIMIT = 4000


@pytest.fixture
async def container(tmp_path: Path) -> AsyncIterator[DirectoryContainer]:
    place = tmp_path / "work"
    place.mkdir()
    container = DirectoryContainer(place, tmp_path)
    yield container
    await container.close()


async def bench_of(container: DirectoryContainer, harness: Harness) -> Workbench:
    shell = await container.open_shell()
    await shell.run(f"cd {container.place}", seconds=5, max_characters=100)
    shared: Any = {"answers": harness.answers, "max_characters": LIMIT}
    return Workbench(
        harness=harness,
        offered=offered_names(harness, seed="x", is_diverse=False, is_camel=False),
        terminal=Terminal(shell=shell, seconds=20.0, **shared),
        editor=Editor(container=container, workspace=str(container.place), **shared),
    )


@pytest.fixture
async def bench(container: DirectoryContainer) -> Workbench:
    return await bench_of(container, harnesses()["codeact"])


async def ask(bench: Workbench, name: str, **arguments: Any) -> str:
    return await bench.answer({"name": name, "arguments": orjson.dumps(arguments).decode()})


async def edit(bench: Workbench, command: str, path: object = "a.py", **arguments: Any) -> str:
    return await ask(bench, "str_replace_editor", command=command, path=path, **arguments)


async def test_the_shell_keeps_its_directory_and_variables(bench: Workbench) -> None:
    assert "exit code 0" in await ask(bench, "execute_bash", command="mkdir sub && cd sub && export A=5")
    answer = await ask(bench, "execute_bash", command="pwd; echo $A; false")
    assert Path(answer.splitlines()[0]) == Path(bench.editor.workspace, "sub")
    assert "\n5\n" in answer
    assert "exit code 1" in answer
    assert bench.terminal.num_commands == 2


async def test_long_output_is_cut_in_the_middle_and_counted(bench: Workbench) -> None:
    answer = await ask(bench, "execute_bash", command="echo begin; head -c 100000 /dev/zero | tr '\\0' x; echo end")
    assert answer.startswith("begin\nxxx")
    assert "xend\n" in answer
    assert len(answer) < LIMIT + 300
    dropped = 100_000 + len("begin\n") + len("end\n") - LIMIT
    assert f"x\n[{dropped} characters left out]\nx" in answer
    assert bench.terminal.num_dropped == dropped


async def test_a_late_command_is_interrupted_and_the_shell_goes_on(bench: Workbench) -> None:
    assert "did not end within 1 seconds" in await ask(bench, "execute_bash", command="sleep 100", timeout=0.1)
    assert "still\n" in await ask(bench, "execute_bash", command="echo still")
    assert bench.terminal.num_late == 1


@pytest.mark.parametrize(
    "command", ["pkill -f python", "sleep 1; killall bash", "/usr/bin/pkill x", "$(pkill y)", "echo a|xargs killall"]
)
async def test_ending_processes_by_name_is_answered_and_not_run(bench: Workbench, command: str) -> None:
    assert "is not allowed" in await ask(bench, "execute_bash", command=f"touch ran; {command}")
    assert bench.terminal.num_commands == 0
    assert "killing" in await ask(bench, "execute_bash", command="echo killing me-pkill-x")


async def test_edits_of_a_file(bench: Workbench, container: DirectoryContainer) -> None:
    path = container.place / "sub" / "a.py"
    assert "has been written" in await edit(bench, "create", "sub/a.py", file_text="one\ntwo\ntwo\nfour\n")
    assert "exists already" in await edit(bench, "create", str(path), file_text="")
    assert "     1\tone\n     2\ttwo" in await edit(bench, "view", "sub/a.py")
    assert await edit(bench, "view", "sub/a.py", view_range=[3, -1]) == f"Here is {path}:\n     3\ttwo\n     4\tfour"
    answer = await edit(bench, "str_replace", "sub/a.py", old_str="two", new_str="2")
    assert "occurs 2 times" in answer and "at lines 2, 3" in answer
    assert "does not occur" in await edit(bench, "str_replace", "sub/a.py", old_str="five", new_str="5")
    assert "     4\t4" in await edit(bench, "str_replace", "sub/a.py", old_str="four", new_str="4")
    assert "     1\tzero" in await edit(bench, "insert", "sub/a.py", insert_line=0, new_str="zero")
    await edit(bench, "insert", "sub/a.py", insert_line=5, new_str="end")
    assert path.read_text(encoding="utf-8") == "zero\none\ntwo\ntwo\n4\nend"
    assert "from 0 to 6" in await edit(bench, "insert", "sub/a.py", insert_line=7, new_str="x")
    for expected in ("zero\none\ntwo\ntwo\n4\n", "one\ntwo\ntwo\n4\n", "one\ntwo\ntwo\nfour\n"):
        assert "has been written" in await edit(bench, "undo_edit", "sub/a.py")
        assert path.read_text(encoding="utf-8") == expected
    assert "no change" in await edit(bench, "undo_edit", "sub/a.py")
    assert str(path) in await edit(bench, "view", ".")
    assert bench.num_errors == 5


async def test_bytes_that_are_no_text_survive_an_edit(bench: Workbench, container: DirectoryContainer) -> None:
    path = container.place / "a.py"
    path.write_bytes(b"# caf\xe9\r\nx = 1\r\n")
    await edit(bench, "str_replace", old_str="x = 1", new_str="x = 2")
    assert path.read_bytes() == b"# caf\xe9\r\nx = 2\r\n"
    assert "caf\ufffd" in await edit(bench, "view")


async def test_a_line_is_the_same_for_each_command(bench: Workbench, container: DirectoryContainer) -> None:
    path = container.place / "a.py"
    text = "import os\n\f\n# a\u2028b\x1c\x85\rc\ndef f():\n    pass"
    path.write_bytes(text.encode())
    assert "     4\tdef f():\n     5\t    pass" in await edit(bench, "view")
    answer = await edit(bench, "insert", insert_line=3, new_str="@cached")
    assert path.read_bytes().decode() == text.replace("def f", "@cached\ndef f")
    assert "     4\t@cached\n     5\tdef f():\n     6\t    pass" in answer
    assert "from 0 to 6" in await edit(bench, "insert", insert_line=7, new_str="x")
    await edit(bench, "insert", insert_line=6, new_str="end")
    assert path.read_bytes().decode().endswith("    pass\nend")


WRONG = {
    "NUL in a path": ({"command": "view", "path": "a\0b"}, "none of them NUL"),
    "a long path": ({"command": "view", "path": "a/" * 3000}, "1 to 4096 characters"),
    "no path": ({"command": "view", "path": ""}, "1 to 4096 characters"),
    "a number as path": ({"command": "view", "path": 5}, "argument 'path': got number 5, expected a string"),
    "nothing as path": ({"command": "view", "path": None}, "the argument 'path' is missing"),
    "an unknown command": ({"command": "delete", "path": "a"}, "expected one of view, create"),
    "an unknown argument": ({"command": "view", "path": "a", "mode": 1}, "unknown argument string 'mode'"),
    "a file that is not there": ({"command": "view", "path": "/none/such"}, "there is no readable file"),
    "a device": ({"command": "str_replace", "path": "/dev", "old_str": "a", "new_str": "b"}, "no readable file"),
    "a directory to write": ({"command": "create", "path": "/proc", "file_text": "x"}, "could not be written"),
    "half a range": ({"command": "view", "path": "t", "view_range": [1]}, "must be two integers"),
    "words as range": ({"command": "view", "path": "t", "view_range": ["a", "b"]}, "must be two integers"),
    "a range backwards": ({"command": "view", "path": "t", "view_range": [2, 1]}, "are no range"),
    "a range beyond": ({"command": "view", "path": "t", "view_range": [9, 10]}, "are no range of the 2 lines"),
    "no text": ({"command": "create", "path": "n"}, "the argument 'file_text' is missing"),
    "no old text": ({"command": "str_replace", "path": "t", "old_str": "", "new_str": "a"}, "is empty"),
    "no change": ({"command": "str_replace", "path": "t", "old_str": "a", "new_str": "a"}, "the same"),
    "a huge line": ({"command": "insert", "path": "t", "insert_line": 10**30, "new_str": "a"}, "from 0 to 2"),
    "half a line": ({"command": "insert", "path": "t", "insert_line": 0.5, "new_str": "a"}, "expected an integer"),
    "a truth as line": ({"command": "insert", "path": "t", "insert_line": True, "new_str": "a"}, "expected a number"),
    "a binary file": ({"command": "view", "path": "b"}, "is a binary file"),
    "a huge file": ({"command": "create", "path": "n", "file_text": "é" * (MAX_FILE // 2 + 1)}, "more than"),
    "growth": ({"command": "str_replace", "path": "t", "old_str": "one", "new_str": "x" * MAX_FILE}, "longer than"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_with_an_edit_is_its_answer(
    bench: Workbench, container: DirectoryContainer, name: str
) -> None:
    (container.place / "t").write_text("one\ntwo\n", encoding="utf-8")
    (container.place / "b").write_bytes(b"\x7fELF\0\0")
    arguments, expected = WRONG[name]
    answer = await bench.answer({"name": "str_replace_editor", "arguments": orjson.dumps(
        arguments, option=orjson.OPT_NON_STR_KEYS).decode() if name != "a huge line" else
        '{"command":"insert","path":"t","insert_line":1e30,"new_str":"a"}'})  # fmt: skip
    assert answer.startswith("ERROR: ")
    assert expected in answer
    assert len(answer) < 6000
    assert (container.place / "t").read_text(encoding="utf-8") == "one\ntwo\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"command": ""}, "is empty"),
        ({"command": "a\0b"}, "must not hold NUL"),
        ({"command": "x" * 300_000}, "expected 200000 at most"),
        ({"command": ["ls"]}, "expected a string"),
        ({"command": "ls", "timeout": "soon"}, "expected a number"),
        ({"command": "ls", "timeout": [1]}, "expected a number"),
        ({}, "is missing"),
    ],
)
async def test_what_is_wrong_with_a_command_is_its_answer(
    bench: Workbench, arguments: dict[str, Any], expected: str
) -> None:
    assert expected in await ask(bench, "execute_bash", **arguments)
    assert bench.terminal.num_commands == 0


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"command": 1e999}', '{"command":"ls","command2":{}}', "5"])
async def test_arguments_that_are_no_object_are_answered(bench: Workbench, text: str) -> None:
    assert (await bench.answer({"name": "execute_bash", "arguments": text})).startswith("ERROR: ")


async def test_a_tool_that_was_not_offered_is_answered(bench: Workbench) -> None:
    answer = await bench.answer({"name": "z" * 10_000, "arguments": "{}"})
    assert "there is no tool zzz" in answer
    assert len(answer) < 300


async def test_a_gigabyte_is_shown_in_bounds(bench: Workbench, container: DirectoryContainer) -> None:
    with (container.place / "big").open("wb") as file:
        file.write(b"line\n" * 1000)
        file.truncate(1 << 30)
    (container.place / "lines").write_text("ab\n" * (MAX_FILE // 2), encoding="utf-8")
    (container.place / "line").write_text("x" * (MAX_FILE // 2), encoding="utf-8")
    (container.place / "empty").write_text("", encoding="utf-8")
    started = time.monotonic()
    for name in ("big", "lines", "line", "empty"):
        answer = await edit(bench, "view", name)
        assert len(answer) < 2 * LIMIT
    assert time.monotonic() - started < 20
    assert "more than" in await edit(bench, "str_replace", "lines", old_str="b", new_str="c")
    assert (container.place / "big").stat().st_size == 1 << 30


async def test_many_occurrences_take_linear_time(bench: Workbench, container: DirectoryContainer) -> None:
    (container.place / "many").write_text("a" * (MAX_FILE - 10), encoding="utf-8")
    for old in ("a", "a" * 1000 + "b", "aa"):
        assert "ERROR" in await edit(bench, "str_replace", "many", old_str=old, new_str="c" * 100)


async def test_what_is_kept_to_take_back_is_bounded(
    bench: Workbench, container: DirectoryContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editing, "MAX_UNDO", 1000)
    (container.place / "a.py").write_text("x" * 400 + "0", encoding="utf-8")
    for number in range(10):
        await edit(bench, "str_replace", old_str=str(number), new_str=str(number + 1) if number < 9 else "end")
    assert len(bench.editor._undo) == 2
    assert "xend" in (container.place / "a.py").read_text(encoding="utf-8")


async def test_words_and_directories_of_a_command(container: DirectoryContainer) -> None:
    bench = await bench_of(container, harnesses()["codex"])
    (container.place / "a b").mkdir()
    answer = await ask(bench, "shell", command=["bash", "-lc", "pwd && echo $((1+1))"], workdir="a b")
    assert answer.endswith("/a b\n2\n")
    assert "echo: $HOME" in await ask(bench, "shell", command=["echo", "echo:", "$HOME"])
    assert "cannot be entered" in await ask(bench, "shell", command=["ls"], workdir="/none")
    assert "must not hold NUL" in await ask(bench, "shell", command=["ls"], workdir="a\0")


async def test_arguments_of_a_program_are_quoted(container: DirectoryContainer) -> None:
    bench = await bench_of(container, harnesses()["opencode"])
    (container.place / "a.py").write_text("it's $(touch ran)\n", encoding="utf-8")
    assert "./a.py" in await ask(bench, "glob", pattern="*.py")
    assert "a.py:1:it's" in await ask(bench, "grep", pattern="it's .\\(touch", path=".")
    await ask(bench, "glob", pattern="$(touch ran)'; touch ran; '")
    assert not (container.place / "ran").exists()
    assert "is not allowed" in await ask(bench, "grep", pattern="pkill", path=".")


async def test_a_patch_is_applied(container: DirectoryContainer) -> None:
    bench = await bench_of(container, harnesses()["codex"])
    subprocess.run(["git", "init", "-q", str(container.place)], check=True)
    (container.place / "a.py").write_text("one\ntwo\n", encoding="utf-8")
    (container.place / "sub").mkdir()
    patch = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
    assert "exit_code: 0\noutput:\napplied" in await ask(bench, "apply_patch", patch=patch)
    assert (container.place / "a.py").read_text(encoding="utf-8") == "one\n2\n"
    assert "exit_code: 0" not in await ask(bench, "apply_patch", patch="junk")
