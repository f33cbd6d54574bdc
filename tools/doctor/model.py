"""The start weights: complete, unchanged since their run ended, fitting the configuration and its chat template."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recipes.config.fits import engine_problem, fit_problems, teacher_problems
from recipes.config.keys.derive import started_judges
from recipes.config.keys.native import ARCHITECTURES, unbuilt_values
from recipes.config.packages import image_problems, package_problems
from recipes.config.tree import Config, MegatronConfig
from recipes.environments.chat.codec import ChatCodec, template_of
from recipes.errors import CheckpointError, InputError, Problem
from recipes.files import read_object, sha256_of
from recipes.generation.engine_args import OWN_HEADS, has_experts, route_problems, speculation_problems, stop_token_ids
from recipes.grpo.checkpoint import recorded_sums
from recipes.weight_files import AGAIN, INDEX, files_of, read_header, read_weights, require_object
from tools.draft.findings import Finding, as_findings, found
from tools.draft.launch import Launch
from tools.hub import hub_name, taken_for
from tools.job.local import count_gpus
from tools.sizing.architecture import Architecture, read_architecture

SETTINGS = "tokenizer_config.json"
ENGINE_CLASSES = ("EngineArgs", "AsyncEngineArgs")
FILES = ("config.json", "tokenizer.json", SETTINGS)
GPU_LOCK = Path(__file__).parents[2] / "containers" / "requirements-gpu.lock"
COMPLETE = "COMPLETE"  # written last by recipes/grpo/checkpoint.py
MAX_HASHED_BYTES = 2 * 2**30  # of one export: some seconds of reading
FIX = "set MODEL_PATH to a Hugging Face checkpoint; `make tiny` makes the tiny ones (BLEND=tools those of Nano)"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
EMBEDDING = re.compile(r"(?:^|\.)(?:embeddings?|embed_tokens)\.weight$")
HEADS = "mtp."  # of the names of multi-token heads, which a checkpoint may lack
MOST_SMALL_PARAMETERS = 1.1  # norms, biases and the like, which the sizes of an architecture leave out


def check(launch: Launch) -> Iterator[Finding]:
    """Check the directory that MODEL_PATH names."""
    path = launch.path("MODEL_PATH")
    if path is None:
        return
    if not path.is_dir():
        parent = launch.stage.after if launch.stage is not None else None
        wrong = "start weights are a directory, this is a file" if path.exists() else "no such directory"
        fix = f"run {parent} to its end, whose last export this stage starts from, or {FIX}" if parent else FIX
        if hub_name(given := launch.environ.get("MODEL_PATH", "")):
            wrong, fix = taken_for(given, "MODEL_PATH")
        yield found("MDL001", where=f"MODEL_PATH={path}", wrong=wrong, fix=fix)
        return
    missing = [name for name in FILES if not (path / name).is_file()]
    for name in missing:
        yield found("MDL001", where=str(path), wrong=f"{name} is missing", fix=FIX)
    wrong_weights = list(weight_findings(path))
    yield from wrong_weights
    # A file that is known to be missing or cut is not reported again for its checksum.
    known = {Path(finding.problem.where).name for finding in wrong_weights}
    yield from export_findings(path, known | set(missing))
    if launch.config is not None:
        if (path / "config.json").is_file():
            if launch.contract["ENGINE"] == "native":
                broken = list(object_findings(path))
                yield from broken or architecture_findings(path)
                yield from head_findings(path, launch.config)
                yield from route_findings(path, launch)
                if launch.contract.is_local:  # the policy will run here
                    yield from package_findings(path, launch.config)
                    yield from processor_findings(launch.config)
                    yield from argument_findings(launch.config)
                elif launch.contract["CONTAINER_RUNTIME"] != "none":
                    yield from image_findings(path, launch.config)
            yield from fit_findings(path, launch.config)
        yield from teacher_findings(launch.config)
        yield from as_findings("MDL004", teacher_problems(launch.config, path))
        if all((path / name).is_file() for name in FILES):
            yield from template_findings(path, launch.config)


def weight_findings(path: Path) -> Iterator[Finding]:
    """Check by the headers of the weight files that each is whole, and that together they are config.json's model."""
    cut = []
    for file in files_of(path):
        try:
            read_header(file)
        except CheckpointError as error:
            cut += as_findings("MDL002", error.problems)
    yield from cut
    if cut:
        return
    try:
        weights = read_weights(path)
    except CheckpointError as error:
        yield from as_findings("MDL001", error.problems)
        return
    for file in weights.strays:
        wrong = f"nothing reads it: {INDEX} does not name it"
        yield found("MDL010", where=str(file), wrong=wrong, fix="remove it if it is left over from an earlier save")
    try:
        model = read_architecture(path)
    except InputError:  # of a kind whose sizes are not known
        return
    yield from as_findings("MDL011", weight_problems(path, model, weights.shape_of))


def weight_problems(path: Path, model: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Compare layers, embedding and number of parameters with those of config.json."""
    own = {name: shape for name, shape in shapes.items() if not name.startswith(HEADS)}
    found: list[tuple[str, str]] = []
    wanted = set(range(model.attention_layers if model.has_pairs else model.num_layers))
    layers = {int(match[1]) for name in own if (match := LAYER.search(name))}
    if lost := sorted(wanted - layers):
        found.append((f"no tensor of layer {lost[0]}", f"{len(wanted)} layers"))
    if more := sorted(layers - wanted):
        found.append((f"tensors of layer {more[0]}", f"{len(wanted)} layers, numbered from 0"))
    embedding = next((shape for name, shape in own.items() if EMBEDDING.search(name)), None)
    if embedding != (model.vocab, model.hidden):
        found.append((f"an embedding of {embedding or 'no size'}", f"one of {(model.vocab, model.hidden)}"))
    counted = sum(math.prod(shape) for name, shape in own.items() if not (model.is_tied and name == "lm_head.weight"))
    if not found and not model.parameters <= counted <= model.parameters * MOST_SMALL_PARAMETERS:
        found.append((f"{counted:,} parameters", f"about {model.parameters:,}"))
    fix = "take config.json and weights from one checkpoint"
    return [Problem(where=str(path), got=got, expected=f"{text}, as config.json says", fix=fix) for got, text in found]


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
    try:
        sums = {name: one for name, one in recorded_sums(step).items() if name.startswith("hf/")}
    except (OSError, ValueError) as error:
        yield found("MDL003", where=str(step / COMPLETE), wrong=f"it cannot be read ({error})", fix=AGAIN)
        return
    if not sums:
        yield found("MDL003", where=str(step / COMPLETE), wrong="it has no checksum of a file of hf/", fix=AGAIN)
    hashed, skipped = 0, 0
    for name in sorted(sums, key=lambda name: (name.endswith(".safetensors"), name)):
        file = step / name
        if file.name in known:
            continue
        size = file.stat().st_size if file.is_file() else 0
        is_read = hashed + size <= MAX_HASHED_BYTES
        hashed, skipped = hashed + size * is_read, skipped + (not is_read)
        if not file.is_file():
            yield found("MDL003", where=str(file), wrong="no such file", fix=AGAIN)
        elif size != (sums[name].num_bytes or size) or (is_read and sha256_of(file) != sums[name].sha256):
            wrong = f"the file differs from its checksum in {COMPLETE}"
            yield found("MDL003", where=str(file), wrong=wrong, fix=AGAIN)
    if skipped:
        limit = f"beyond {MAX_HASHED_BYTES / 2**30:g} GiB no checksum is read"
        wrong = f"{skipped} of {len(sums)} files were compared by size alone: {limit}"
        fix = f"compare `sha256sum` of them with {COMPLETE} if you doubt the copy"
        yield found("MDL006", where=str(path), wrong=wrong, fix=fix)


def architecture_findings(path: Path) -> Iterator[Finding]:
    """Check that the native engine builds this kind of model."""
    settings = read_object(path / "config.json")
    named = settings.get("architectures") or ["none"]
    fix = "take another model or engine"
    if named[0] not in ARCHITECTURES:
        where, expected = f"{path / 'config.json'}: architectures", f"one of {', '.join(ARCHITECTURES)} (native engine)"
        yield found("MDL009", where=where, got=str(named[0]), expected=expected, fix=fix)
        return
    for key, got, expected in unbuilt_values(named[0], settings.get):
        where = f"{path / 'config.json'}: {key}"
        yield found("MDL009", where=where, got=got, expected=f"{expected} (native engine)", fix=fix)


def head_findings(path: Path, config: Config) -> Iterator[Finding]:
    """Check that a model whose multi-token heads are to be trained, or to guess tokens ahead, has any."""
    asked = config.policy.megatron_cfg.mtp_num_layers
    guess = (config.policy.generation.vllm_kwargs.get("speculative_config") or {}).get("method") in OWN_HEADS
    if not read_object(path / "config.json").get("num_nextn_predict_layers"):
        lacks = f"{path / 'config.json'} has no num_nextn_predict_layers"
    else:
        try:
            names = read_weights(path).shape_of
        except CheckpointError:  # the check of the weights names it
            return
        lacks = "" if any(name.startswith(HEADS) for name in names) else f"{path} has no weights of them ({HEADS}*)"
    if asked and lacks:
        key, fix = "policy.megatron_cfg.mtp_num_layers", "set it to 0, or take a model with multi-token heads"
        yield found("MDL004", where=key, got=str(asked), expected=f"0: {lacks}", fix=fix)
    if guess and lacks:
        key, fix = "policy.generation.vllm_kwargs.speculative_config", "remove it, or take a model with such heads"
        yield found("MDL004", where=key, wrong=f"it guesses by the model's multi-token heads: {lacks}", fix=fix)


def route_findings(path: Path, launch: Launch) -> Iterator[Finding]:
    """Check that engines can report the routes that training replays; on a CPU they always can."""
    config, runs_on_cpu = launch.config, launch.contract.is_local and not count_gpus()
    if config is None or runs_on_cpu or not config.policy.router_replay.enabled or not has_experts(path):
        return
    yield from as_findings("MDL004", route_problems(config.policy.generation, launch.environ))


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


def teacher_findings(config: Config) -> Iterator[Finding]:
    """Check that teachers whose engines take the context of their model can read the longest rollout."""
    longest, named = config.policy.max_total_sequence_length, config.grpo.adv_estimator.teachers.values()
    for judge in (one for one in started_judges(config) if one.name in named):
        file = Path(judge.model) / "config.json"
        context = read_object(file).get("max_position_embeddings") if file.is_file() else None
        if judge.engine_arguments.get("max_model_len") is None and isinstance(context, int) and context <= longest:
            got, expected = f"{file} with {context} tokens", f"more than policy.max_total_sequence_length = {longest}"
            fix = "take a teacher with a longer context, or lower the other"
            yield found("MDL004", where=f"{judge.key}.model", got=got, expected=expected, fix=fix)


def object_findings(path: Path) -> Iterator[Finding]:
    """Read the files of settings as policy and engines do, which take nothing but an object."""
    try:
        require_object(path / "config.json", fix=AGAIN)
        stop_token_ids(path)
    except InputError as error:
        yield from as_findings("MDL001", error.problems)


def processor_findings(config: Config) -> Iterator[Finding]:
    """Name what engines can do on GPUs alone, where this machine has none."""
    if not count_gpus():
        yield from as_findings("ENG008", speculation_problems(config.policy.generation))


def package_findings(path: Path, config: Config) -> Iterator[Finding]:
    """Look for the packages that keys and layers of the policy need on this machine."""
    sizes, _ = policy_sizes(path) or ({}, 0)
    problems = package_problems(config.policy.megatron_cfg, sizes, has_cuda=count_gpus() > 0)
    yield from as_findings("ENG006", problems)


def image_findings(path: Path, config: Config) -> Iterator[Finding]:
    """Look for the packages that keys and layers of the policy need in the lock of the GPU image."""
    sizes, _ = policy_sizes(path) or ({}, 0)
    lock = GPU_LOCK.read_text(encoding="utf-8")
    locked = {line.partition("==")[0] for line in lock.splitlines()}
    yield from as_findings("ENG011", image_problems(config.policy.megatron_cfg, sizes, locked))


def argument_findings(config: Config) -> Iterator[Finding]:
    """Look for engine arguments that the vLLM of this machine does not have."""
    known = engine_argument_names()
    for name in sorted(config.policy.generation.vllm_kwargs.keys() - known) if known else ():
        close = get_close_matches(name, known, n=1)
        wrong = "the vLLM of this machine has no such argument" + (f"; is {close[0]} meant?" if close else "")
        where, fix = f"policy.generation.vllm_kwargs.{name}", "correct the name, or remove it"
        yield found("ENG003", where=where, wrong=wrong, fix=fix)


def engine_argument_names() -> frozenset[str]:
    """Return the names of the installed vLLM's engine arguments, read from its source; none where it cannot be read."""
    spec = find_spec("vllm")
    file = Path(spec.origin or "").with_name("engine") / "arg_utils.py" if spec else Path()
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name in ENGINE_CLASSES]
    fields = [field.target for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))


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
        templates = [used_template(directory, tokenizer.chat_template), used_template(path, None)]
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
