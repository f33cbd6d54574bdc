"""Whether models fit the configuration and each other, and whether a saved optimizer can be read under it.

Checked before a launch, and again where a run starts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.config.keys.derive import is_adapted, started_judges
from recipes.errors import Problem
from recipes.exact_json import dumps
from recipes.files import read_object

if TYPE_CHECKING:
    from recipes.config.tree import Config, MegatronConfig, PeftConfig, PolicyConfig, VllmConfig

_WHERE = "policy.megatron_cfg."
_ENGINE = "policy.generation.vllm_cfg."
_SHOWN = 3  # keys in a message
_DEEPEP_CHOICES = 32  # parts of experts per token


def fit_problems(sizes: Mapping[str, Any], vocab_size: int, megatron: MegatronConfig) -> list[Problem]:
    """Return every reason why a model cannot be divided as `megatron` asks.

    Args:
        sizes: the arguments of Megatron's `TransformerConfig` that describe the model.
    """
    checks = (
        _tensor_problem(sizes, vocab_size, megatron),
        _expert_problem(sizes, megatron),
        _overlap_problem(sizes, megatron),
        _deepep_problem(sizes, megatron),
        _activation_problem(sizes, megatron),
        _stage_problem(sizes, megatron),
        _context_problem(sizes, megatron),
        _adapter_problem(sizes, megatron),
    )
    return [problem for problem in checks if problem is not None]


def engine_problem(sizes: Mapping[str, Any], vllm: VllmConfig) -> Problem | None:
    """Return why the GPUs of an engine cannot share the experts of a model; None where they can.

    Args:
        sizes: as for `fit_problems`.
    """
    experts, units = sizes.get("num_moe_experts"), sizes.get("moe_ffn_hidden_size")
    ways, tensor = vllm.expert_parallel_size, vllm.tensor_parallel_size
    where, got = f"{_ENGINE}expert_parallel_size", str(ways)
    if not experts and ways > 1:
        return Problem(where=where, got=got, expected="1: the model has no experts", fix="set it to 1")
    if experts and experts % ways:
        expected, fix = f"a divisor of {experts} experts", "each GPU has as many; change it and tensor_parallel_size"
        return Problem(where=where, got=got, expected=expected, fix=fix)
    if experts and ways == 1 and units and units % tensor:
        expected = f"{tensor} = tensor_parallel_size, or that one a divisor of {units} units of an expert"
        return Problem(where=where, got=got, expected=expected, fix="change one of them")
    return None


def teacher_problems(config: Config, policy: Path) -> list[Problem]:
    """Return a problem for each teacher, started by the run, that reads the policy's token ids as other tokens.

    Only what is on this machine can be compared: not a teacher at an address, nor one by its name on the hub.
    """
    named, own, problems = config.grpo.adv_estimator.teachers.values(), _vocabulary(policy), []
    for judge in (one for one in started_judges(config) if one.name in named):
        theirs = _vocabulary(Path(judge.model))
        if own and theirs and own != theirs:
            token = next(token for token in {**own, **theirs} if own.get(token) != theirs.get(token))
            found = (
                f"{token!r} is {theirs.get(token, 'no token')} in {judge.model}, {own.get(token, 'none')} in {policy}"
            )
            fix = "take a teacher with the policy's vocabulary: it is given the policy's token ids"
            problems.append(Problem(where=f"{judge.key}.model", wrong=f"another vocabulary: {found}", fix=fix))
    return problems


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return token -> id of a model directory; empty where it has no tokenizer.json that says so."""
    found = read_object(directory / "tokenizer.json") if directory.is_dir() else {}
    vocabulary = (found.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # of a unigram model: pieces with their scores, in order
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **{one["content"]: one["id"] for one in found.get("added_tokens") or ()}}


def _tensor_problem(sizes: Mapping[str, Any], vocab_size: int, megatron: MegatronConfig) -> Problem | None:
    size = megatron.tensor_model_parallel_size
    divided = {
        "attention heads": sizes["num_attention_heads"],
        "rows of the vocabulary": vocab_size,
        "units of an MLP": sizes["ffn_hidden_size"],
        "Mamba heads": sizes.get("mamba_num_heads"),
        "Mamba groups": sizes.get("mamba_num_groups"),
        "units of the shared expert": sizes.get("moe_shared_expert_intermediate_size"),
    }
    wrong = [f"{count} {what}" for what, count in divided.items() if count and count % size]
    groups = sizes["num_query_groups"]
    if groups % size and size % groups:
        wrong.append(f"{groups} key-value heads, or a multiple of them")
    if wrong:
        fix = "the ranks of a layer share it evenly; change the size"
        return Problem(
            where=f"{_WHERE}tensor_model_parallel_size",
            got=str(size),
            expected=f"a divisor of {', of '.join(wrong)}",
            fix=fix,
        )
    return None


def _expert_problem(sizes: Mapping[str, Any], megatron: MegatronConfig) -> Problem | None:
    experts, size = sizes.get("num_moe_experts"), megatron.expert_model_parallel_size
    if experts is None and size > 1:
        where, got, expected = "expert_model_parallel_size", str(size), "1: the model has no experts"
        return Problem(where=f"{_WHERE}{where}", got=got, expected=expected, fix="set it to 1")
    if experts and experts % size:
        expected, fix = f"a divisor of {experts} experts", "the ranks share them evenly; change the size"
        return Problem(where=f"{_WHERE}expert_model_parallel_size", got=str(size), expected=expected, fix=fix)
    share, units = megatron.expert_tensor_parallel_size, sizes.get("moe_ffn_hidden_size")
    if experts is None and share > 1:
        where, expected = "expert_tensor_parallel_size", "1: the model has no experts"
        return Problem(where=f"{_WHERE}{where}", got=str(share), expected=expected, fix="set it to 1")
    if experts and units and units % share:
        expected, fix = f"a divisor of {units} units of an expert", "the ranks share them evenly; change the size"
        return Problem(where=f"{_WHERE}expert_tensor_parallel_size", got=str(share), expected=expected, fix=fix)
    if experts and megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        fix = "set it: a model with experts divides the tokens over the tensor-parallel ranks"
        return Problem(where=f"{_WHERE}sequence_parallel", got="false", expected="true", fix=fix)
    return None


def _overlap_problem(sizes: Mapping[str, Any], megatron: MegatronConfig) -> Problem | None:
    """Megatron lets a shared expert run beside the exchange of tokens where both take the same tokens."""
    if not megatron.moe_shared_expert_overlap:
        return None
    has_shared = bool(sizes.get("num_moe_experts") and sizes.get("moe_shared_expert_intermediate_size"))
    if has_shared and not sizes.get("moe_latent_size"):
        return None
    why = "the experts of the model are latent" if has_shared else "the model has no shared expert"
    where, expected = f"{_WHERE}moe_shared_expert_overlap", f"false: {why}"
    return Problem(where=where, got="true", expected=expected, fix="set it to false")


def _deepep_problem(sizes: Mapping[str, Any], megatron: MegatronConfig) -> Problem | None:
    """DeepEP takes each rank that shares an expert for one that has an expert of its own."""
    chosen, share = sizes.get("moe_router_topk") or 0, megatron.expert_tensor_parallel_size
    if not megatron.moe_enable_deepep or chosen * share <= _DEEPEP_CHOICES:
        return None
    expected = f"false: a token goes to {chosen} experts * {share} ranks, and DeepEP's kernels take {_DEEPEP_CHOICES}"
    fix = "set it to false and moe_token_dispatcher_type to alltoall, or lower expert_tensor_parallel_size"
    return Problem(where=f"{_WHERE}moe_enable_deepep", got="true", expected=expected, fix=fix)


def _activation_problem(sizes: Mapping[str, Any], megatron: MegatronConfig) -> Problem | None:
    """The fused activation is the squared ReLU that experts without a gate have."""
    if not megatron.use_fused_weighted_squared_relu:
        return None
    if sizes.get("num_moe_experts") and not sizes.get("gated_linear_unit"):
        return None
    why = "the experts of the model have a gate" if sizes.get("num_moe_experts") else "the model has no experts"
    where = f"{_WHERE}use_fused_weighted_squared_relu"
    return Problem(where=where, got="true", expected=f"false: {why}", fix="set it to false")


def _stage_problem(sizes: Mapping[str, Any], megatron: MegatronConfig) -> Problem | None:
    """Megatron gives each stage the quotient and drops the layers that are left, without a word in a hybrid stack."""
    stages, layers = megatron.pipeline_model_parallel_size, sizes["num_layers"]
    given = [
        count
        for count in (megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage)
        if count is not None
    ]
    rest, even = layers - sum(given), stages - len(given)
    if stages == 1 or (rest > 0 and even > 0 and rest % even == 0) or (rest == 0 and even == 0):
        return None
    return Problem(
        where=f"{_WHERE}pipeline_model_parallel_size",
        got=str(stages),
        expected=f"a number of stages that share the model's {layers} layers evenly, apart from those of given stages",
        fix="change it, or num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
    )


def _context_problem(sizes: Mapping[str, Any], megatron: MegatronConfig) -> Problem | None:
    """Mamba layers exchange tokens for heads: each rank then has whole heads, and whole groups or one of a group."""
    size = megatron.context_parallel_size
    if size == 1 or "mamba_num_heads" not in sizes:
        return None
    heads = sizes["mamba_num_heads"] // megatron.tensor_model_parallel_size
    groups = sizes["mamba_num_groups"] // megatron.tensor_model_parallel_size
    if heads % size or (groups % size and (groups == 0 or size % groups)):
        what = f"{heads} Mamba heads and {groups} Mamba groups of a tensor-parallel rank"
        return Problem(
            where=f"{_WHERE}context_parallel_size",
            got=str(size),
            expected=f"a size that divides the {what}, or a multiple of the groups",
            fix="change it or tensor_model_parallel_size",
        )
    return None


def linear_modules(sizes: Mapping[str, Any]) -> dict[str, str]:
    """Return what each kind of linear layer of a model is, by its name within a layer of the model."""
    found = {"self_attention.linear_qkv": "attention", "self_attention.linear_proj": "attention"}
    kinds = {
        "mixer.in_proj mixer.out_proj": "mamba" if "mamba_num_heads" in sizes else "",
        "mlp.linear_fc1 mlp.linear_fc2": "mlp" if "mamba_num_heads" in sizes or not _experts(sizes) else "",
        "mlp.experts.linear_fc1 mlp.experts.linear_fc2": "experts" if _experts(sizes) else "",
        "mlp.shared_experts.linear_fc1 mlp.shared_experts.linear_fc2": "shared"
        if sizes.get("moe_shared_expert_intermediate_size")
        else "",
    }
    return found | {name: kind for names, kind in kinds.items() if kind for name in names.split()}


def _experts(sizes: Mapping[str, Any]) -> int:
    return sizes.get("num_moe_experts") or 0


def _adapter_problem(sizes: Mapping[str, Any], megatron: MegatronConfig) -> Problem | None:
    """Require layers that get adapters, and experts whose adapters can be computed."""
    peft, where = megatron.peft, f"{_WHERE}peft.exclude_modules"
    if not peft.enabled:
        return None
    kinds = {kind for name, kind in linear_modules(sizes).items() if is_adapted(name, peft)}
    got = json.dumps(list(peft.exclude_modules))
    if not kinds:
        expected = f"patterns that leave one of {', '.join(linear_modules(sizes))}"
        fix = f"change it, or {_WHERE}peft.target_modules = {json.dumps(list(peft.target_modules))}: nothing is trained"
        return Problem(where=where, got=got, expected=expected, fix=fix)
    if "experts" in kinds and (megatron.moe_grouped_gemm or megatron.expert_tensor_parallel_size > 1):
        why = "moe_grouped_gemm is true" if megatron.moe_grouped_gemm else "expert_tensor_parallel_size is above 1"
        fix = f"add that pattern: {why}, and routed experts get adapters only where each is a layer of one rank"
        return Problem(where=where, got=got, expected="also mlp.experts.*", fix=fix)
    return None


# Keys of config.json that an export has otherwise, or that change no weight: code, precision, special tokens.
_NO_SHAPE = re.compile(r"(torch_)?dtype|transformers_version|_name_or_path|auto_map|use_cache|\w+_token_id")


def other_model_problems(model: Path, checkpoint: Path) -> list[Problem]:
    """Return a problem when a checkpoint of the run holds another model than the one that the run is given.

    Two models of the same configuration are not told apart here: the launch compares the names and hashes of weights.
    """
    given, saved = (directory / "config.json" for directory in (model, checkpoint / "hf"))
    if not (given.is_file() and saved.is_file()):
        return []
    now, then = read_object(given), read_object(saved)
    names = sorted(name for name in now.keys() & then.keys() if not _NO_SHAPE.fullmatch(name))
    wrong = [f"{name} is {_text(now[name])}, was {_text(then[name])}" for name in names if now[name] != then[name]]
    if not wrong:
        return []
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    fix = "give another EXP_NAME to train this model, or the MODEL_PATH with which the run began"
    wrong_model = f"another model than that of {checkpoint}: {', '.join(wrong[:_SHOWN])}{more}"
    return [Problem(where=str(model), wrong=wrong_model, fix=fix)]


FORM_FILE = "form.json"  # of the policy in a checkpoint: what an optimizer must have in common to read the saved one
IN_PARTS, PER_PARAMETER = "dp_reshardable", "fully_reshardable"  # forms of a saved optimizer, by Megatron's names
_KINDS = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
_GROUPED, _FREEZES, _PEFT = f"{_WHERE}moe_grouped_gemm", f"{_WHERE}freeze_trunk", f"{_WHERE}peft"
_OF_EVERY_FORM = (
    "policy.precision",
    f"{_WHERE}freeze_moe_router",
    _FREEZES,
    f"{_WHERE}optimizer.optimizer",
    f"{_WHERE}optimizer.use_distributed_optimizer",
)


def optimizer_keys(cfg: PolicyConfig, *, has_experts: bool) -> dict[str, Any]:
    """Return the values, by their keys, that decide under which names an optimizer is saved, and in which parts."""
    megatron, ddp = cfg.megatron_cfg, cfg.megatron_cfg.distributed_data_parallel_config
    return {
        "policy.precision": cfg.precision,
        f"{_WHERE}freeze_moe_router": megatron.freeze_moe_router and has_experts and not megatron.peft.enabled,
        _FREEZES: megatron.freeze_trunk,
        _PEFT: adapters(megatron.peft),
        f"{_WHERE}optimizer.optimizer": megatron.optimizer.optimizer,
        f"{_WHERE}optimizer.use_distributed_optimizer": megatron.optimizer.use_distributed_optimizer,
        # It decides the order of the weights. Grouped experts have no adapters.
        _GROUPED: megatron.moe_grouped_gemm and has_experts and not megatron.peft.enabled,
        f"{_WHERE}num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
        f"{_WHERE}num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
        f"{_WHERE}distributed_data_parallel_config.overlap_grad_reduce": ddp.overlap_grad_reduce,
        f"{_WHERE}distributed_data_parallel_config.grad_reduce_in_fp32": ddp.grad_reduce_in_fp32,
    }


def adapters(peft: PeftConfig) -> dict[str, Any] | None:
    """Return what decides which adapters there are and what they add; None where there are none."""
    if not peft.enabled:
        return None
    lists = {key: sorted(getattr(peft, key)) for key in ("target_modules", "exclude_modules")}
    return {**asdict(peft), **lists}


_TAIL = 2**16  # bytes of a file of weights that tell two models of one configuration apart


@lru_cache(maxsize=4)
def weights_identity(model: Path) -> str:
    """Return a hash of the names, sizes, headers and last bytes of a directory's weights; a copy has the same."""
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            size, start = file.stat().st_size, opened.read(8)
            header = opened.read(min(int.from_bytes(start, "little"), size))
            opened.seek(max(size - _TAIL, 0))
            digest.update(dumps([file.name, size]) + header + opened.read())
    return digest.hexdigest()


def base_problems(saved: Mapping[str, Any], model: Path, path: Path) -> list[Problem]:
    """Return a problem where adapters that `path` holds were trained beside other weights than those of `model`."""
    before = saved.get("base")
    if before is None or before == weights_identity(model):
        return []
    wrong = f"other weights than those beside which the adapters of {path} were trained"
    fix = "give the start weights of that run (an export of it has the adapters in its weights already)"
    return [Problem(where=str(model), wrong=wrong, fix=fix)]


def form_problems(
    cfg: PolicyConfig, saved: Mapping[str, Any], path: Path, model: Path, *, has_experts: bool
) -> list[Problem]:
    """Return why an optimizer has parts of other names or sizes than the one that was saved in `path`.

    Older versions of this recipe have not written all the values; what they have not is not compared. `model` is the
    directory of the start weights, which adapters need as they were.
    """
    keys = {_GROUPED: False, _FREEZES: False, _PEFT: None} | saved.get("optimizer_keys", {})
    was, is_now = keys[_PEFT] or {"enabled": False}, adapters(cfg.megatron_cfg.peft) or {"enabled": False}
    if differing := [key for key in is_now if key in was and was[key] != is_now[key]]:
        fix = "resume with that value, or start a new run from the export of that step"
        when = f"as when {path} was saved: it holds {'adapters' if was['enabled'] else 'weights'}"
        return [
            Problem(where=f"{_PEFT}.{key}", got=_text(is_now[key]), expected=f"{_text(was[key])}, {when}", fix=fix)
            for key in differing
        ]
    if problems := base_problems(saved, model, path):
        return problems
    if saved["form"] is None:
        return []
    problems = []
    now_trains, then_trained = cfg.megatron_cfg.mtp_num_layers > 0, saved.get("trains_heads", False)
    if now_trains != then_trained:  # the optimizer holds the moments of multi-token heads
        problems.append(
            Problem(
                where=f"{_WHERE}mtp_num_layers",
                got=str(cfg.megatron_cfg.mtp_num_layers),
                expected=f"{'more than 0' if then_trained else '0'}, as when {path} was saved: its optimizer has"
                f" {'' if then_trained else 'no '}state of the heads",
                fix="resume with that value, or start a new run from the export of that step",
            )
        )
    sizes = [f"{kind}_parallel_size" for kind in _KINDS]
    now = {f"{_WHERE}{key}": getattr(cfg.megatron_cfg, key) for key in sizes}
    now |= optimizer_keys(cfg, has_experts=has_experts)
    then = {f"{_WHERE}{key}": saved["layout"].get(key, 1) for key in sizes}
    then |= keys
    return problems + [
        Problem(
            where=key,
            got=_text(now[key]),
            expected=f"{_text(then[key])}, as when {path} was saved: the parts of its optimizer depend on it",
            fix="resume with that value"
            + (
                ", or start a new run from the export of that step"
                if key in _OF_EVERY_FORM
                else f"; a save with {_WHERE}dist_ckpt_optim_fully_reshardable=true can be resumed with any"
            ),
        )
        for key in now
        if key in then and now[key] != then[key] and (saved["form"] == IN_PARTS or key in _OF_EVERY_FORM)
    ]


def _text(value: Any) -> str:
    """Return a value as a configuration file has it."""
    return json.dumps(value) if not isinstance(value, str) else value
