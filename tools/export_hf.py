"""Turn a checkpoint of a run into a Hugging Face directory, which transformers, vLLM and the next stage load.

    make export-hf CHECKPOINT=results/RUN/checkpoints/step_000010 OUT=models/my-export

One process without a GPU reads a checkpoint of any layout. The directory appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.config.load import BASE, load_config
from recipes.config.tree import PeftConfig, build
from recipes.errors import CheckpointError, InputError, Problem
from recipes.files import sync_directory
from tools.command_line import exit_status

if TYPE_CHECKING:
    from recipes.config.tree import PolicyConfig

_RESOLVED = "resolved.json"


@exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the directory; returns 2 for wrong input, and then writes nothing."""
    parser = argparse.ArgumentParser(prog="export_hf", description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of a step: .../step_000010")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist")
    of_model = "default: the run's start weights; of a run with adapters, a copy of them"
    parser.add_argument("--model", type=Path, help=of_model)
    parser.add_argument("--tokenizer", type=Path, help="default: the run's tokenizer")
    options = parser.parse_args(arguments)
    checkpoint, out = options.checkpoint.resolve(), options.out
    if out.exists():
        raise InputError(Problem(where=str(out), wrong="it exists already", fix="remove it, or give another OUT"))
    if not checkpoint.is_dir():
        fix = "give the directory of a step: CHECKPOINT=results/RUN/checkpoints/step_000010, or .../latest"
        raise InputError(Problem(where=str(options.checkpoint), wrong="there is no such directory", fix=fix))
    policy = _policy(checkpoint, options.model, options.tokenizer)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: the export needs no GPU

    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")  # what they lack without a GPU

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # warns of random states, which an export does not draw from
    logging.getLogger("recipes.policy.hf").setLevel(logging.INFO)  # which file is written

    from recipes.grpo.checkpoint import require_whole
    from recipes.policy.export import export_checkpoint

    print(f"{checkpoint}: comparing the files of policy/ with their checksums", flush=True)
    require_whole(checkpoint, "policy")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run of this command that was killed
    try:
        export_checkpoint(checkpoint / "policy", partial, policy)
        partial.rename(out)
        sync_directory(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: exported from {checkpoint}")
    return 0


def _policy(checkpoint: Path, model: Path | None, tokenizer: Path | None) -> PolicyConfig:
    """Return the configuration of a policy that has the run's model, tokenizer and precision."""
    recorded = _recorded(checkpoint.parent.parent / _RESOLVED)
    try:
        name, words, precision = recorded["model_name"], recorded["tokenizer"]["name"], recorded["precision"]
    except (KeyError, TypeError) as error:
        where, wrong = checkpoint.parent.parent / _RESOLVED, f"it says nothing of policy: {error} is missing"
        raise CheckpointError(
            Problem(where=str(where), wrong=wrong, fix="restore the file that the run wrote")
        ) from error
    template = recorded["tokenizer"].get("chat_template")
    base = load_config(BASE).repaired
    assert base is not None, "the base configuration loads"
    found = (recorded.get("megatron_cfg") or {}).get("peft")  # a run of an older version had no adapters
    peft = base.policy.megatron_cfg.peft if found is None else build(PeftConfig, found)
    model_name, tokenizer_name = str(model or name), str(tokenizer or model or words)
    for option, value in (("--model", model_name), ("--tokenizer", tokenizer_name)):
        if not (Path(value) / "config.json").is_file() and Path(value).is_absolute():
            wrong = "it has no config.json; the run was started from it"
            copy = "a copy of it" if peft.enabled else "for example the export of another step"
            fix = f"give {option}, a directory with the same configuration, {copy}"
            raise InputError(Problem(where=value, wrong=wrong, fix=fix))
    return replace(
        base.policy,
        model_name=model_name,
        precision=precision,
        megatron_cfg=replace(base.policy.megatron_cfg, peft=peft),
        tokenizer=replace(base.policy.tokenizer, name=tokenizer_name, chat_template=template),
    )


def _recorded(path: Path) -> Mapping[str, Any]:
    """Return the block `policy` of the configuration that the run has recorded."""
    try:
        policy: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config"]["policy"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = f"the configuration of the run cannot be read: {error}"
        fix = "give the directory of a step below its run: results/RUN/checkpoints/step_000010"
        raise CheckpointError(Problem(where=str(path), wrong=wrong, fix=fix)) from error
    return policy


if __name__ == "__main__":
    sys.exit(main())
