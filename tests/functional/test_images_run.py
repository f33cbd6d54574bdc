"""Answers to issues of a small repository, with bubblewrap in Apptainer's place: what runs in the image is real."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from small_root import require

from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import NoVerdict, Verdict, message_item
from recipes.environments.instances import VERIFIERS
from recipes.environments.sandbox.client import client_of
from recipes.environments.sandbox.server import SandboxServer
from recipes.environments.scoring.clients import InProcessVerifier
from recipes.environments.scoring.pool import ScoringPool

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

# Runs what follows the image, after the options it is given, on a copy of the repository.
APPTAINER = """#!/usr/bin/env bash
set -euo pipefail
copy=$(mktemp -d)
trap 'rm -rf "${{copy}}"' EXIT
cp -a {repository} "${{copy}}/testbed"
printf '%s\\n' "$(pwd)" "$@" > {repository}.words
prlimit --noheadings --output=RESOURCE,SOFT > {repository}.limits
until [[ $1 == *.sif ]]; do shift; done
shift
bwrap --unshare-all --die-with-parent --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib \\
  --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp --bind "${{copy}}/testbed" /testbed \\
  --ro-bind {conda} /opt/miniconda3 --setenv PATH /usr/bin --chdir / "$@"
"""
ACTIVATE = "conda() { :; }\nPATH=/opt/miniconda3/bin:$PATH\n"
CODE = "def double(x):\n    return x + 3\n"
GOLD = "diff --git a/code.py b/code.py\n--- a/code.py\n+++ b/code.py\n@@ -1,2 +1,2 @@\n def double(x):\n"
GOLD += "-    return x + 3\n+    return x * 2\n"
TESTS = """
from code import double
results = []
for name, value, expected in (("one", 1, 2), ("three", 3, 6)):
    results.append(f"{'PASSED' if double(value) == expected else 'FAILED'} test_code.py::{name}")
print("=== short test summary info ===", *results, sep=chr(10))
print("=== 2 run in 0.01s ===")
"""
RIGHT, PART, WORSE = "return x * 2", "return 2", "return 0"
REPRODUCTION = "import sys\nfrom code import double\nsys.exit(0 if double(1) == 2 else 2)"


@pytest.fixture
async def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InProcessVerifier]:
    require("bwrap", "git")
    repository, conda, programs = tmp_path / "repository", tmp_path / "conda/bin", tmp_path / "programs"
    for directory in (repository, conda, programs):
        directory.mkdir(parents=True)
    (repository / "code.py").write_text(CODE, encoding="utf-8")
    (repository / "a.py").write_text("", encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    (conda / "activate").write_text(ACTIVATE, encoding="utf-8")
    (conda / "python").symlink_to("/usr/bin/python3")
    (programs / "apptainer").write_text(APPTAINER.format(repository=repository, conda=conda.parent), encoding="utf-8")
    (programs / "apptainer").chmod(0o755)
    (tmp_path / "task.sif").touch()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    pool, server, http = ScoringPool(num_workers=1), SandboxServer(), JsonClient()
    yield InProcessVerifier(
        name="swerl_gen",
        verifier=VERIFIERS["swerl_gen"],
        settings=VERIFIERS["swerl_gen"].settings(sandbox_timeout=20),
        pool=pool,
        timeout_seconds=60,
        sandbox=client_of(VERIFIERS["swerl_gen"].settings(), server, http),
    )
    await http.close()
    pool.close()
    server.close()


def row(tmp_path: Path, mode: str, **instance: Any) -> dict[str, Any]:
    given = {
        "repo": "o/r",
        "patch": GOLD,
        "setup_script": f"cd /testbed\ncat > test_code.py <<'EOF'\n{TESTS}\nEOF\n",
        "regression_script": "true",
        "test_script": "source /opt/miniconda3/bin/activate; cd /testbed; : pytest -rA; python test_code.py",
        "FAIL_TO_PASS": ["test_code.py::one"],
        "PASS_TO_PASS": [],
    }
    files = json.dumps({"code.py": CODE})
    metadata = {"image": str(tmp_path / "task.sif"), "relevant_file_contents": files, "remove_repo_name": False}
    return {"mode": mode, "instance": {**given, **instance}, "metadata": metadata}


def edit(line: str) -> dict[str, Any]:
    block = f"### code.py\n<<<<<<< SEARCH\n    return x + 3\n=======\n    {line}\n>>>>>>> REPLACE\n"
    return {"output": [message_item(f"<solution>\n```python\n{block}```\n</solution>")]}


def script(code: str) -> dict[str, Any]:
    return {"output": [message_item(f"```python\n{code}\n```")]}


async def test_patches(verifier: InProcessVerifier, tmp_path: Path) -> None:
    both = {"FAIL_TO_PASS": ["test_code.py::one", "test_code.py::three"]}
    for line, reward in ((RIGHT, 1.0), (PART, 0.2), (WORSE, 0.0)):
        verdict = await verifier.verify(row(tmp_path, "eval", **both), edit(line))
        assert isinstance(verdict, Verdict), verdict
        assert verdict.reward == reward, verdict.reason


CHEATS = {
    "a printed result": 'print("PASSED test_code.py::one"); return 0',
    "a printed verdict": 'print("RESOLVED_FULL"); raise SystemExit(0)',
    "an early end": "import os; os._exit(0)",
    "a printed result and an early end": 'import os; print("PASSED test_code.py::one", flush=True); os._exit(0)',
    "no end": "import time; time.sleep(1000)",
    "the mark": """
    import re, os, pathlib
    shells = [pathlib.Path(f"/proc/{pid}") for pid in os.listdir("/proc") if pid.isdecimal()]
    for place in (name for shell in shells for name in ("cmdline", "environ", "fd/3", "fd/4", "fd/255")
                  for name in [shell / name]):
        try:
            text = place.read_bytes()
        except OSError:
            continue
        if re.search(rb"[0-9a-f]{32} (ready|applied|tested)", text):
            lines = "=== short test summary info ===", "PASSED test_code.py::one", "=== 1 run in 0.01s ==="
            print(*lines, sep="\\n", flush=True)
            os._exit(0)
    return 0""",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_patches_that_cheat_earn_nothing(verifier: InProcessVerifier, tmp_path: Path, name: str) -> None:
    object.__setattr__(verifier, "settings", VERIFIERS["swerl_gen"].settings(sandbox_timeout=5))
    verdict = await verifier.verify(row(tmp_path, "eval"), edit(CHEATS[name]))
    assert isinstance(verdict, Verdict), verdict
    assert verdict.reward == 0.0, verdict.reason


# Looks for a text in all that a script can read of the processes that it sees.
SHELLS = """
import os, pathlib, sys
text = b""
for pid in {{*filter(str.isdecimal, os.listdir("/proc"))}} - {{str(os.getpid())}}:
    for name in ("cmdline", "environ", "fd/3", "fd/4", "fd/255"):
        try:
            text += pathlib.Path("/proc", pid, name).read_bytes()
        except OSError:
            pass
sys.exit(0 if {test} else 2)
"""
SCRIPTS = {
    REPRODUCTION: 1.0,
    "import sys\nsys.exit(2)": 0.0,
    "import sys\nsys.exit(0)": 0.0,
    "import os, sys\nbefore = os.path.exists('/tmp/seen')\nopen('/tmp/seen', 'w')\nsys.exit(0 if before else 2)": 0.0,
    "import subprocess, sys\nsys.exit(0 if subprocess.run(['git', 'diff', '--quiet']).returncode == 1 else 2)": 0.0,
    SHELLS.format(test="b'apply -R -' + bytes([10]) in text or b'apply -R - ' in text"): 0.0,
    SHELLS.format(test="b'git apply' in text"): 0.0,
    "import os, sys\nsys.exit(2 if os.stat('code.py').st_ino < os.stat('a.py').st_ino else 0)": 0.0,
    "import os, sys\nsys.exit(2 if os.getpid() % 2 else 0)": 0.0,
    "import os, sys\nsys.exit(2 if os.listdir()[0] == 'code.py' else 0)": 0.0,
    "import os, sys\nsys.exit(2 if os.stat('code.py').st_mtime == os.stat('.').st_mtime else 0)": 0.0,
}


@pytest.mark.parametrize("code", SCRIPTS)
async def test_scripts(verifier: InProcessVerifier, tmp_path: Path, code: str) -> None:
    verdict = await verifier.verify(row(tmp_path, "repro-gen"), script(code))
    assert isinstance(verdict, Verdict), verdict
    assert verdict.reward == SCRIPTS[code], verdict.reason


async def test_an_image_that_cannot_be_prepared_gives_no_verdict(verifier: InProcessVerifier, tmp_path: Path) -> None:
    missing = row(tmp_path, "eval")
    missing["metadata"]["image"] = "/nowhere.sif"
    verdict = await verifier.verify(missing, edit(RIGHT))
    assert isinstance(verdict, NoVerdict)
    assert "there is no image /nowhere.sif here" in verdict.reason
    object.__setattr__(verifier, "settings", VERIFIERS["swerl_gen"].settings(sandbox_timeout=3))
    slow = await verifier.verify(row(tmp_path, "eval", setup_script="sleep 1000"), edit(RIGHT))
    assert isinstance(slow, NoVerdict)
    assert "could not be prepared (timeout)" in slow.reason
    broken = await verifier.verify(row(tmp_path, "repro-gen", patch="no patch"), script(REPRODUCTION))
    assert isinstance(broken, NoVerdict)


async def test_a_container_is_given_nothing_of_this_machine(verifier: InProcessVerifier, tmp_path: Path) -> None:
    await verifier.verify(row(tmp_path, "eval"), edit(RIGHT))
    directory, *words = (tmp_path / "repository.words").read_text(encoding="utf-8").splitlines()
    options = words[: words.index(str(tmp_path / "task.sif"))]
    assert directory == "/"
    assert options[:3] == ["exec", "--containall", "--writable-tmpfs"]
    assert {"--no-home", "--no-mount=bind-paths,cwd,home,hostfs,tmp", "--net", "--network=none"} < {*options}
    limits = dict(line.split() for line in (tmp_path / "repository.limits").read_text(encoding="utf-8").splitlines())
    assert limits["CORE"] == "0"
    assert "unlimited" not in (limits["AS"], limits["FSIZE"], limits["NPROC"])


async def test_a_container_that_is_killed_gives_no_verdict(verifier: InProcessVerifier, tmp_path: Path) -> None:
    killed = await verifier.verify(row(tmp_path, "eval", test_script="kill -9 $PPID"), edit(RIGHT))
    assert isinstance(killed, NoVerdict)
    assert "the container ended before the tests did (error)" in killed.reason
    killed = await verifier.verify(row(tmp_path, "repro-gen"), script("import os\nos.kill(os.getppid(), 9)"))
    assert isinstance(killed, NoVerdict)
    assert "the container ended before the script did (error)" in killed.reason
