"""How an instance of a SWE task finds its image, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.environments.swe.images import Listing, candidates, find_image
from tests.unit.tools.launch_case import ROW, LaunchCase, sif_file, write_case
from tools.draft.findings import CODES
from tools.draft.launch import read_launch
from tools.images.lock import read_image
from tools.launch.command import task_image_word


@pytest.fixture
def case(tmp_path: Path) -> LaunchCase:
    written = write_case(tmp_path)
    written.write_task_rows()
    return written


def found(case: LaunchCase, **variables: str) -> list[tuple[str, str]]:
    findings = case.examine("stage2.2", SCALE="tiny", **variables)
    return [(finding.code, finding.problem.what) for finding in findings if finding.code.startswith("SIF")]


@pytest.mark.parametrize(
    ("instance", "name"),
    [
        ("django__django-11099", "swebench_sweb.eval.x86_64.django_1776_django-11099.sif"),
        ("Project-MONAI__MONAI-1030", "swegym_sweb.eval.x86_64.project-monai_s_monai-1030.sif"),
        ("Project-MONAI__MONAI-1030", "swegym_sweb.eval.x86_64.Project-MONAI_s_MONAI-1030.sif"),
        ("aio-libs__Aiohttp-0a1b2c", "r2egym_aiohttp_final_0a1b2c.sif"),
        ("plain", "r2egym_plain.sif"),
    ],
)
def test_registries_write_an_instance_in_several_ways(tmp_path, instance, name):
    templates = [
        str(tmp_path / text)
        for text in (
            "swebench_sweb.eval.x86_64.{instance_id}.sif",
            "swegym_sweb.eval.x86_64.{instance_id}.sif",
            "r2egym_{instance_id}.sif",
        )
    ]
    assert find_image(instance, templates, Listing()) is None
    (tmp_path / name).touch()
    assert find_image(instance, templates, Listing()) == tmp_path / name
    assert find_image(f"{instance}2", templates, Listing()) is None  # never the image of another instance


def test_candidates_have_no_duplicates():
    assert candidates("a__b-1") == ["a__b-1", "a_1776_b-1", "a_s_b-1", "b_final_1"]


def test_missing_images_are_counted_with_their_rows(case):
    assert found(case) == []
    rows = [
        {**ROW, "responses_create_params": {"input": "x", "metadata": {"instance_id": f"a__b-{number // 2}"}}}
        for number in range(14)
    ]
    case.write_rows("train.jsonl", *rows)
    names = ", ".join(f"a__b-{number}" for number in range(5))
    assert found(case) == [("SIF002", f"no image of 7 of 8 instances (14 rows): {names}, ...")]


def test_the_directory_itself_may_be_missing(case):
    needed = "each of the 1 instances of the data needs a task image"
    assert found(case, SIF_DIR="/no/where") == [("SIF001", f"no directory /no/where: {needed}")]


def test_a_formatter_of_the_user_wins(case):
    assert [code for code, _ in found(case, CONTAINER_FORMATTER="x/{instance_id}.sif")] == ["SIF002"]
    case.sif.rename(case.sif.with_name("django_s_django-11099.sif"))
    assert found(case, CONTAINER_FORMATTER='["x/{instance_id}.sif", "{instance_id}.sif"]') == []


def test_other_files_and_cut_ones_are_named(case):
    case.sif.write_bytes(b"<html>")
    assert found(case) == [("SIF003", "this is not a SIF file")]
    case.sif.unlink()
    case.sif.mkdir()  # a root file system
    assert found(case) == []
    case.sif.rmdir()
    case.sif.write_bytes(sif_file(content=100, cut=30))
    assert found(case) == [("SIF003", "the file is cut: 198 bytes of 228")]


def test_rows_beside_the_list_of_good_instances_are_refused(case):
    good = case.sif.parent / "good_instances.txt"
    good.write_text("django__django-11099\n", encoding="utf-8")
    assert found(case) == []
    good.write_text("django__django-11098\na copy of django__django-11099\n", encoding="utf-8")  # one id per line
    assert [code for code, _ in found(case)] == ["SIF004"]
    assert found(case)[0][1].startswith("1 of 1 instances")


def test_commands_that_a_patch_can_deceive_are_a_note(case):
    def task(command: object, parser: str = "pytest") -> dict[str, object]:
        metadata = {"instance_id": "django__django-11099", "test_cmd": command, "log_parser": parser}
        return {**ROW, "responses_create_params": {"input": "x", "metadata": metadata}}

    case.write_rows(
        "train.jsonl", task("cd a && pytest x"), task("make test", "exit_status"), task("make test"), task([])
    )
    assert found(case) == [
        ("SIF005", "the output or status of 1 commands (2 rows) is believed as it is, such as: string 'make test'")
    ]
    assert CODES["SIF005"].severity == "note"


def test_stages_without_tasks_need_no_images(case):
    assert not [code for code in case.codes("stage2.1", SCALE="tiny", SIF_DIR="") if code.startswith("SIF")]


@pytest.mark.parametrize("size", [0, 3, 44, 60])
def test_headers_that_end_early_are_no_crash(tmp_path, size):
    (tmp_path / "a").write_bytes(sif_file(content=9)[:size])
    (tmp_path / "b").write_bytes((b"hsqs" + bytes(100))[:size])
    assert read_image(tmp_path / "a").kind in ("none", "SIF")
    assert read_image(tmp_path / "b").kind in ("none", "squashfs")
    assert read_image(tmp_path / "a").kind == "none" or read_image(tmp_path / "a").is_cut


def test_a_job_has_every_node_start_one_image_of_its_rows(case):
    def word(stage: str, **variables: str) -> tuple[str, ...]:
        return task_image_word(read_launch(stage, [], {**case.env, "SCALE": "tiny", **variables}))

    case.sif.write_text("no image", encoding="utf-8")
    assert word("stage2.2") == ()
    case.sif.unlink()
    case.sif.mkdir()  # a root file system
    assert word("stage2.2") == (f"--task-image={case.sif}",)
    assert word("stage2.2", ENGINE="nemo_rl") == ()  # whose agents start their images in their own way
    assert word("stage2.1") == word("stage2.2", SIF_DIR="/no/where") == ()
