"""Hugging Face directories: several weight files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from recipes.environments.chat.codec import ChatCodec
from recipes.errors import CheckpointError, ConfigError, InputError, PolicyError
from recipes.files import FileSum, sha256_of
from recipes.generation.engine_args import stop_token_ids
from recipes.policy import hf
from tools.sizing.architecture import read_architecture
from tools.tiny.model import build_tokenizer


def test_weights_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 40)
    tensors = {name: torch.full((4,), float(i)) for i, name in enumerate("abcde")}  # 16 bytes each
    hf.write_weights(_shapes(tensors), iter(tensors.items()), tmp_path)

    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == 80
    assert index["weight_map"]["c"] == files[1]
    reader = hf.WeightReader(tmp_path)
    assert all(torch.equal(reader(name), tensor) for name, tensor in tensors.items())


def test_tensors_of_two_types_are_read_back_by_safetensors(tmp_path: Path) -> None:
    """A tensor of an odd number of 16-bit values comes before one of 32 bits."""
    tensors = {"a": torch.randn(3).bfloat16(), "b": torch.randn(2, 2), "c": torch.randn(5, 2).bfloat16().t()}
    hf.write_weights(_shapes(tensors), iter(tensors.items()), tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == tensor.dtype and torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_files_of_copies_are_those_of_the_stream_whoever_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 40)
    tensors = {"a": torch.randn(3).bfloat16(), "b": torch.randn(2, 2), "c": torch.randn(5, 2).bfloat16().t()}
    tensors |= {name: torch.randn(4) for name in "defg"}
    shapes = _shapes(tensors)
    hf.write_weights(shapes, iter(tensors.items()), tmp_path / "stream")
    files = hf.in_files(shapes)
    sums = {}
    for writer in range(3):
        own = {name: files[name] for name in list(files)[writer::3]}
        kept = {name: tensors[name] for shapes in own.values() for name, *_ in shapes}
        sums |= hf.write_copies(own, kept, tmp_path / "copies")
    hf.write_index(files, tmp_path / "copies")
    stream, copies = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("stream", "copies")
    )
    assert len(copies) == 5 and stream == copies
    assert sums == {
        tmp_path / "copies" / name: FileSum(sha256_of(tmp_path / "copies" / name), len(copies[name])) for name in files
    }


@pytest.mark.parametrize("sent", [[], [("b", torch.zeros(2))], [("a", torch.zeros(3))]], ids=["none", "name", "shape"])
def test_a_stream_of_other_tensors_is_refused(tmp_path: Path, sent: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(PolicyError, match="where a was announced"):
        hf.write_weights([("a", torch.float32, (2,))], iter(sent), tmp_path)


def _shapes(tensors: dict[str, torch.Tensor]) -> list[hf.TensorShape]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(1), "model.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    reader = hf.WeightReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        reader("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"no place for 1 tensors, for example model\.extra"):
        reader.check_all_used({"lm_head.weight"})


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no \*\.safetensors file"):
        hf.WeightReader(tmp_path)


def test_what_the_policy_cannot_build_is_refused_with_all_reasons(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "hidden_act": "relu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        hf.read_config(tmp_path)
    assert [problem.where.split(": ")[1] for problem in refused.value.problems] == ["hidden_act", "attention_bias"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OtherModel"]}), encoding="utf-8")
    known = "NemotronHForCausalLM, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match=f"architectures: got OtherModel, expected one of {known}"):
        hf.read_config(tmp_path)


def copy(model: Path, tokenizer: Path, target: Path, **kwargs: Any) -> None:
    """Write what an export has beside its weights."""
    hf.write_side_files(hf.read_side_files(model, tokenizer, precision="float32", **kwargs), target)


def test_the_tokenizer_replaces_files_of_the_model_but_not_its_configuration(tmp_path: Path) -> None:
    model, tokenizer, target = (tmp_path / name for name in ("model", "tokenizer", "target"))
    for directory, text in ((model, "model"), (tokenizer, "tokenizer")):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"from": text, "dtype": "bfloat16"}), encoding="utf-8")
        (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    (model / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    copy(model, tokenizer, target)
    assert json.loads((target / "config.json").read_text(encoding="utf-8")) == {"from": "model", "dtype": "float32"}
    assert (target / "tokenizer.json").read_text(encoding="utf-8") == "tokenizer"
    assert not (target / "model.safetensors.index.json").exists()


MESSAGES = [{"role": "user", "content": "hé"}]
IN_SETTINGS = {"chat_template": "in settings: {{ messages[0].content }}"}
SEVERAL = {
    "chat_template": [
        {"name": "default", "template": "default: {{ messages[0].content }}"},
        {"name": "rag", "template": "rag: {{ messages[0].content }}"},
    ]
}
OWN = {"chat_template.jinja": "own: {{ messages[0].content }}"}
NAMED = {"additional_chat_templates/rag.jinja": "rag: {{ messages[0].content }}"}
TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, str], str | None, str]] = {
    "in a file of its own": ({}, OWN, None, "own"),
    "in the settings": (IN_SETTINGS, {}, None, "in settings"),
    "in both": (IN_SETTINGS, OWN, None, "own"),
    "several in the settings": (SEVERAL, {}, None, "default"),
    "a named one beside": ({}, OWN | NAMED, None, "own"),
    "a named one beside the settings": (IN_SETTINGS, NAMED, None, "in settings"),
    "chosen over a file": ({}, OWN, "chosen: {{ messages[0].content }}", "chosen"),
    "chosen over the settings": (IN_SETTINGS, {}, "chosen: {{ messages[0].content }}", "chosen"),
    "chosen over several": (SEVERAL, NAMED, "chosen: {{ messages[0].content }}", "chosen"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_an_export_renders_with_the_template_of_the_run(tmp_path: Path, case: str) -> None:
    settings, files, chosen, expected = TEMPLATES[case]
    model, tokenizer, target = (tmp_path / name for name in ("model", "tokenizer", "target"))
    for directory in (model, tokenizer):
        build_tokenizer().save_pretrained(directory)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "note": "modèle"}), encoding="utf-8")
    (tokenizer / "chat_template.jinja").unlink()
    path = tokenizer / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | settings), encoding="utf-8")
    for name, text in files.items():
        (tokenizer / name).parent.mkdir(exist_ok=True)
        (tokenizer / name).write_text(text, encoding="utf-8")
    copy(model, tokenizer, target, chat_template=chosen)
    used = ChatCodec(tokenizer, chat_template=chosen)
    prompt = used.text(used.encode({"input": MESSAGES}))
    assert prompt == f"{expected}: hé"
    read = AutoTokenizer.from_pretrained(target)
    assert read.apply_chat_template(MESSAGES, tokenize=False) == prompt
    again = ChatCodec(target)
    assert again.text(again.encode({"input": MESSAGES})) == prompt
    assert "chat_template" not in json.loads((target / "tokenizer_config.json").read_bytes())
    if "rag" in str((settings, files)):
        assert read.apply_chat_template(MESSAGES, chat_template="rag", tokenize=False) == "rag: hé"


def test_a_template_chosen_for_all_requests_leaves_none_for_those_with_tools(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for chosen, expected in ((None, "tools"), ("chosen", "chosen")):
        target = tmp_path / f"target {chosen}"
        copy(tmp_path / "model", tmp_path / "model", target, chat_template=chosen)
        read = AutoTokenizer.from_pretrained(target)
        assert read.apply_chat_template(MESSAGES, tools=tools, tokenize=False) == expected


def test_auto_map_goes_along_with_its_code_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, target = tmp_path / "model", tmp_path / "target"
    model.mkdir()
    of_config = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModel": "modeling_own.Own",
        "AutoModelForCausalLM": "owner/repo--modeling.Own",
    }
    (model / "config.json").write_text(json.dumps({"auto_map": of_config}), encoding="utf-8")
    of_tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(of_tokenizer), encoding="utf-8")
    (model / "configuration_own.py").write_text("from .names import NAME\n", encoding="utf-8")
    (model / "names.py").write_text("NAME = 'own'\n", encoding="utf-8")
    (model / "modeling_own.py").write_text("from .layers_own import Layer\n", encoding="utf-8")  # which is not there
    (model / "convert.py").write_text("no code of the model\n", encoding="utf-8")
    copy(model, model, target)
    assert {file.name for file in target.glob("*.py")} == {"configuration_own.py", "names.py"}
    kept = json.loads((target / "config.json").read_bytes())["auto_map"]
    assert kept.keys() == {"AutoConfig", "AutoModelForCausalLM"}
    assert "auto_map" not in json.loads((target / "tokenizer_config.json").read_bytes())
    assert "auto_map names layers_own.py for AutoModel" in caplog.text
    assert "auto_map names tokenization_own.py for AutoTokenizer" in caplog.text


def test_a_tokenizer_apart_brings_all_of_its_files_and_none_of_the_models(tmp_path: Path) -> None:
    model, tokenizer, target = (tmp_path / name for name in ("model", "tokenizer", "target"))
    for directory, names in (
        (model, ("config.json", "generation_config.json", "added_tokens.json", "chat_template.jinja", "notes.json")),
        (tokenizer, ("config.json", "generation_config.json", "tokenizer_config.json", "vocab.json")),
    ):
        directory.mkdir()
        for name in names:
            (directory / name).write_text(json.dumps({"of": directory.name}), encoding="utf-8")
    copy(model, tokenizer, target)
    origin = {file.name: json.loads(file.read_bytes())["of"] for file in target.iterdir()}
    assert origin == {
        **dict.fromkeys(("config.json", "generation_config.json", "notes.json"), "model"),
        **dict.fromkeys(("tokenizer_config.json", "vocab.json"), "tokenizer"),
    }


def test_an_export_has_what_the_run_read_at_its_start(tmp_path: Path) -> None:
    """Somebody edits, deletes and adds files while the run goes on."""
    model, target = tmp_path / "model", tmp_path / "target"
    build_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "own.Config"}}), encoding="utf-8")
    for name in ("own.py", "generation_config.json", "chat_template.jinja"):
        (model / name).write_text("{}", encoding="utf-8")
    files = hf.read_side_files(model, model, precision="bfloat16", chat_template=None)
    before = {name: (model / name).read_bytes() for name in files if name != "config.json"}
    for name in ("tokenizer.json", "chat_template.jinja", "own.py"):
        (model / name).write_text("edited", encoding="utf-8")
    (model / "config.json").unlink()
    (model / "generation_config.json").unlink()
    (model / "added_tokens.json").write_text("{}", encoding="utf-8")
    hf.write_side_files(files, target)
    assert {name: (target / name).read_bytes() for name in before} == before
    assert {file.name for file in target.iterdir()} == {*before, "config.json"}
    assert {"own.py", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(before)


def test_an_export_says_with_which_arguments_its_template_renders(tmp_path: Path) -> None:
    """A reader finds them in the settings of the tokenizer; those of an earlier run are not handed on."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    build_tokenizer().save_pretrained(first)
    (first / "config.json").write_text("{}", encoding="utf-8")
    copy(first, first, second, template_kwargs={"enable_thinking": False})
    tokenizer = AutoTokenizer.from_pretrained(second)
    assert tokenizer.init_kwargs[hf.TEMPLATE_KWARGS] == {"enable_thinking": False}
    assert "</think>" in tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, **tokenizer.init_kwargs[hf.TEMPLATE_KWARGS]
    )
    copy(second, second, third)
    assert hf.TEMPLATE_KWARGS not in json.loads((third / "tokenizer_config.json").read_bytes())


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", "\x00", '"text"', "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_a_file_of_a_model_that_holds_no_object_is_one_clear_error(tmp_path: Path, name: str, content: str) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / name).write_text(content, encoding="utf-8")
    readers: dict[str, list[Callable[[], object]]] = {
        "config.json": [lambda: hf.read_config(tmp_path), lambda: read_architecture(tmp_path)],
        "tokenizer_config.json": [lambda: ChatCodec(tmp_path)],
        "tokenizer.json": [lambda: ChatCodec(tmp_path)],
        "generation_config.json": [],
    }
    if name in ("config.json", "tokenizer_config.json"):
        readers[name].append(lambda: hf.read_side_files(tmp_path, tmp_path, precision="float32"))
    for read in (lambda: stop_token_ids(tmp_path), *readers[name]):
        with pytest.raises(InputError) as refused:
            read()
        (problem,) = refused.value.problems
        assert problem.where == str(tmp_path / name)
        assert "cannot be read" in problem.what
