"""A launch of NeMo RL's own entrypoint: configuration with what only a launch knows, environment, command."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.keys.schema import lookup
from recipes.config.load import LoadedConfig
from recipes.config.merge import OVERRIDE, drop, put
from recipes.config.yaml_files import parse_value
from recipes.errors import Problem
from recipes.files import write_atomically
from tools.nemo_rl.accepted import instance_of, is_known, key_problem
from tools.nemo_rl.export import ExportedConfig, engine, export, render_export, rules
from tools.planning.contract import Contract
from tools.planning.draft import INPUTS, OVERRIDES

FILE_NAME = "nemo_rl.yaml"
PARSER = "policy.generation.vllm_cfg.reasoning_parser_plugin"
VLLM = "policy.generation.vllm_kwargs"
INPUT_KEYS = {OVERRIDES[variable]: variable for variable in INPUTS}
SIZES = ("cluster", "policy.generation.colocated", "env.nemo_gym.num_gpu_nodes")  # node totals follow from these


def exported_for(loaded: LoadedConfig, contract: Contract, run_dir: Path) -> ExportedConfig:
    """Return the configuration in NeMo RL's form, with the values that only a launch knows."""
    plain = export(loaded)
    tree, sources = copy.deepcopy(dict(plain.tree)), dict(plain.sources)
    changes: dict[str, Any] = {
        "checkpointing.checkpoint_dir": str(run_dir / lookup(tree, "checkpointing.checkpoint_dir")),
        "logger.log_dir": str(run_dir / "logs"),
        "env.nemo_gym.uv_venv_dir": contract["GYM_VENV_DIR"],
        # Engines run where Ray was started, which is not their checkout.
        PARSER: str(Path(contract["NEMO_RL_DIR"]) / lookup(tree, PARSER)),
    }
    if lookup(tree, "policy.tokenizer.name") == lookup(tree, "policy.model_name"):
        changes["policy.tokenizer.name"] = (
            "${policy.model_name}"  # the job may replace it at its start by a newer export
        )
    if contract.is_set("ENABLE_MTP_INFERENCE"):
        changes |= {
            "policy.generation.vllm_cfg.enable_prefix_caching": False,
            f"{VLLM}.enable_chunked_prefill": True,
            f"{VLLM}.max_num_batched_tokens": int(contract["MAX_NUM_BATCHED_TOKENS"]),
            f"{VLLM}.mamba_cache_mode": "align",
            f"{VLLM}.speculative_config": {
                "method": "mtp",
                "num_speculative_tokens": int(contract["NUM_SPECULATIVE_TOKENS"]),
            },
        }
        drop(tree, f"{VLLM}.compilation_config.cudagraph_capture_sizes")
    for key, value in changes.items():
        put(tree, key, value)
        sources[key] = "launch"
    return ExportedConfig(tree=tree, sources=sources, notes=plain.notes, problems=plain.problems)


def write_config(loaded: LoadedConfig, contract: Contract, run_dir: Path) -> Path:
    """Write the file that the driver reads into the run directory; return its path."""
    path = run_dir / FILE_NAME
    lines = render_export(loaded, exported_for(loaded, contract, run_dir))
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return path


def environment(contract: Contract, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NeMo RL's driver needs; those that the user has set win."""
    values = {"cache": contract["PERSISTENT_CACHE"], "name": contract["EXP_NAME"], "venvs": contract["GYM_VENV_DIR"]}
    return {name: environ.get(name) or text.format(**values) for name, text in rules()["environment"].items()}


def driver_words(contract: Contract, environ: Mapping[str, str], run_dir: Path) -> tuple[str, ...]:
    """Return the driver's command after the interpreter; the user's own overrides come last and win.

    The start weights stand in the command because a job that waits for its parent stage replaces them when it begins.
    """
    return (
        *("-m", "tools.nemo_rl.driver"),
        f"--home={contract['NEMO_RL_DIR']}",
        f"--config={run_dir / FILE_NAME}",
        *(["--trust-remote-code"] if contract.is_set("TRUST_REMOTE_CODE") else []),
        *(f"--env={name}={value}" for name, value in environment(contract, environ).items()),
        "--",
        f"policy.model_name={json.dumps(contract['MODEL_PATH'])}",
        *contract.extra_overrides,
    )


def override_problems(tree: Mapping[str, Any], words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each word that NeMo RL's override parser refuses, or takes although nothing reads the key."""
    for word in words:
        where, match = f"EXTRA_HYDRA_ARGS: {word}", OVERRIDE.fullmatch(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            fix = "write key=value, +key=value, ++key=value or ~key"
            yield Problem(where=where, wrong=f"this is not an override of {engine()}", fix=fix)
            continue
        key, sign = match["key"], match["sign"] or ""
        if any(key == name or key.startswith(f"{name}.") for name in SIZES):
            fix = f"give {key}=... to super_launch.sh or as ARGS of make, where nodes are counted"
            yield Problem(where=where, wrong="this key decides how many nodes the job asks for", fix=fix)
            continue
        if (variable := INPUT_KEYS.get(key)) is not None:
            wrong = f"{variable} sets this key, and what it names is checked and recorded"
            yield Problem(where=where, wrong=wrong, fix=f"set {variable} in its place")
            continue
        is_there = _has(tree, key)
        if sign in ("", "~") and not is_there:
            fix = f"write ++{key}=..." if is_known(key) or instance_of(key) else "correct the name"
            yield Problem(where=where, wrong="there is no such key", fix=fix)
        elif sign == "+" and is_there:
            yield Problem(where=where, wrong="this key is there already", fix=f"write {key}=...")
        elif sign != "~" and not instance_of(key):
            value, unreadable = parse_value(match["value"], where=where)
            found = None if unreadable else key_problem(key, value, where)
            yield from [found] if found else unreadable


def _has(tree: Mapping[str, Any], key: str) -> bool:
    block, _, name = key.rpartition(".")
    parent = lookup(tree, block) if block else tree
    return isinstance(parent, Mapping) and name in parent
