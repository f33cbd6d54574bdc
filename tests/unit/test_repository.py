"""What strangers expect beside the code: tiers that keep their promises, declared dependencies, pages that are true."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PROMISES = {
    "a tiny model learns": "test_smoke.py",
    "a run that is stopped goes on with no prompt twice": "test_resume.py",
    "a Slurm job outlives a node": "test_slurm_job.py",
    "a container sees its mounts alone": "test_container_runtimes.py",
    "a verifier over HTTP gives verdicts, and none when it is dead": "test_environments_http.py",
    "a stage starts from its parent's export": "test_pipeline.py",
}
# Modules whose package has another name.
PACKAGE_OF = {"yaml": "pyyaml", "megatron": "megatron-core"}
# Imported only where the package is there: another engine, an agent's own environment, a peer, a sink.
ELSEWHERE = {"datasets", "litellm", "minisweagent", "openhands", "openhands_aci", "trl", "pytest", "vllm"}
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def test_make_test_starts_one_test_of_each_promise():
    files = (ROOT / "tests" / "functional").glob("test_*.py")
    marked = {path.name for path in files if "pytest.mark.promise" in path.read_text(encoding="utf-8")}
    assert marked == set(PROMISES.values())
    assert "make --keep-going test test-more" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def imported_packages() -> set[str]:
    found: set[str] = set()
    for path in [*(ROOT / "recipes").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"recipes", "tools"}


def locked(name: str) -> set[str]:
    lines = (ROOT / "containers" / f"requirements-{name}.lock").read_text(encoding="utf-8").splitlines()
    return {re.split(r"[=\s]", line, maxsplit=1)[0] for line in lines if line and not line.startswith(("#", "-"))}


def test_what_is_imported_is_declared_and_what_is_declared_is_locked():
    declared = set(PROJECT["dependencies"])
    imported = {"tensorboard", "wandb"} | {  # which torch imports for its writer; which sinks.py loads by name
        PACKAGE_OF.get(name, name.replace("_", "-")) for name in imported_packages() - ELSEWHERE
    }
    assert imported == declared
    extras = PROJECT["optional-dependencies"]
    assert declared | set(extras["cpu"]) | set(extras["test"]) <= locked("cpu")
    assert declared | set(extras["gpu"]) <= locked("gpu")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_what_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:recipes|tools|tests|configs|containers)/[\w/.-]*)`", text):
        assert (ROOT / name).exists(), name
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_workflow_and_the_hook_run_the_projects_own_commands():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yaml").read_text(encoding="utf-8"))
    runs = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    assert any(run.endswith(" make test") for run in runs)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == ["make fix"]


def test_configurations_in_tests_come_from_the_loader():
    """A block that is typed by hand outlives the name of a key; one of `tests/configuration.py` does not."""
    typed = re.compile(r"SimpleNamespace\((?:env|grpo|loss_fn|policy|deadlines|vllm_cfg|nemo_gym|sequence_packing)=")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert not [str(path) for path in files if typed.search(path.read_text(encoding="utf-8"))]
