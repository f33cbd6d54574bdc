"""From rows to tasks: what an agent may see, wrong rows, and the file that is an instance's image."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.swe.evaluation import is_of_tests, touched_files
from recipes.environments.swe.images import Listing, PartialNames, find_image
from recipes.environments.swe.task import MissingImageError, images_of, parse_task
from tests.recorded import env_cases, golden, skip_where_missing

FACTS = {
    "instance_id": "a__b-1",
    "dataset_name": "SWE-bench_Verified",
    "problem_statement": "It fails.",
    "base_commit": "0123abc",
    "golden_patch": "the solution",
}
INSTANCE = {
    "repo": "a/b",
    "patch": "the solution",
    "test_patch": "+++ b/tests/test_x.py\n",
    "FAIL_TO_PASS": '["tests/test_x.py::test_a"]',
    "PASS_TO_PASS": ["tests/test_x.py::test_b"],
}


def row(**changed: object) -> dict[str, Any]:
    """Return a row, with fields of the instance changed; the place of the others is that of the published blend."""
    metadata = {key: changed.pop(key, value) for key, value in FACTS.items()}
    metadata["instance_dict"] = changed.pop("instance_dict", json.dumps({**INSTANCE, **changed}))
    return {"responses_create_params": {"input": [], "metadata": metadata}, "agent_ref": {"name": "swe_agents_train"}}


@pytest.mark.parametrize("case", env_cases("swe_agents_logic"))
def test_the_recorded_lookups(case, tmp_path):
    for name in case["files"]:
        (tmp_path / name).touch()
    templates = [str(tmp_path / text) for text in golden("env/swe_agents_logic.json")["container_formatters"]]
    found = find_image(case["instance_id"], templates, Listing(), PartialNames.SUBSTRING)
    assert (found and found.name) == case["found"]


def test_no_instance_gets_the_image_of_another_by_default(tmp_path):
    templates = [str(tmp_path / "swebench_{instance_id}.sif")]
    for name in ("swebench_x.a__b-12.sif", "swebench_xa__b-1.sif", "c-a__b-1.sif", "a__b-1.txt"):
        (tmp_path / name).touch()
    assert find_image("a__b-1", templates, Listing()) is None
    assert find_image("a__b-1", templates, Listing(), PartialNames.SUBSTRING)
    (tmp_path / "any_a_1776_b-1.sif").touch()
    assert find_image("a__b-1", templates, Listing()) == tmp_path / "any_a_1776_b-1.sif"
    assert find_image("../a__b-1", templates, Listing(), PartialNames.SUBSTRING) is None


def test_an_agent_sees_the_recorded_fields_only():
    visible = golden("env/swe_agents_logic.json").get("agent_visible_fields")
    skip_where_missing(visible, "agent_visible_fields in swe_agents_logic")
    task = parse_task(row(**{name: "x" for name in visible if name not in FACTS}, hidden="x", created_at="x"))
    assert sorted(task.public) == visible
    assert not any("solution" in text or "test_a" in text for text in task.public.values())


def test_a_published_row_is_read(gym_row):
    task = parse_task(gym_row("swe_agents"))
    assert (task.id, task.repository) == ("astropy__astropy-12907", "astropy/astropy")
    assert len(task.fail_to_pass) == 2 and len(task.pass_to_pass) == 13
    assert task.gold_patch.startswith("diff --git") and task.test_patch.startswith("diff --git")
    bare = {key: value for key, value in gym_row("swe_agents").items() if key != "responses_create_params"}
    bare |= {"responses_create_params": {"input": []}, "dataset_name": "SWE-bench_Verified"}
    assert parse_task(bare).public == task.public  # the fields may stand at the top of the row


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"instance_id": 7}, "'instance_id': got number 7, expected a string"),
        ({"instance_id": "../x"}, "'instance_id': got string '../x'"),
        ({"instance_id": ""}, "'instance_id': got string ''"),
        ({"base_commit": "--output=x"}, "'base_commit': got string '--output=x'"),
        ({"problem_statement": None}, "'problem_statement': got nothing"),
        ({"instance_dict": "[1]"}, "'instance_dict': got string '.1.', expected JSON text of an object"),
        ({"instance_dict": "{"}, "'instance_dict'"),
        ({"instance_dict": "[" * 100_000}, "'instance_dict'"),
        ({"FAIL_TO_PASS": "one"}, "'FAIL_TO_PASS': got string 'one', expected a list of strings"),
        ({"PASS_TO_PASS": [1]}, "'PASS_TO_PASS'"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": None}, "the row names no tests"),
        ({"test_patch": {}}, "'test_patch': got object {}, expected a string or null"),
        ({"log_parser": "mine"}, "'log_parser': got string 'mine', expected one of django, exit_status"),
        ({"log_parser": "exit_status"}, "'test_cmd': got nothing, expected a shell command"),
        ({"test_cmd": ["a"]}, "'test_cmd'"),
    ],
)
def test_wrong_rows_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        parse_task(row(**changed))


def test_wrong_outer_parts_are_named():
    with pytest.raises(ValueError, match="'responses_create_params': got nothing, expected an object"):
        parse_task({})
    with pytest.raises(ValueError, match="'metadata': got list"):
        parse_task({"responses_create_params": {"metadata": [1]}})


def test_a_missing_image_is_named(tmp_path):
    images = images_of([f"{tmp_path}/swebench_{{instance_id}}.sif"])
    with pytest.raises(MissingImageError, match=r"a__b-1 has no image: looked for .*swebench_a__b-1\.sif"):
        images.with_image(parse_task(row()))
    (tmp_path / "swebench_a__b-1.sif").touch()
    with_image = images_of(f"{tmp_path}/swebench_{{instance_id}}.sif").with_image
    assert with_image(parse_task(row())).image == f"{tmp_path}/swebench_a__b-1.sif"


@pytest.mark.parametrize(
    ("formatter", "partial"), [([], None), (None, None), ("x.sif", None), ("{instance_id}", "any")]
)
def test_wrong_settings_of_images_are_named(formatter, partial):
    with pytest.raises(ValueError, match=r"container_formatter|partial_image_names"):
        images_of(formatter, partial)


def test_paths_of_a_patch_are_found():
    patch = (
        "diff --git a/old.py b/new.py\nrename from old.py\nrename to new.py\n"
        '--- "a/a b.py"\n+++ "b/a b.py"\n--- /dev/null\n+++ b/c.py\t\n--- a/c.py\n'
    )
    assert touched_files(patch) == ["old.py", "new.py", "a b.py", "c.py"]


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("test_a.py", True),
        ("src/a_test.py", True),
        ("tests/data/x.json", True),
        ("pkg/testing/x.py", True),
        ("conftest.py", True),
        ("contest.py", False),
        ("src/latest/a.py", False),
        ("", False),
    ],
)
def test_files_of_tests_are_known_by_their_names(path, is_test):
    assert is_of_tests(path) is is_test


def test_a_directory_of_images_that_cannot_be_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a__b-1.sif").touch()
    listing, templates, read = Listing(), [f"{tmp_path}/{{instance_id}}.sif"], Path.iterdir

    def stale(path: Path) -> Iterator[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "iterdir", stale)
    assert find_image("a__b-1", templates, listing) is None
    monkeypatch.setattr(Path, "iterdir", read)
    assert find_image("a__b-1", templates, listing) == tmp_path / "a__b-1.sif"
    assert find_image("a__b-1", [f"{tmp_path}/none/{{instance_id}}.sif"], listing) is None
