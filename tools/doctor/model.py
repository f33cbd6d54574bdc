"""The start weights: complete, unchanged since their run ended, fitting the configuration and its chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from recipes.config.fits import engine_problem, fit_problems
from recipes.config.keys.native import ARCHITECTURES
from recipes.config.packages import package_problems
from recipes.config.tree import Config, MegatronConfig
from recipes.environments.chat.codec import ChatCodec, template_of
from recipes.errors import InputError, Problem
from recipes.files import sha256_of
from tools.job.local import count_gpus
from tools.planning.draft import Draft
from tools.planning.findings import Finding, as_findings, found
from tools.sizing.architecture import read_architecture

SETTINGS = "tokenizer_config.json"
FILES = ("config.json", "tokenizer.json", SETTINGS)
COMPLETE = "COMPLETE"  # written last by recipes/grpo/checkpoint.py: file -> sha256
MAX_HASHED_BYTES = 2 * 2**30  # of one export: some seconds of reading
FIX = "set MODEL_PATH to a Hugging Face checkpoint; `make tiny` makes the tiny ones"
AGAIN = "copy or export the checkpoint again"


def check(draft: Draft) -> Iterator[Finding]:
    """Check the directory that MODEL_PATH names."""
    path = draft.path("MODEL_PATH")
    if path is None:
        return
    if not path.is_dir():
        parent = draft.stage.after if draft.stage is not None else None
        wrong = "start weights are a directory, this is a file" if path.exists() else "no such directory"
        fix = f"run {parent} to its end, whose last export this stage starts from, or {FIX}" if parent else FIX
        yield found("MDL001", where=f"MODEL_PATH={path}", wrong=wrong, fix=fix)
        return
    missing = missing_files(path)
    cut = [finding for file in sorted(path.glob("*.safetensors")) for finding in weight_file_findings(file)]
    for name in missing:
        yield found("MDL001", where=str(path), wrong=f"{name} is missing", fix=FIX)
    yield from cut
    # A file that is known to be missing or cut is not reported again for its checksum.
    known = {Path(finding.problem.where).name for finding in cut}
    known |= set(missing)
    yield from export_findings(path, known)
    if draft.config is not None:
        if (path / "config.json").is_file():
            if draft.contract["ENGINE"] == "native":
                yield from architecture_findings(path)
                yield from head_findings(path, draft.config)
                if draft.contract.is_local:  # the policy will run here
                    yield from package_findings(path, draft.config)
            yield from fit_findings(path, draft.config)
        if all((path / name).is_file() for name in FILES):
            yield from template_findings(path, draft.config)


def missing_files(path: Path) -> list[str]:
    """Return the names of the files that a complete Hugging Face directory has and this one lacks."""
    wanted = [name for name in FILES if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        wanted.append("*.safetensors")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).get("weight_map") or {}
        wanted += [name for name in sorted(set(weight_map.values())) if not (path / name).is_file()]
    return wanted


def weight_file_findings(path: Path) -> Iterator[Finding]:
    """Compare the size of a safetensors file with what its header declares: a cut copy is found without reading it."""
    size = path.stat().st_size
    with path.open("rb") as content:
        header_size = int.from_bytes(content.read(8), "little")
        header = content.read(header_size) if header_size < size else b""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        declared = 8 + header_size + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        declared = -1
    if declared != size:
        expected = f"{declared} bytes, as its header says" if declared > 0 else "a safetensors header"
        yield found("MDL002", where=str(path), got=f"{size} bytes", expected=expected, fix=AGAIN)


def export_findings(path: Path, known: Collection[str] = ()) -> Iterator[Finding]:
    """Check an export of ours, step_N/hf, against the checksums beside it, without the files that are `known`."""
    path = path.resolve()
    step = path.parent
    if path.name != "hf" or not step.name.startswith(("step_", "tmp_step_")):
        return
    if not (step / COMPLETE).is_file():
        fix = "take the export of an earlier step, or run the parent stage again: it resumes"
        yield found("MDL003", where=str(step), wrong=f"the checkpoint was not finished: it has no {COMPLETE}", fix=fix)
        return
    digests = {name: digest for name, digest in read_object(step / COMPLETE).items() if name.startswith("hf/")}
    if not digests:
        yield found("MDL003", where=str(step / COMPLETE), wrong="it has no checksum of a file of hf/", fix=AGAIN)
    hashed, skipped = 0, 0
    for name in sorted(digests, key=lambda name: (name.endswith(".safetensors"), name)):
        file = step / name
        if file.name in known:
            continue
        size = file.stat().st_size if file.is_file() else 0
        if hashed + size > MAX_HASHED_BYTES:
            skipped += 1
            continue
        hashed += size
        if not file.is_file() or sha256_of(file) != digests[name]:
            differs = f"the file differs from its checksum in {COMPLETE}"
            yield found("MDL003", where=str(file), wrong=differs if file.is_file() else "no such file", fix=AGAIN)
    if skipped:
        limit = f"beyond {MAX_HASHED_BYTES / 2**30:g} GiB no checksum is read"
        wrong = f"{skipped} of {len(digests)} files were compared by size alone: {limit}"
        fix = f"compare `sha256sum` of them with {COMPLETE} if you doubt the copy"
        yield found("MDL006", where=str(path), wrong=wrong, fix=fix)


def architecture_findings(path: Path) -> Iterator[Finding]:
    """Check that the native engine builds this kind of model."""
    named = read_object(path / "config.json").get("architectures") or ["none"]
    if named[0] not in ARCHITECTURES:
        where, expected = f"{path / 'config.json'}: architectures", f"one of {', '.join(ARCHITECTURES)} (native engine)"
        yield found("MDL009", where=where, got=str(named[0]), expected=expected, fix="take another model or engine")


def head_findings(path: Path, config: Config) -> Iterator[Finding]:
    """Check that a model whose multi-token heads are to be trained has any."""
    asked = config.policy.megatron_cfg.mtp_num_layers
    if asked and not read_object(path / "config.json").get("num_nextn_predict_layers"):
        key, expected = (
            "policy.megatron_cfg.mtp_num_layers",
            f"0: {path / 'config.json'} has no num_nextn_predict_layers",
        )
        fix = "set it to 0, or take a model with multi-token heads"
        yield found("MDL004", where=key, got=str(asked), expected=expected, fix=fix)


def fit_findings(path: Path, config: Config) -> Iterator[Finding]:
    """Compare config.json with the parallel sizes and lengths of the configuration."""
    model = {**read_object(path / "config.json"), **(config.policy.hf_config_overrides or {})}
    yield from as_findings("MDL004", policy_problems(path, config.policy.megatron_cfg))
    heads, size = model.get("num_attention_heads"), config.policy.generation.vllm_cfg.tensor_parallel_size
    if isinstance(heads, int) and heads % size:
        key = "policy.generation.vllm_cfg.tensor_parallel_size"
        expected = f"a divisor of num_attention_heads = {heads} of {path / 'config.json'}"
        fix = "give the parts of the model that it has, or another model"
        yield found("MDL004", where=key, got=str(size), expected=expected, fix=fix)
    known = policy_sizes(path)
    unshared = known and engine_problem(known[0], config.policy.generation.vllm_cfg)
    if unshared:
        yield from as_findings("MDL004", [unshared])
    longest, wanted = model.get("max_position_embeddings"), config.policy.max_total_sequence_length
    if isinstance(longest, int) and longest < wanted:
        expected = f"at most max_position_embeddings = {longest} of {path / 'config.json'}"
        fix = "lower it, or take a model with a longer context"
        yield found("MDL004", where="policy.max_total_sequence_length", got=str(wanted), expected=expected, fix=fix)


def package_findings(path: Path, config: Config) -> Iterator[Finding]:
    """Look for the packages that keys and layers of the policy need on this machine."""
    sizes, _ = policy_sizes(path) or ({}, 0)
    problems = package_problems(config.policy.megatron_cfg, sizes, has_cuda=count_gpus() > 0)
    yield from as_findings("ENG006", problems)


def policy_problems(path: Path, megatron: MegatronConfig) -> list[Problem]:
    """Return why the policy cannot be divided as asked; nothing where config.json does not tell the model's sizes."""
    found = policy_sizes(path)
    return [] if found is None else fit_problems(*found, megatron)


def policy_sizes(path: Path) -> tuple[dict[str, Any], int] | None:
    """Return sizes of the model by Megatron's names, and of its vocabulary; None where config.json does not tell."""
    try:
        model = read_architecture(path)
    except InputError:
        return None
    is_hybrid = model.mamba_layers > 0
    sizes = {
        "num_layers": model.num_layers if is_hybrid else model.attention_layers,
        "num_attention_heads": model.query_heads,
        "num_query_groups": model.kv_heads,
        "ffn_hidden_size": model.mlp_size,
        "num_moe_experts": model.experts or None,
        "gated_linear_unit": model.is_gated,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_size,
        "moe_shared_expert_intermediate_size": model.shared_size,
        "moe_latent_size": model.expert_hidden if model.expert_hidden != model.hidden else None,
    }
    if is_hybrid:
        sizes |= {"mamba_num_heads": model.mamba_heads, "mamba_num_groups": model.mamba_groups}
    return sizes, model.vocab


def template_findings(path: Path, config: Config) -> Iterator[Finding]:
    """Check that the tokenizer can be used, and that it and its template are those that the weights came with."""
    tokenizer = config.policy.tokenizer
    directory = path if tokenizer.name == config.policy.model_name else Path(tokenizer.name)
    try:
        ChatCodec.from_config(config.policy)
        templates = [used_template(directory, tokenizer.chat_template), parent_template(path)]
    except InputError as error:
        yield from as_findings("MDL007", error.problems)
        return
    expected, fix = f"the same as in {path}", "unset it: rows would be rendered otherwise than the model has learned"
    if directory != path and sha256_of(directory / "tokenizer.json") != sha256_of(path / "tokenizer.json"):
        got = f"another tokenizer.json in {directory}"
        yield found("MDL005", where="policy.tokenizer.name", got=got, expected=expected, fix=fix)
    if templates[0] != templates[1]:
        got, where = f"a template other than the parent's: {templates[0][:40]!r}...", "policy.tokenizer.chat_template"
        yield found("MDL005", where=where, got=got, expected=expected, fix=fix)


def used_template(directory: Path, chosen: str | None) -> str:
    """Return the chat template that a configuration uses."""
    return (
        Path(chosen).read_text(encoding="utf-8")
        if chosen
        else template_of(directory, read_object(directory / SETTINGS))
    )


def parent_template(path: Path) -> str:
    """Return the template that weights were trained with: what their run chose, else what lies beside them."""
    step = path.resolve().parent
    resolved = step.parent.parent / "resolved.json"
    if step.name.startswith("step_") and resolved.is_file():
        policy = read_object(resolved).get("config", {}).get("policy", {})
        chosen = (policy.get("tokenizer") or {}).get("chat_template")
        if isinstance(chosen, str) and Path(chosen).is_file():
            return Path(chosen).read_text(encoding="utf-8")
    return template_of(path, read_object(path / SETTINGS))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; an unreadable one has nothing in it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
