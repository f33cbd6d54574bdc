"""A GGUF file becomes the Hugging Face directory that it was made from, as transformers and the policy read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from policy_case import save_model
from safetensors.torch import load_file
from small_gguf import MERGES, SPECIAL, TEMPLATE, vocabulary
from speed import patiently
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.errors import RunError
from recipes.policy.hf import read_config
from tools.packages import install_packages, run_pip
from tools.tiny import from_gguf

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages that read GGUF, without the 90 MB of a model."""
    place = tmp_path_factory.mktemp("gguf") / "packages"
    lines = from_gguf.REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    wanted = place.with_name("requirements.txt")
    wanted.write_text("\n".join(line for line in lines if "smollm2==" not in line) + "\n", encoding="utf-8")
    try:  # what is not pinned: a wrong hash or a version that is gone is no missing index
        run_pip([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(place.parent), "gguf"])
    except RunError as error:
        pytest.skip(f"no package index can be reached: {error}")
    install_packages(wanted, place)
    return place


def _write(source: Path, target: Path, kind: str, packages: Path) -> Path:
    script = Path(__file__).with_name("small_gguf.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(packages)))}
    command = [sys.executable, str(script), str(source), str(target), kind]
    subprocess.run(command, env=environment, check=True, timeout=patiently(100))
    return target


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_model_comes_back_with_its_tokenizer_and_its_template(
    tmp_path: Path, packages: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(vocabulary())}
    source = save_model(tmp_path / "source", family="llama", tied=True, **sizes)
    file = _write(source, tmp_path / "model.gguf", kind, packages)
    monkeypatch.setattr(from_gguf, "install_packages", lambda *_: None)
    out = tmp_path / "made"
    from_gguf.make(out, file=file, packages=packages)

    weights, expected = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert weights.keys() == expected.keys() and "lm_head.weight" not in weights
    for name, tensor in expected.items():
        step = 0.0 if kind == "F32" else tensor.abs().max().item() / 100  # 8 bits, and a sign
        assert weights[name].dtype == torch.float32
        assert (weights[name] - tensor).abs().max() <= step, name
    config, _ = read_config(out)
    assert config.architectures == ["LlamaForCausalLM"] and not hasattr(config, "quantization_config")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        got, want = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (out, source))
    assert torch.allclose(got, want, atol=1e-5 if kind == "F32" else 0.5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token, tokenizer.chat_template) == (SPECIAL[2], TEMPLATE)
    text = "<|im_start|>the\n hé<|im_end|>"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    assert pieces[:3] == ["<|im_start|>", "t", MERGES[0].replace(" ", "")] and pieces[-1] == "<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("kept", [0, 100, 60_000])
def test_a_damaged_file_leaves_nothing(
    tmp_path: Path, packages: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(vocabulary())}
    file = _write(
        save_model(tmp_path / "source", family="llama", tied=True, **sizes), tmp_path / "model.gguf", "F32", packages
    )
    file.write_bytes(file.read_bytes()[:kept])
    monkeypatch.setattr(from_gguf, "install_packages", lambda *_: None)
    status = from_gguf.main(["--file", str(file), "--out", str(tmp_path / "made"), "--packages", str(packages)])
    assert status == 2
    assert {path.name for path in tmp_path.iterdir()} == {"source", "model.gguf"}
