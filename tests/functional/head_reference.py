"""Multi-token heads in plain torch, from the tensors of a checkpoint: what the policy's own heads are compared with.

Shape legend: L tokens of a row, H hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from random_batch import random_batch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, NemotronHConfig

from recipes.policy.shards import BatchShard
from tests.groups import LocalStore
from tools.tiny.heads import add_heads as add_heads


def heads_of_batch(model: Path, num_heads: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the mean loss of each head over `random_batch(10)`, and the gradients at a scaling factor of 0.3."""
    hf = NemotronHConfig.from_pretrained(model)
    trunk = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = load_file(model / "model.safetensors")
    weights = {
        name.removeprefix("mtp.layers."): tensor.requires_grad_("bias" not in name)
        for name, tensor in tensors.items()
        if name.startswith("mtp.")
    }
    store = LocalStore()
    batch = random_batch(10, store)
    shard = BatchShard(batch=batch, microbatches=()).fetched(store)
    sums, counts, tokens = [torch.zeros(()) for _ in range(num_heads)], [0.0] * num_heads, 0.0
    for number, kept in enumerate(batch.sample_mask_B.tolist()):
        row = shard.row(number)
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        mask_L = torch.tensor(row.token_mask() * kept).float()
        with torch.no_grad():
            hidden_LH = trunk.model(ids[None]).last_hidden_state[0]
        tokens += mask_L[1:].sum().item()
        for head in range(num_heads):
            later = ids[head + 1 :]
            if len(later) < 2:
                break
            embedding_LH = tensors["backbone.embeddings.weight"][later]
            hidden_LH = _step(weights, hf, hidden_LH[: len(later)], embedding_LH)
            scores = (hidden_LH[:-1] @ tensors["lm_head.weight"].T).log_softmax(-1)
            own_mask = mask_L[head + 2 :]
            sums[head] = sums[head] - (scores.gather(-1, later[1:, None])[:, 0] * own_mask).sum()
            counts[head] += own_mask.sum().item()
    (sum(sums, torch.zeros(())) * 0.3 / num_heads / tokens).backward()  # type: ignore[no-untyped-call]
    gradients = {f"mtp.layers.{name}": weight.grad for name, weight in weights.items() if weight.grad is not None}
    return [(total / count).item() for total, count in zip(sums, counts, strict=True)], gradients


@torch.no_grad()
def accepted_share(model: Path, answers: Iterable[tuple[Sequence[int], Sequence[int]]], num_drafted: int) -> float:
    """Return the share of drafts that greedy answers accept; `answers` has prompts and what follows them.

    After each token that the model itself has chosen, the heads guess the next ones, the second from the first.
    """
    hf = NemotronHConfig.from_pretrained(model)
    trunk = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = load_file(model / "model.safetensors")
    weights = {name.removeprefix("mtp.layers."): one for name, one in tensors.items() if name.startswith("mtp.")}
    embeddings = tensors["backbone.embeddings.weight"]
    num_drafts = num_accepted = 0
    for prompt, answer in answers:
        ids = torch.tensor([*prompt, *answer])
        hidden_of_all_LH = trunk.model(ids[None]).last_hidden_state[0]
        newest = len(prompt)
        while newest < len(ids) - 1:
            hidden_LH, embedding_LH = hidden_of_all_LH[:newest], embeddings[ids[1 : newest + 1]]
            drafts: list[int] = []
            for _ in range(num_drafted):
                last_H = _step(weights, hf, hidden_LH, embedding_LH)[-1]
                drafts.append(int((tensors["lm_head.weight"] @ last_H).argmax()))
                hidden_LH = torch.cat([hidden_LH, last_H[None]])
                embedding_LH = torch.cat([embedding_LH, embeddings[drafts[-1]][None]])
            right = [draft == token for draft, token in zip(drafts, ids[newest + 1 :].tolist(), strict=False)]
            accepted = [*right, False].index(False)
            num_drafts += num_drafted
            num_accepted += accepted
            newest += 1 + accepted
    return num_accepted / num_drafts


def _step(weights: dict[str, Tensor], hf: NemotronHConfig, hidden_LH: Tensor, embedding_LH: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], hf.layer_norm_epsilon)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    both = torch.cat([norm(embedding_LH, "0.enorm"), norm(hidden_LH, "0.hnorm")], -1)
    x = linear(both, "0.eh_proj")
    inner = norm(x, "0.norm")
    q, k, v = (linear(inner, f"0.mixer.{name}_proj").unflatten(-1, (-1, hf.head_dim)).transpose(0, 1) for name in "qkv")
    attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    x = x + linear(attended.transpose(0, 1).flatten(1), "0.mixer.o_proj")
    inner = norm(x, "1.norm")
    scores_LE = linear(inner, "1.mixer.gate").sigmoid()
    chosen = (scores_LE + weights["1.mixer.gate.e_score_correction_bias"]).topk(hf.num_experts_per_tok).indices
    share = scores_LE.gather(-1, chosen)
    share_LE = torch.zeros_like(scores_LE).scatter(-1, chosen, share / share.sum(-1, keepdim=True))
    latent = linear(inner, "1.mixer.fc1_latent_proj")
    routed = torch.stack(
        [
            linear(linear(latent, f"1.mixer.experts.{e}.up_proj").relu().square(), f"1.mixer.experts.{e}.down_proj")
            for e in range(hf.n_routed_experts)
        ]
    )
    mixed = hf.routed_scaling_factor * torch.einsum("elh,le->lh", routed, share_LE)
    shared = linear(inner, "1.mixer.shared_experts.up_proj").relu().square()
    x = x + linear(mixed, "1.mixer.fc2_latent_proj") + linear(shared, "1.mixer.shared_experts.down_proj")
    return norm(x, "1.final_layernorm")
