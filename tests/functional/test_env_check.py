"""`make env-check` on a server of a user's own, as its README shows one, and on environments of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "tools" / "environments" / "check" / "README.md"
MCQA = {
    "responses_create_params": {"input": "Capital of England?"},
    "agent_ref": {"name": "mcqa_simple_agent"},
    "options": [{"A": "Paris"}, {"B": "London"}],
    "expected_answer": "B",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@contextmanager
def served(directory: Path, program: str) -> Iterator[str]:
    """Serve a program of the README as it says; yields the address."""
    (directory / "words.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "uvicorn", "words:app", "--port", "0", "--app-dir", str(directory)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = None
            while not found and (line := process.stderr.readline()):
                found = re.search(r"http://\S+", line)
            assert found, "the server did not start"
            yield found.group()
        finally:
            process.terminate()
            process.wait(timeout=20)


def check(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.environments.check", *arguments, "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)


def test_the_server_of_the_readme_passes_and_one_that_can_be_fooled_does_not(tmp_path: Path) -> None:
    (program,), (row,) = blocks("python"), blocks("json")
    assert program.count("\n") < 60
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8")
    out = tmp_path / "page.html"
    with served(tmp_path, program) as url:
        with urllib.request.urlopen(url, timeout=30) as reply:
            assert json.load(reply) == {"status": "ok"}
        done = check("--url", url, "--data", str(tmp_path / "rows.jsonl"), out=out)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "PASS  right answer" in done.stdout
        assert "PASS  malformed requests" in done.stdout
        assert "0 failed" in out.read_text(encoding="utf-8")
    fooled = program.replace("text_of(response).strip() == word[::-1]", "word[::-1] in str(response)")
    assert fooled != program
    with served(tmp_path, fooled) as url:
        done = check("--url", url, "--data", str(tmp_path / "rows.jsonl"), out=out)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"FAIL  misplaced answer: in reasoning only +in reasoning only: reward 1", done.stdout)
    assert '<span class="bad">FAIL</span>' in out.read_text(encoding="utf-8")


def test_an_environment_of_ours_passes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(MCQA), encoding="utf-8")
    start = time.monotonic()
    done = check("--name", "mcqa", "--data", str(tmp_path / "rows.jsonl"), "--all", out=tmp_path / "page.html")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - start < 120
    assert len(re.findall(r"^  PASS  .*: ", done.stdout, re.MULTILINE)) >= 10, "adversarial answers"
    assert re.search(r"n/a   dead dependency +it needs no judge and no sandbox", done.stdout)
