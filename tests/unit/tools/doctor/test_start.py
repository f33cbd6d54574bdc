"""Whatever a start refuses that can be known before it, the doctor says first, or a rule between keys does."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from recipes.config.fits import FORM_FILE, IN_PARTS, optimizer_keys
from recipes.config.load import load_config, require_valid
from recipes.config.tree import Config
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.errors import InputError
from recipes.generation.engine_args import engine_args, stop_token_ids
from recipes.grpo.checkpoint import SavedState, complete, latest_checkpoint, make_directory, write_state
from recipes.grpo.data import CollectorState, DataIdentity, PromptDataset, PromptStream
from recipes.grpo.setup import _open_data, _saved_state, _validation
from recipes.sinks import import_wandb
from recipes.weight_files import read_weights
from tests.unit.grpo.checkpoint_case import group
from tests.unit.tools.launch_case import ENOUGH, MODEL, PLACEHOLDER_ROW, ROW, LaunchCase, write_case
from tests.weight_headers import safetensors
from tools.doctor import machine, model, services

ROOT = Path(__file__).resolve().parents[4]
TINY = ROOT / "configs" / "tiny" / "stage1_rlvr.yaml"
COMPARED_ROW = {**ROW, "agent_ref": {"name": "genrm_simple_agent"}}
COMPARING = (
    "env.judge_probe='off'",  # nobody is there to be asked
    "env.nemo_gym.genrm={responses_api_models: {vllm_model: {model: m, base_url: 'http://127.0.0.1:1/v1'}}}",
    "env.nemo_gym.genrm_compare={resources_servers: {genrm_compare: {genrm_model_server: {name: genrm}}}}",
)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchCase:
    for module in (machine, model):
        monkeypatch.setattr(module, "count_gpus", lambda: 0)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(services, "probe", lambda url: "")  # a judge answers
    return write_case(tmp_path)


def settings(case: LaunchCase, name: str = "config.json", **values: object) -> None:
    """Change the settings of the start weights."""
    path = case.export / name
    content = json.loads(path.read_bytes()) if path.is_file() else {}
    write(case, name, json.dumps(content | values).encode())


def write(case: LaunchCase, name: str, content: bytes) -> None:
    """Replace a file of the start weights, and its checksum."""
    (case.export / name).write_bytes(content)
    files = {f"hf/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in case.export.iterdir()}
    (case.export.parent / "COMPLETE").write_text(json.dumps(files), encoding="utf-8")


def save(case: LaunchCase, *, age: int = 0, shuffle: bool = False, parts: int = 1, **model: object) -> Path:
    """Save step 4 of the run, with a group `age` steps old, an optimizer in `parts` parts, and a model of this form."""
    root, data = case.directory / "results" / "exp" / "checkpoints", PromptDataset(case.directory / "train.jsonl")
    drawn = PromptStream(data, num_epochs=1, shuffle=shuffle, seed=42).draw(0)
    assert drawn is not None
    waiting = replace(group(0), target_step=4 + age, prompt=drawn[0])
    collector = CollectorState(
        position=0,
        in_flight=(),
        finished=(replace(waiting, tokens=None),) if age else (),
        finished_tokens=(waiting.tokens,) if age else (),
        failed=(),
    )
    identity = DataIdentity(sha256=data.sha256, num_rows=len(data), shuffle=shuffle, seed=42)
    temporary = make_directory(root, 4)
    write_state(temporary, SavedState(step=4, data=identity, collector=collector, ledger=(), metrics={}))
    (temporary / "hf").mkdir()
    own = json.loads((case.export / "config.json").read_bytes())
    (temporary / "hf" / "config.json").write_text(json.dumps(own | model), encoding="utf-8")
    (temporary / "policy").mkdir()
    (temporary / "policy" / "weights").write_bytes(b"weights")
    keys = optimizer_keys(require_valid(load_config(TINY, [ENOUGH])).policy, has_experts=False)
    form = {"form": IN_PARTS, "layout": {"tensor_model_parallel_size": parts}, "optimizer_keys": keys}
    (temporary / "policy" / FORM_FILE).write_text(json.dumps(form), encoding="utf-8")
    complete(root, 4, temporary)
    return root / "step_000004"


def damage(case: LaunchCase) -> None:
    (save(case) / "policy" / "weights").write_bytes(b"other")


def lose_buffer(case: LaunchCase) -> None:
    """Leave a checkpoint as an older version wrote it."""
    step = save(case)
    (step / "replay_buffer.safetensors").unlink()
    files = {"state.json": hashlib.sha256((step / "state.json").read_bytes()).hexdigest()}
    (step / "COMPLETE").write_text(json.dumps(files), encoding="utf-8")


def begin(config: Config, case: LaunchCase) -> None:
    """Do what a start does before it joins Ray, and what policy and engines do first, in the order of a start."""
    codec = ChatCodec.from_config(config.policy)
    with_environments = Environments.from_config(config.env, codec)
    stream, validation = _open_data(config, with_environments)
    _validation(config, validation, with_environments)
    root = case.directory / "results" / "exp" / "checkpoints"
    _saved_state(latest_checkpoint(root), stream, config)
    if config.logger.wandb_enabled:
        import_wandb()
    read_weights(case.export)
    stop_token_ids(case.export)
    engine_args(config.policy.generation, model_path="", seed=0, is_cpu=True)


@dataclass(frozen=True)
class Refusal:
    """How a launch is broken, and the code of the doctor that says so."""

    code: str
    breaks: Callable[[LaunchCase], object] = lambda case: None
    overrides: tuple[str, ...] = ()
    is_tried: bool = True  # whether `begin` refuses it: else the policy does, once torch is loaded


GUESS = "policy.generation.vllm_kwargs={speculative_config: {method: %s, num_speculative_tokens: 1}}"
NO_CACHE = "policy.generation.vllm_cfg.enable_prefix_caching=false"
REFUSALS = {
    "rows of another shape": Refusal("DAT004", lambda case: case.write_rows("train.jsonl", {**ROW, "agent_ref": {}})),
    "rows that were not filled": Refusal("DAT002", lambda case: case.write_rows("train.jsonl", PLACEHOLDER_ROW)),
    "rows without an agent": Refusal(
        "DAT003", lambda case: case.write_rows("val.jsonl", {**ROW, "agent_ref": {"name": "nobody"}})
    ),
    "rows for no step": Refusal("DAT012", overrides=("grpo.max_num_epochs=1",)),
    "answers compared alone": Refusal(
        "DAT013",
        lambda case: case.write_rows("val.jsonl", COMPARED_ROW),
        ("grpo.val_num_generations_per_prompt=1", *COMPARING),
    ),
    "a checkpoint of other data": Refusal("DAT014", lambda case: save(case, shuffle=True)),
    "a checkpoint of rows since changed": Refusal(
        "DAT014", lambda case: (save(case), case.write_rows("train.jsonl", ROW, ROW))
    ),
    "a checkpoint of another model": Refusal("PTH011", lambda case: save(case, num_hidden_layers=7)),
    "a checkpoint that waits with too old groups": Refusal("CFG005", lambda case: save(case, age=7)),
    "an optimizer of another form": Refusal(
        "CFG006",
        save,
        ("policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=true",),
        is_tried=False,
    ),
    "an optimizer that was divided otherwise": Refusal("CFG006", lambda case: save(case, parts=2), is_tried=False),
    "a damaged checkpoint": Refusal("PTH009", damage),
    "a checkpoint of an older version": Refusal("PTH009", lose_buffer),
    "a checkpoint that was not finished": Refusal("PTH007", lambda case: (save(case) / "COMPLETE").unlink()),
    "settings that hold no object": Refusal("MDL001", lambda case: write(case, "config.json", b"[]")),
    "settings of generation that hold no object": Refusal(
        "MDL001", lambda case: write(case, "generation_config.json", b"3")
    ),
    "an end token that is no id": Refusal("MDL001", lambda case: settings(case, eos_token_id="</s>")),
    "a tokenizer that is none": Refusal("MDL007", lambda case: write(case, "tokenizer.json", b"{}")),
    "a template that cannot be compiled": Refusal(
        "MDL007", lambda case: settings(case, "tokenizer_config.json", chat_template="{% for %}")
    ),
    "cut weights": Refusal("MDL002", lambda case: write(case, "model.safetensors", b"cut")),
    "weights that the index does not name": Refusal(
        "MDL001", lambda case: write(case, "model.safetensors.index.json", b'{"weight_map": {"w": "lost.safetensors"}}')
    ),
    "an architecture that is not built": Refusal(
        "MDL009", lambda case: settings(case, architectures=["OtherModel"]), is_tried=False
    ),
    "a value of the model that is not built": Refusal(
        "MDL009", lambda case: settings(case, attention_bias=True), is_tried=False
    ),
    "rotary positions that are scaled": Refusal(
        "MDL009",
        lambda case: settings(case, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}),
        is_tried=False,
    ),
    "heads that the model lacks": Refusal(
        "MDL004", overrides=("policy.megatron_cfg.mtp_num_layers=1",), is_tried=False
    ),
    "heads whose weights are missing": Refusal(
        "MDL004",
        lambda case: settings(case, num_nextn_predict_layers=1),
        ("policy.megatron_cfg.mtp_num_layers=1",),
        is_tried=False,
    ),
    "guesses by heads that the model lacks": Refusal("MDL004", overrides=(GUESS % "mtp", NO_CACHE), is_tried=False),
    "guesses that only GPUs make": Refusal("ENG008", overrides=(GUESS % "ngram", NO_CACHE)),
    "guesses beside a prefix cache": Refusal(
        "ENG008",
        lambda case: (
            settings(case, num_nextn_predict_layers=1),
            write(case, "model.safetensors", safetensors({"mtp.w": (2,)})),
        ),
        (GUESS % "mtp", "policy.generation.vllm_cfg.enable_prefix_caching=true"),
    ),
    "a package for the log": Refusal("WAN001", overrides=("logger.wandb_enabled=true",)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_the_doctor_says_first_what_a_start_refuses(case: LaunchCase, name: str) -> None:
    refusal = REFUSALS[name]
    options = ("logger.tensorboard_enabled=false", *refusal.overrides)
    refusal.breaks(case)
    said = case.examine("", *options, LAUNCHER="local", WANDB_MODE="offline")
    codes = {finding.code for finding in said if finding.severity == "error"}
    assert {code for code in codes if code[:3] != "PRT"} == {refusal.code}  # tests beside this one hold ports, too
    files = [f"policy.model_name={case.export}", f"data.train.data_path={case.directory}/train.jsonl"]
    files.append(f"data.validation.data_path={case.directory}/val.jsonl")
    config = require_valid(load_config(TINY, [*files, ENOUGH, *options]))
    if refusal.is_tried:
        with pytest.raises(InputError) as refused:
            begin(config, case)
        problems = {(problem.where, problem.what) for problem in refused.value.problems}
        assert problems & {(finding.problem.where, finding.problem.what) for finding in said} or refusal.code[:3] in (
            "DAT",  # a row is named by its line, and equal ones once
            "PTH",
        ), (problems, said)


def test_a_damaged_checkpoint_before_a_whole_one_is_noted(case: LaunchCase) -> None:
    save(case)
    newest = case.directory / "results" / "exp" / "checkpoints" / "step_000005"
    newest.mkdir()
    (newest / "COMPLETE").write_text(json.dumps({"state.json": "0" * 64}), encoding="utf-8")
    (finding,) = case.examine(LAUNCHER="local")
    assert (finding.code, finding.severity) == ("PTH010", "note")
    assert latest_checkpoint(newest.parent) == newest.parent / "step_000004"


# Every function that refuses a wrong input when a run starts -> the cases above, or where it is said first.
SAID_BY: dict[str, Any] = {
    "environments/agents/coding/harness.py load_harness": "files of this repository, which a lint reads",
    "environments/agents/coding/harness.py harnesses": "the same",
    "environments/agents/coding/settings.py coding_settings": "CFG001: test_data.py",
    "environments/instances.py _declared_in": "nothing: a mistake in a file of this repository, which its tests name",
    "environments/instances.py servers_of": "CFG001: test_data.py",
    "environments/instances.py coding_settings_of": "CFG001: test_data.py",
    "environments/chat/codec.py _compiled": "a template that cannot be compiled",
    "environments/chat/codec.py template_of": "MDL007: test_model.py",
    "environments/chat/codec.py _id_of": "MDL007: test_model.py",
    "environments/swe/containers/runtime.py runtime_of_machine": "CTR001: test_task_images.py",
    "cluster/connect.py connect": "the launch sets RAY_ADDRESS, whatever the shell has: test_local.py",
    "cluster/ports.py hold": "PRT001: test_doctor.py",
    "cluster/ports.py hold_in_range": "PRT001: test_doctor.py",
    "generation/engine_args.py engine_args": "guesses that only GPUs make",
    "generation/engine_args.py stop_token_ids": "an end token that is no id",
    "generation/judges.py serve_arguments": "nothing: vLLM alone knows its arguments, and takes seconds to load",
    "grpo/checkpoint.py latest_checkpoint": "a damaged checkpoint",
    "grpo/checkpoint.py complete_export": "MDL003: test_model.py",
    "grpo/checkpoint.py require_whole": "read by `make export-hf` and `make verify-checkpoint` alone",
    "grpo/checkpoint.py _write_complete": "nothing: what the ranks of a save have written is not here",
    "grpo/checkpoint.py load_state": "a checkpoint of an older version",
    "grpo/data.py require_rows": "rows of another shape",
    "grpo/setup.py _open_data": "rows for no step",
    "grpo/setup.py _launch_judges": "MDL004: test_model.py",
    "grpo/setup.py _probe_judges": "JDG006: test_data.py; nothing of judges that the run starts, before they run",
    "grpo/setup.py _validation": "answers compared alone",
    "grpo/setup.py _saved_state": "a checkpoint that waits with too old groups",
    "grpo/setup.py on_same_data": "a checkpoint of other data",
    "policy/checkpoint.py load": "an optimizer of another form",  # without metadata.json PTH009, by its checksum
    "policy/checkpoint.py _require_whole_weights": "nothing: such a checkpoint is older than the file of its form",
    "policy/export.py export_checkpoint": "read by `make export-hf` alone",
    "policy/export.py _check_shapes": "read by `make export-hf` alone",
    "policy/heads.py train_heads": "heads that the model lacks",
    "policy/hf.py chosen_template": "MDL007: test_model.py",
    "policy/hf.py read_config": "an architecture that is not built",
    "policy/hf.py __call__": "MDL011: test_model.py",
    "policy/hf.py check_all_used": "MDL011: test_model.py",
    "policy/layout.py check_layout": "rules between keys",
    "policy/layout.py check_model_fits": "MDL004: test_model.py",
    "policy/step.py build_trainer": "ENG006: test_model.py",
    "sinks.py __init__": "nothing: only the node of the driver knows whether an address of its own is free",
    "sinks.py import_wandb": "a package for the log",
    "weight_files.py require_object": "settings that hold no object",
    "weight_files.py read_weights": "weights that the index does not name",
    "weight_files.py read_header": "cut weights",
    "weight_files.py _index": "MDL001: test_model.py",
    "weight_files.py _tensors": "MDL001: test_model.py",
}
BY_COMMANDS = {"config/load.py"}  # files whose refusals are the doctor's own findings, CFG001 to CFG003 and ENV003


def test_every_refusal_of_a_start_is_in_the_table() -> None:
    kinds = {"ConfigError", "DataError", "CheckpointError", "LaunchError", "InputError"}
    refusing = set()
    for path in sorted((ROOT / "recipes").rglob("*.py")):
        name = str(path.relative_to(ROOT / "recipes"))
        if name in BY_COMMANDS:
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
                if any(isinstance(call, ast.Call) and getattr(call.func, "id", "") in kinds for call in raised):
                    refusing.add(f"{name} {function.name}")
    assert refusing == set(SAID_BY)
    assert {text for text in SAID_BY.values() if " " in text and text in REFUSALS} <= set(REFUSALS)


def test_a_checkpoint_of_another_model_is_named_with_what_differs(case: LaunchCase) -> None:
    other = {name: 7 for name in MODEL if name != "architectures"} | {"architectures": ["Another"]}
    path = save(case, **other, torch_dtype="float64", eos_token_id=5, transformers_version="0", of_a_newer_version=1)
    [finding] = [finding for finding in case.examine(LAUNCHER="local") if finding.code == "PTH011"]
    assert finding.problem.where == str(case.export)
    named = 'architectures is ["Qwen3ForCausalLM"], was ["Another"], max_position_embeddings is 262144, was 7, '
    named += "num_attention_heads is 4, was 7 and 1 more"
    assert finding.problem.wrong == f"another model than that of {path}: {named}"
    assert "EXP_NAME" in finding.problem.fix and "MODEL_PATH" in finding.problem.fix


@pytest.mark.parametrize("is_same", [True, False])
def test_weights_that_a_resume_does_not_read_are_noted(case: LaunchCase, is_same: bool) -> None:
    path = save(case)
    before = case.export if is_same else case.directory / "others"
    lock = json.dumps({"model": {"path": str(before)}})
    (path.parents[1] / "run.lock.json").write_text(lock, encoding="utf-8")
    found = [finding for finding in case.examine(LAUNCHER="local") if finding.code == "PTH012"]
    assert bool(found) != is_same
    assert all(f"the run began with {before}: it goes on from step_000004" in one.problem.wrong for one in found)
    assert all(one.severity == "note" for one in found)


def test_what_a_checkpoint_of_an_older_version_does_not_say_is_said(case: LaunchCase) -> None:
    path = save(case)
    (path / "policy" / FORM_FILE).unlink()
    sums = json.loads((path / "COMPLETE").read_bytes())
    del sums[f"policy/{FORM_FILE}"]
    (path / "COMPLETE").write_text(json.dumps(sums), encoding="utf-8")
    [finding] = case.examine(LAUNCHER="local")
    assert (finding.code, finding.severity, finding.problem.where) == ("CFG007", "note", str(path))
    assert "whether its optimizer fits is not known from here" in finding.problem.wrong
