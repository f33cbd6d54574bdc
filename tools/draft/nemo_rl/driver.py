"""Become NeMo RL's own driver, inside its container: check that it is there, set its environment, execute it.

    begin -> barrier -> this -> examples/nemo_gym/run_grpo_nemo_gym.py --config FILE OVERRIDE...

NeMo RL's code, not this repository's, comes first in the module path of the workers. NeMo RL runs the code that a model
brings without asking; so a model that brings some is refused here, unless TRUST_REMOTE_CODE says that it may run. Then
the code is loaded once, which copies it into the shared cache, where the workers of all nodes find it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import LaunchError, Problem, RecipeError
from recipes.files import read_object
from tools.draft.nemo_rl.accepted import accepted, names_in
from tools.draft.nemo_rl.export import engine, installed_version, rules

DIRECTORIES = ("DG_JIT_CACHE_DIR", "FLASHINFER_CUBIN_DIR", "HF_MODULES_CACHE", "MEGATRON_CONFIG_LOCK_DIR")
MODEL_KEY = "policy.model_name="
BLOCKS = ("grpo.", "loss_fn.")


def home_problems(home: Path) -> list[Problem]:
    """Return a problem where this checkout is older than what the configuration was written for."""
    program = home / rules()["entrypoint"]
    fix = f"start in its container, {rules()['container']}, or set NEMO_RL_DIR"
    if not program.is_file():
        return [Problem(where="ENGINE=nemo_rl", wrong=f"there is no {program}", fix=fix)]
    version = installed_version(home)
    if version and str(rules()["version"]).startswith(f"{version}."):
        return []
    # The version of an unreleased checkout says little: a newer one has every key of these blocks, an older one not.
    lacking = [key for key in accepted() if key.startswith(BLOCKS) and key.rpartition(".")[2] not in names_in(home)]
    if lacking:
        got = f"version {version or 'unknown'} in {home}, which does not read {', '.join(lacking[:3])}"
        return [Problem(where="ENGINE=nemo_rl", got=got, expected=f"{engine()} or newer", fix=fix)]
    return []


def files_with_code(model: Path) -> list[Path]:
    """Return the files of a model that name code of its own."""
    files = [model / name for name in ("config.json", "tokenizer_config.json") if (model / name).is_file()]
    return [file for file in files if "auto_map" in read_object(file)]


def code_problems(model: Path) -> list[Problem]:
    """Return a problem for each file of a model that names code which nobody has said may run."""
    fix = "set TRUST_REMOTE_CODE=true once you have read it, or convert the weights to a class of transformers"
    wrong = "`auto_map` names code that comes with the weights, and NeMo RL would run it as you"
    return [Problem(where=str(file), wrong=wrong, fix=fix) for file in files_with_code(model)]


def load_model_modules(model: Path) -> None:
    """Load configuration and tokenizer of a model that brings code of its own; this copies the code into the cache."""
    if not files_with_code(model):
        return
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.from_pretrained(model, trust_remote_code=True)
    AutoTokenizer.from_pretrained(model, trust_remote_code=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Check, prepare, execute in place of this process."""
    parser = argparse.ArgumentParser(description="Become NeMo RL's own driver.")
    parser.add_argument("--home", type=Path, required=True, help="its checkout")
    parser.add_argument("--config", type=Path, required=True, help="the configuration in its form")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the model brings")
    parser.add_argument("overrides", nargs="+", help="words for its override parser, after --")
    args = parser.parse_args(argv)
    word = next(word.removeprefix(MODEL_KEY) for word in reversed(args.overrides) if word.startswith(MODEL_KEY))
    model = Path(json.loads(word) if word.startswith('"') else word)
    try:
        untrusted = [] if args.trust_remote_code else code_problems(model)
        if problems := [*home_problems(args.home), *untrusted]:
            raise LaunchError(problems)
    except RecipeError as error:
        print(f"nemo_rl: {error}", file=sys.stderr)
        return error.exit_code
    for word in args.env:
        name, _, value = word.partition("=")
        os.environ[name] = value
    os.environ["PYTHONPATH"] = str(args.home)
    for name in DIRECTORIES:
        Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
    load_model_modules(model)
    os.chdir(args.home)
    program = args.home / rules()["entrypoint"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(program), f"--config={args.config}", *args.overrides])


if __name__ == "__main__":
    sys.exit(main())
