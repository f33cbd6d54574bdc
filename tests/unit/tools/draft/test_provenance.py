"""run.lock.json: hashes that change with what they stand for, and the differences between two starts by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.environments.contract import texts
from recipes.errors import LaunchError
from tools.draft import provenance
from tools.draft.launch import read_launch
from tools.draft.provenance import (
    LaunchRecord,
    data_names,
    differences,
    model_digest,
    record_start_weights,
    recorded_name,
    require_same_side_files,
    write_run_lock,
)
from tools.draft.snapshot import PINS, CodeVersion
from tools.launch.command import Command, prepare


@pytest.fixture
def record(tmp_path: Path) -> LaunchRecord:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "train.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    return LaunchRecord(
        code=CodeVersion(commit="c" * 40, diff=""),
        stage="stage1.1",
        config_path=Path("stage.yaml"),
        config={"grpo": {"seed": 42}, "x": 1},
        data_paths=[tmp_path / "train.jsonl"],
        model_path=model,
        code_dir=tmp_path,
    )


def test_lock_holds_the_hashes(record, tmp_path):
    assert write_run_lock(tmp_path / "run", record) == []
    lock = json.loads((tmp_path / "run" / "run.lock.json").read_text(encoding="utf-8"))
    assert lock["seed"] == 42
    assert lock["stage"] == "stage1.1"
    assert lock["data"]["train.jsonl"]["sha256"] == hashlib.sha256(b"{}\n").hexdigest()
    assert lock["data"]["train.jsonl"]["manifest_sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert lock["packages"]["ray"] == "2.60.0"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock.json"]


def test_every_difference_to_the_last_start_is_named(record, tmp_path):
    write_run_lock(tmp_path / "run", record)
    (record.model_path / "model.safetensors").write_bytes(b"Weights")
    (tmp_path / "train.jsonl").write_text("{} \n", encoding="utf-8")
    changed = write_run_lock(tmp_path / "run", record)
    assert [line.split(":")[0] for line in changed] == ["data.train.jsonl.sha256", "model.weights_sha256"]
    assert write_run_lock(tmp_path / "run", record) == []


def test_another_configuration_is_named_by_its_keys(record, tmp_path):
    write_run_lock(tmp_path / "run", record)
    hidden = {"judge": {"api_key": "(hidden)"}}
    resolved = tmp_path / "run" / "resolved.json"  # as the driver of that start has written it
    resolved.write_text(json.dumps({"config": {**record.config, **hidden}}), encoding="utf-8")
    other = replace(record, config={"grpo": {"seed": 42}, "x": (1, 2), "judge": {"api_key": "secret"}})
    assert write_run_lock(tmp_path / "run", other) == ["configuration: x: was 1, is [1, 2]"]
    resolved.write_text("[]", encoding="utf-8")
    assert [line.partition(":")[0] for line in write_run_lock(tmp_path / "run", record)] == ["config.sha256"]


def test_another_image_is_a_difference(record, tmp_path):
    before, after = (f"sha256:{letter * 64}" for letter in "ab")
    write_run_lock(tmp_path / "run", replace(record, images={"CONTAINER": f"r.example/x@{before}"}))
    changed = write_run_lock(tmp_path / "run", replace(record, images={"CONTAINER": f"r.example/x@{after}"}))
    assert f"images.CONTAINER.digest: was {before}, is {after}" in changed


def test_differences_name_what_came_and_went():
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"d": 3}}) == [
        "b.c: was 2, is absent",
        "b.d: was absent, is 3",
    ]
    assert differences({"started": 1}, {"started": 2}) == []


def test_large_weights_are_hashed_by_their_ends(record, monkeypatch):
    whole = model_digest(record.model_path)
    monkeypatch.setattr(provenance, "_FULL_HASH_BYTES", 1)
    monkeypatch.setattr(provenance, "_END_BYTES", 2)
    ends = model_digest(record.model_path)
    assert (whole["weights_hash_of"], ends["weights_hash_of"]) == ("everything", "ends")
    (record.model_path / "model.safetensors").write_bytes(b"weXghts")  # same ends, same size
    assert model_digest(record.model_path) == ends
    (record.model_path / "model.safetensors").write_bytes(b"weighXs")
    assert model_digest(record.model_path) != ends


def test_weights_that_come_later_are_recorded_when_the_job_finds_them(record, tmp_path):
    run_dir = tmp_path / "run"
    pending = replace(record, model_path=tmp_path / "parent" / "latest" / "hf", is_model_there=False)
    write_run_lock(run_dir, pending)
    lock = json.loads((run_dir / "run.lock.json").read_text(encoding="utf-8"))
    assert lock["model"] == {"path": str(tmp_path / "parent" / "latest" / "hf")}
    assert lock["git"] == {"commit": "c" * 40, "diff_sha256": ""}

    assert record_start_weights(run_dir, record.model_path) == []
    found = json.loads((run_dir / "run.lock.json").read_text(encoding="utf-8"))["model"]
    assert found == {"path": str(record.model_path), **model_digest(record.model_path)}
    assert write_run_lock(run_dir, pending) == []  # submitted again: what the last job found stays until the next
    assert json.loads((run_dir / "run.lock.json").read_text(encoding="utf-8"))["model"] == found

    (record.model_path / "model.safetensors").write_bytes(b"Weights")
    (line,) = record_start_weights(run_dir, record.model_path)
    assert line.startswith("model.weights_sha256: was ")


def test_two_data_files_of_one_name_are_both_recorded(record, tmp_path):
    paths = []
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "data.jsonl")
        paths[-1].write_text(name, encoding="utf-8")
    write_run_lock(tmp_path / "run", replace(record, data_paths=paths))
    lock = json.loads((tmp_path / "run" / "run.lock.json").read_text(encoding="utf-8"))
    digests = {name: found["sha256"] for name, found in lock["data"].items()}
    assert digests == {f"{name}/data.jsonl": hashlib.sha256(name.encode()).hexdigest() for name in ("train", "val")}
    assert [recorded_name(path, paths, digests) for path in paths] == ["train/data.jsonl", "val/data.jsonl"]
    assert recorded_name(paths[1], paths[1:], digests) == "val/data.jsonl", "another start may have fewer files"
    assert recorded_name(paths[1], paths, {"data.jsonl"}) is None, "it could be the other one's"
    assert list(data_names([paths[0], paths[0]])) == ["data.jsonl"]


SIDE_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("generation_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "merges.txt"),
    *("tokenizer.model", "tokenization_own.py", "model.safetensors.index.json"),
)


def changed_side_files(run_dir):
    with pytest.raises(LaunchError, match="it is not what it was when the job was submitted") as caught:
        require_same_side_files(run_dir)
    return [problem.where for problem in caught.value.problems]


@pytest.mark.parametrize("name", SIDE_FILES)
def test_a_file_that_changes_prompts_or_the_end_of_answers_is_a_difference(record, tmp_path, name):
    file = record.model_path / name
    write_run_lock(tmp_path / "run", record)
    file.parent.mkdir(exist_ok=True)
    file.write_text("assistant", encoding="utf-8")
    (line,) = write_run_lock(tmp_path / "run", record)
    assert line.startswith(f"model.files.{name}: was absent, is ")
    file.write_text("assistnt.", encoding="utf-8")
    assert changed_side_files(tmp_path / "run") == [str(file)]
    assert record_start_weights(tmp_path / "run", record.model_path)[0].startswith(f"model.files.{name}: was ")
    assert write_run_lock(tmp_path / "run", record) == []
    file.unlink()
    assert changed_side_files(tmp_path / "run") == [str(file)]
    (line,) = write_run_lock(tmp_path / "run", record)
    assert line.endswith("is absent")


def test_a_tokenizer_and_a_template_of_their_own_are_part_of_it(record, tmp_path):
    own, template = tmp_path / "own", tmp_path / "mine.jinja"
    own.mkdir()
    for file in (own / "tokenizer.json", template):
        file.write_text("a", encoding="utf-8")
    tokenizer = {"name": str(own), "chat_template": str(template)}
    record = replace(record, config={**record.config, "policy": {"tokenizer": tokenizer}})
    write_run_lock(tmp_path / "run", record)
    for file in (own / "tokenizer.json", template):
        file.write_text("b", encoding="utf-8")
    assert changed_side_files(tmp_path / "run") == [str(own / "tokenizer.json"), str(template)]
    changed = write_run_lock(tmp_path / "run", record)
    assert [line.partition(":")[0] for line in changed] == ["chat_template.sha256", "tokenizer.files.tokenizer.json"]
    template.unlink()
    assert changed_side_files(tmp_path / "run")[-1] == str(template)
    require_same_side_files(tmp_path / "never_started")


def test_a_file_that_a_verifier_reads_is_part_of_it(record, tmp_path):
    program, office = tmp_path / "mine.py", tmp_path / "office"
    office.mkdir()
    for file in (program, office / "table.csv"):
        file.write_text("one", encoding="utf-8")
    gym = {
        "reward": {"resources_servers": {"reward": {"file": str(program)}}},
        "workplace_assistant": {"resources_servers": {"workplace_assistant": {"tables": str(office)}}},
    }
    record = replace(record, config={**record.config, "env": {"nemo_gym": gym}})
    write_run_lock(tmp_path / "run", record)
    require_same_side_files(tmp_path / "run")
    for file in (program, office / "table.csv"):
        file.write_text("two", encoding="utf-8")
    assert changed_side_files(tmp_path / "run") == [str(program), str(office)]
    names = [line.partition(": ")[0] for line in write_run_lock(tmp_path / "run", record)]
    assert names == ["named_files.reward.file.sha256", "named_files.workplace_assistant.tables.sha256"]
    require_same_side_files(tmp_path / "run")
    (office / "more.csv").write_text("more", encoding="utf-8")
    program.unlink()
    assert changed_side_files(tmp_path / "run") == [str(program), str(office)]


OFFICE = "env.nemo_gym.workplace_assistant.resources_servers.workplace_assistant.tables"
REWARD = "++env.nemo_gym.reward.resources_servers.reward.file"


@pytest.mark.parametrize("tables", ["data/side_files/workplace_assistant", "data/office"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_files_are_those_that_an_older_snapshot_has(record, tmp_path, monkeypatch, tables, is_whole):
    """With REFRESH_CODE_SNAPSHOT=false the job reads its copy, whatever the checkout has by now."""
    copy = tmp_path / "snapshots" / "exp" / "older"
    program = tmp_path / "mine.py" if is_whole else copy / "configs" / "data" / "mine.py"
    content = {copy / PINS: "old pins", copy / tables / "a.csv": "old", program: "old"}
    for file, text in {**content, copy / "COMMIT": "c" * 40, copy / "DIFF": ""}.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    env = {
        **{"EXP_NAME": "exp", "CONFIG_PATH": "configs/tiny/stage1_rlvr.yaml", "LAUNCHER": "local"},
        **{"MODEL_PATH": str(record.model_path), "RESULTS_DIR": str(tmp_path / "results")},
        **{name: str(tmp_path / "train.jsonl") for name in ("TRAIN_PATH", "VAL_PATH")},
    }
    named = str(program) if is_whole else "configs/data/mine.py"
    launch = read_launch("", (f"++{OFFICE}={tables}", f"{REWARD}={named}"), env)
    prepare(Command(launch=launch, code=record.code, code_dir=copy, argv=()))
    run_dir = tmp_path / "results" / "exp"
    old = hashlib.sha256(b"old").hexdigest()
    assert provenance.read_run_lock(run_dir)["named_files"] == {
        "reward.file": {"path": named, "sha256": old},
        "workplace_assistant.tables": {"path": tables, "sha256": hashlib.sha256(f"a.csv {old}\n".encode()).hexdigest()},
    }
    monkeypatch.setattr(texts, "CONFIG_DIR", copy / "configs")  # as for the code that runs in the copy
    require_same_side_files(run_dir)
    program.write_text("new", encoding="utf-8")
    assert changed_side_files(run_dir) == [str(program)]


@pytest.mark.parametrize("text", ["[]", "null", "5", '"x"', '{"model": []}', '{"data": 5}', "", '{"m', "\x00"])
def test_a_lock_of_another_kind_is_one_clear_error(record, tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock.json").write_text(text, encoding="utf-8")
    with pytest.raises(LaunchError, match=r"run\.lock\.json: it cannot be read .*; restore it, or remove it"):
        write_run_lock(tmp_path / "run", record)
