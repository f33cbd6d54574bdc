"""Which image a row needs: the name in a registry and the name of the file, for all three families."""

from __future__ import annotations

import json

import pytest

from recipes.environments.swe.images import Listing
from recipes.errors import DataError
from tools.data.files.transfer import is_commit
from tools.task_images.build import shadowed
from tools.task_images.instances import (
    DATASETS_FILE,
    Reference,
    family_of,
    instance_from,
    instances_of_rows,
    instances_of_table,
    load_datasets,
)

VERIFIED, GYM, R2E = "princeton-nlp/SWE-bench_Verified", "SWE-Gym/SWE-Gym", "R2E-Gym/R2E-Gym-Subset"


def row(instance: str, dataset: str, **facts: object) -> str:
    metadata = {"instance_id": instance, "dataset_name": dataset, "instance_dict": json.dumps(facts)}
    return json.dumps({"responses_create_params": {"input": [], "metadata": metadata}}) + "\n"


@pytest.mark.parametrize(
    ("dataset", "instance", "reference", "file"),
    [
        (
            VERIFIED,
            "django__django-11099",
            "docker.io/swebench/sweb.eval.x86_64.django_1776_django-11099:latest",
            "swebench_sweb.eval.x86_64.django_1776_django-11099.sif",
        ),
        (
            GYM,
            "Project-MONAI__MONAI-1030",
            "docker.io/xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1030:latest",
            "swegym_sweb.eval.x86_64.Project-MONAI_s_MONAI-1030.sif",
        ),
        (
            R2E,
            "aio-libs__Aiohttp-f0D7",
            "docker.io/namanjain12/aiohttp_final:f0D7",  # a tag keeps its case
            "r2egym_aiohttp_final_f0D7.sif",
        ),
    ],
)
def test_families_name_their_images(tmp_path, dataset, instance, reference, file):
    instance = instance_from({"instance_id": instance, "dataset_name": dataset})
    assert (str(instance.reference), instance.file) == (reference, file)
    assert instance.existing(tmp_path, Listing()) is None
    (tmp_path / file).touch()
    assert instance.existing(tmp_path, Listing()) == tmp_path / file  # the agent finds what is made


def test_a_row_may_name_its_image(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        row("aio-libs__aiohttp-1", R2E, docker_image="registry.example:5000/Mine/aiohttp_final:1"), encoding="utf-8"
    )
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: .*: got an image in registry.example:5000, expected docker.io; .*"
    ):
        instances_of_rows([rows])
    (instance,) = instances_of_rows([rows], frozenset(("docker.io", "registry.example:5000")))
    assert str(instance.reference) == "registry.example:5000/mine/aiohttp_final:1"
    assert instance.reference.api == "https://registry.example:5000/v2/mine/aiohttp_final"
    assert instance.file == "r2egym_aiohttp_final_1.sif"


def test_rows_without_an_instance_need_nothing_and_others_count_once(tmp_path):
    rows = tmp_path / "rows.jsonl"
    plain = json.dumps({"responses_create_params": {"input": "x", "metadata": None}}) + "\n"
    rows.write_text(plain + row("a__b-1", VERIFIED) * 2 + row("a__b-2", VERIFIED), encoding="utf-8")
    assert [instance.id for instance in instances_of_rows([rows])] == ["a__b-1", "a__b-2"]


def test_rows_of_which_none_needs_an_image_are_the_wrong_rows(tmp_path):
    plain = json.dumps({"responses_create_params": {"input": "x"}}) + "\n"
    for name, text in (("train.jsonl", plain), ("val.jsonl", "")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
    with pytest.raises(DataError, match=r"train.jsonl and .*val.jsonl: no row has .*instance_id.* BLEND=swe2"):
        instances_of_rows(files)


def test_many_wrong_rows_are_counted(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{\n" * 30, encoding="utf-8")
    with pytest.raises(DataError) as failure:
        instances_of_rows([tmp_path / "rows.jsonl"])
    lines = str(failure.value).splitlines()
    assert [line.split(":")[1] for line in lines[:20]] == [str(number) for number in range(1, 21)]
    assert lines[20:] == [
        f"{tmp_path}/rows.jsonl: 10 more rows are wrong; run `make data-validate`, which names every wrong row"
    ]


def test_every_wrong_row_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    deep = json.dumps({"responses_create_params": {"metadata": {"instance_id": "x", "instance_dict": "[" * 100_000}}})
    rows.write_text(
        row("a__b-1", "somebody/else") + "{\n" + row("a__b-2", VERIFIED) + row("plain", R2E) + deep, encoding="utf-8"
    )
    with pytest.raises(DataError) as raised:
        instances_of_rows([rows, tmp_path / "absent.jsonl"])
    places = [problem.where for problem in raised.value.problems]
    assert places == [f"{rows}:1: a__b-1", f"{rows}:2", f"{rows}:4: plain", f"{rows}:5", str(tmp_path / "absent.jsonl")]


@pytest.mark.parametrize(
    ("text", "full", "api"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest", "https://registry-1.docker.io/v2/library/ubuntu"),
        ("127.0.0.1:5000/a/b:C", "127.0.0.1:5000/a/b:C", "http://127.0.0.1:5000/v2/a/b"),
        ("localhost/a", "localhost/a:latest", "http://localhost/v2/a"),
        ("localhost.example.com/a", "localhost.example.com/a:latest", "https://localhost.example.com/v2/a"),
    ],
)
def test_names_are_read_as_docker_reads_them(text, full, api):
    assert (str(Reference.parse(text)), Reference.parse(text).api) == (full, api)


def test_a_mirror_stands_before_the_name():
    reference = Reference.parse("swebench/x:1")
    assert str(reference.behind("mirror.example/hub/")) == "mirror.example/hub/swebench/x:1"
    assert str(reference.behind("mirror.example:5000")) == "mirror.example:5000/swebench/x:1"
    assert reference.behind("") == reference
    elsewhere = Reference.parse("registry.example/x:1")
    assert elsewhere.behind("mirror.example") == elsewhere  # a mirror is one of Docker Hub


@pytest.mark.parametrize(
    "text", ["", "a:", "host.example/", "a/../b", "a?b=c", "me@host.example/a", "host.example:x/a", "a b", "a\n"]
)
def test_what_is_not_a_name_is_refused(text):
    with pytest.raises(ValueError, match="not the name of an image"):
        Reference.parse(text)


def test_an_unknown_family_is_refused():
    assert family_of("nebius/swe-bench_extra") == "swebench"
    with pytest.raises(ValueError, match="dataset_name"):
        family_of("")


def test_tables_of_the_data_sets_give_instances():
    (instance,) = instances_of_table([{"docker_image": "namanjain12/numpy_final:0a1b"}], R2E)
    assert (instance.id, instance.file) == ("numpy_final_0a1b", "r2egym_numpy_final_0a1b.sif")
    assert str(instance.reference) == "docker.io/namanjain12/numpy_final:0a1b"


def test_a_file_that_would_be_found_first_is_in_the_way(tmp_path):
    instance = instance_from({"instance_id": "a__b-1", "dataset_name": VERIFIED})
    assert shadowed(instance, None) is None
    assert shadowed(instance, tmp_path / instance.file) is None
    other = tmp_path / "swebench_sweb.eval.x86_64.a__b-1.sif"
    other.touch()
    (tmp_path / instance.file).touch()
    assert instance.existing(tmp_path, Listing()) == other
    failure = shadowed(instance, other)
    assert failure is not None and failure.cause == "shadowed" and str(other) in failure.detail


def test_the_published_data_sets_are_at_commits():
    entries = load_datasets(DATASETS_FILE)
    assert {name: family_of(name) for name in entries} == {R2E: "r2egym", GYM: "swegym", VERIFIED: "swebench"}
    assert all(is_commit(entry["revision"]) for entry in entries.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("datasets: {a/b: {revision: main}}", "datasets.a/b: got {'revision': 'main'}, expected `revision`, `split`"),
        ("datasets: {a/b: {revision: main, split: x, rows: 3}}", "datasets.a/b: got"),
        ("datasets: {a/b: {revision: main, split: x, instances: many}}", "datasets.a/b: got"),
        ("sets: 3", "it has no `datasets:` with one entry per name"),
        ("datasets: 3", "it has no `datasets:` with one entry per name"),
    ],
)
def test_a_wrong_table_of_data_sets_is_named(tmp_path, content, message):
    (tmp_path / "table.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_datasets(tmp_path / "table.yaml")
    assert message in str(caught.value)
