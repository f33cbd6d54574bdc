"""What the generation tests share: tiny random models, their configuration, the policy's weight file."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import patiently
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from recipes.config.tree import GenerationConfig
from recipes.types import WeightLayout
from tests.configuration import block
from tools.tiny.model import build_hybrid_model, build_tokenizer

VOCAB_SIZE = 128
EOS = 0
BLOCK = 32  # tokens per KV block


def build_model(path: Path, *, seed: int, is_tied: bool, eos: int | None) -> None:
    """Write a random two-layer Qwen3 model with a tokenizer; `eos` None: no token ends an answer."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=is_tied,
            eos_token_id=eos,
            bos_token_id=None,
        )
    )
    perturb(model, seed=seed + 1, scale=0.05)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(path)
    vocabulary = {"<eos>": EOS} | {f"w{index}": index for index in range(1, VOCAB_SIZE)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="w1"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>" if eos is not None else None)
    tokenizer.chat_template = "{% for message in messages %}{{ 'w2 ' + message['content'] + ' w3 ' }}{% endfor %}"
    tokenizer.save_pretrained(path)


def build_latent(path: Path, *, seed: int) -> Any:
    """Write a random Nemotron-H with latent experts, and return it."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(path)
    model = build_hybrid_model(tokenizer, seed=seed).eval()
    model.save_pretrained(path)
    return model


def build_mixture(path: Path, *, seed: int) -> PreTrainedModel:
    """Write a random two-layer Qwen3 model with four experts a layer, and return it."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


@torch.no_grad()
def perturb(model: PreTrainedModel, *, seed: int, scale: float) -> None:
    """Add noise to every parameter, as a training step would change them all."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def load(path: Path) -> PreTrainedModel:
    """Load a model as the reference implementation sees it."""
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class WeightFile:
    """The shared-memory file, as a policy would write it."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        named = list(model.named_parameters())
        offsets, end = [], 0
        for _, tensor in named:
            offsets.append(end)
            end += (tensor.numel() * tensor.element_size() + 63) // 64 * 64
        self.layout = WeightLayout(
            path=str(path),
            names=tuple(name for name, _ in named),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
            shapes=tuple(tuple(tensor.shape) for _, tensor in named),
            offsets=tuple(offsets),
            num_bytes=end + 64,
            count_offset=end,
        )
        path.write_bytes(bytes(end + 64))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), end + 64)

    @torch.no_grad()
    def write(
        self, model: PreTrainedModel, before_last: Callable[[], Any] = lambda: None, *, num_before: int = 0
    ) -> None:
        """Put all tensors of `model` into the file and count them; `before_last` is called before the last."""
        pairs = list(zip(model.named_parameters(), self.layout.offsets, strict=True))
        for number, ((_, tensor), offset) in enumerate(pairs, start=num_before + 1):
            if number == num_before + len(pairs):
                before_last()
            data = tensor.numpy().tobytes()
            self._map[offset : offset + len(data)] = data
            self._map[-64:-56] = number.to_bytes(8, "little")


def generation_config(**changes: Any) -> GenerationConfig:
    """Return the part of `policy.generation` that the engine reads."""
    vllm_cfg = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 512,
        "enforce_eager": True,
        "precision": "float32",
        "enable_prefix_caching": True,
        "enable_return_routed_experts": False,
        "expose_http_server": False,
        "enable_vllm_metrics_logger": False,
        "vllm_metrics_logger_interval": 0.01,
        "kv_cache_dtype": "auto",
        "expert_parallel_size": 1,
        "http_server_serving_chat_kwargs": block(
            "policy.generation.vllm_cfg.http_server_serving_chat_kwargs",
            enable_auto_tools=False,
            tool_parser=None,
            reasoning_parser=None,
            default_chat_template_kwargs=None,
        ),
    }
    vllm_kwargs = {
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 32 << 20,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    cfg = {
        "max_new_tokens": 256,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "port_range_low": 3000,
        "port_range_high": 5000,
        "verify_weight_pushes": False,
        "max_starts": 2,
        "min_share_up": 1.0,
    }
    for key, value in changes.items():
        part = next(part for part in (vllm_cfg, vllm_kwargs, cfg) if key in part)
        part[key] = value
    vllm = block("policy.generation.vllm_cfg", **vllm_cfg)
    return block("policy.generation", **cfg, vllm_cfg=vllm, vllm_kwargs=vllm_kwargs)


def deadlines(**changes: float) -> Any:
    """Return the deadlines the engine reads, in seconds."""
    quick = {"engine_start": patiently(180), "generation": 60.0, "refit": 60.0, "shutdown": 10.0}
    return block("deadlines", **(quick | changes))


@torch.no_grad()
def logprobs(model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0) -> Any:
    """Return the reference log-probabilities of `tokens` after `prompt`, shape [T]."""
    ids = torch.tensor([prompt + tokens])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
