"""Every command line of the published pages, pasted, is run here or answered with the line that does it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from recipes.config.load import load_config
from recipes.errors import InputError
from tests.recorded import recorded
from tools.draft.launch import read_launch
from tools.launch.nemotron import answer, main, parse, shown

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "tools" / "launch" / "PUBLISHED.md").read_text(encoding="utf-8")

COMMIT = "0" * 40

# Words after `uv run nemotron` -> what `make` is given.
LINES = {
    "super3 data prep rl rlvr --run X": ["data BLEND=rlvr1", "data BLEND=rlvr2", "data BLEND=rlvr3"],
    "super3 data prep rl swe1 --run X": ["data BLEND=swe1"],
    "super3 data prep rl swe2 --run X": ["data BLEND=swe2"],
    "super3 data prep rl rlhf --run X": ["data BLEND=rlhf"],
    "super3 rl rlvr -c rlvr1 --run X": ["stage1.1 CLUSTER=X", "watch EXP_NAME=stage1.1-rlvr1"],
    "super3 rl rlvr -c rlvr2 --run X": ["stage1.2 CLUSTER=X", "watch EXP_NAME=stage1.2-rlvr2"],
    "super3 rl rlvr -c rlvr3 --run X": ["stage1.3 CLUSTER=X", "watch EXP_NAME=stage1.3-rlvr3"],
    "super3 rl swe1 --run X": ["stage2.1 CLUSTER=X", "watch EXP_NAME=stage2.1-swe1"],
    "super3 rl swe2 --run X": ["stage2.2 CLUSTER=X", "watch EXP_NAME=stage2.2-swe2"],
    "super3 rl rlhf --run X": ["stage3 CLUSTER=X", "watch EXP_NAME=stage3-rlhf"],
    "super3 rl rlvr -c test --run X": ["smoke"],
    "super3 rl swe1 --run X run.env.container=r/nemo-rl:v0.5.0.nemotron_3_super_swe": [
        "stage2.1 CONTAINER=r/nemo-rl:v0.5.0.nemotron_3_super_swe CLUSTER=X",
        "watch EXP_NAME=stage2.1-swe1",
    ],
    "super3 rl swe2 --run X run.env.sif_dir=/path/to/sif": [
        "stage2.2 SIF_DIR=/path/to/sif CLUSTER=X",
        "watch EXP_NAME=stage2.2-swe2",
    ],
    "nano3 rl --run X": ["nano-rl CLUSTER=X", "watch EXP_NAME=nano3-rl"],
    "nano3 rl [options] [overrides...]": ["nano-rl LAUNCHER=local"],
    "nano3 rl policy.generation.temperature=0.8": ["nano-rl LAUNCHER=local ARGS=policy.generation.temperature=0.8"],
}
# Their options, on other lines than the pages show.
FURTHER = {
    "super3 rl rlvr -c rlvr2 --batch X": ["stage1.2 CLUSTER=X"],
    "super3 rl rlvr --dry-run -r X a.b=1 c='d e'": [
        "stage1.1 CLUSTER=X DRY_RUN=1 " + "ARGS=" + shlex.quote("a.b=1 'c=d e'")
    ],
    "super3 rl swe2 -b X run.env.container=i run.env.nodes=70": [
        "stage2.2 SWE_CONTAINER=i SBATCH_NUM_NODES=70 CLUSTER=X"
    ],
    "super3 rl rlhf -c small -b X": ["stage3 SCALE=small CLUSTER=X"],
    "nano3 rl -c small -b X": ["nano-rl SCALE=small CLUSTER=X"],
    "nano3 rl -c test": ["pipeline STAGES=nano-rl SCALE=tiny LAUNCHER=local"],
    "super3 rl rlhf -c configs/native_gpu.yaml -r X": [
        "stage3 CONFIG_PATH=configs/native_gpu.yaml CLUSTER=X",
        "watch EXP_NAME=stage3-rlhf-native_gpu",
    ],
    "super3 rl rlvr -c rlvr2 --sample 20": [
        "stage1.2 TRAIN_PATH=data/rlvr2-sample20/train-split.jsonl VAL_PATH=data/rlvr2-sample20/val-split.jsonl "
        "LAUNCHER=local"
    ],
    "super3 rl rlhf sample=20 ~grpo.x -b X": [
        "stage3 TRAIN_PATH=data/rlhf-sample20/train-split.jsonl VAL_PATH=data/rlhf-sample20/val-split.jsonl "
        "CLUSTER=X ARGS=" + shlex.quote("'~grpo.x'")
    ],
    "super3 rl swe2 -c test -r X run.env.nodes=3 run.env.gpus_per_node=8 a.b=1": [
        "pipeline STAGES=stage2.2 SCALE=tiny LAUNCHER=local ARGS=a.b=1"
    ],
    "nano3 rl -c default -b X": ["nano-rl CLUSTER=X"],
    f"nano3 data prep rl --run X revision={COMMIT}": [f"data BLEND=nano VAL_ROWS=1000 ARGS='--revision {COMMIT}'"],
    "nano3 rl -c configs/native_gpu.yaml -r X": [
        "nano-rl CONFIG_PATH=configs/native_gpu.yaml CLUSTER=X",
        "watch EXP_NAME=nano3-rl-native_gpu",
    ],
    "super3 rl rlhf -c tiny": ["pipeline STAGES=stage3 SCALE=tiny LAUNCHER=local"],
    "super3 data prep rl rlvr -c rlvr2 sample=100 force=true": ["data BLEND=rlvr2 SAMPLE=100"],
    "super3 data prep rl swe1 --sample 20 val_holdout=5": ["data BLEND=swe1 SAMPLE=20 VAL_ROWS=5"],
}
WRONG = {
    "nano3 rl grpo.num_iterations=200": "grpo.max_num_steps=N",
    "nano3 rl grpo.learning_rate=5e-7": "policy.megatron_cfg.optimizer.lr=RATE",
    "super3 rl rhlf --run X": "did you mean rlhf?",
    "super3 sft --run X": "not here",
    "super3 rl": "rlvr, swe1, swe2, rlhf",
    "super3 rl swe1 -c rlvr2 --run X": "got a stage swe1, expected the stage rlvr",
    "nano3 rl -c rlvr2": "got a stage of Nano, expected the stage rlvr",
    "nano3 data prep rl --run X": "add revision=COMMIT",
    "nano3 data prep rl [options]": "add revision=COMMIT",
    "nano3 data prep rl revision=main --dry-run": "got 'main', expected a commit",
    "super3 data prep rl rlvr revision=v1": "got 'v1', expected a commit",
    "nano3 rl -c smal": "expected default or test or tiny",
    "super3 rl rlvr -c rlvr4": "did you mean rlvr",
    "super3 rl swe1 -c smal": "did you mean small?",
    "super3 rl swe1 -c no/such.yaml": "there is no such file",
    "super3 data prep rl rlvr -c rlvr22": "did you mean rlvr2?",
    "super3 data prep rl swe1 -c rlvr1": "got rlvr1, expected default",
    "super3 data prep rl rlhf -c tiny": "--sample ROWS takes the first rows",
    "super3 data prep rl rlhf --sample none": "got none, expected a whole number from 1 on",
    "super3 data prep rl rlhf val_holdout=0": "got 0, expected a whole number from 1 on",
    "super3 rl rlhf --sample 0": "got 0, expected a whole number from 1 on",
    "super3 rl rlhf --force": "expected `data prep`",
    "nano3 rl rlvr": "KEY=VALUE words",
    "super3 rl rlhf run.env.qos=high": "the profile",
    "super3 rl rlhf run.model=ModelArtifact-sft:latest": "set MODEL_PATH",
    "super3 data prep rl rlhf sampel=3": "sample",
}


@pytest.mark.parametrize(("line", "commands"), (LINES | FURTHER).items())
def test_a_nemotron_line_is_answered_with_commands_that_make_takes(line: str, commands: list[str]) -> None:
    found = answer(parse(shlex.split(line)), {})
    assert [shown(words).removeprefix("make ") for words in found.commands] == commands
    for words in found.commands:
        accepted = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert not re.search("which `make|nothing here reads|No rule", accepted.stderr), accepted.stderr


@pytest.mark.parametrize(("line", "advice"), WRONG.items())
def test_a_nemotron_line_that_cannot_be_done_says_what_to_write(line: str, advice: str) -> None:
    with pytest.raises(InputError) as error:
        answer(parse(shlex.split(line)), {})
    assert advice in str(error.value)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "stage1.2-rlvr2"),
        ({"SCALE": "small"}, "stage1.2-rlvr2-small"),
        ({"SCALE": "tiny", "BLEND": "wide"}, "stage1.2-rlvr2-tiny-wide"),
        ({"CONFIG_PATH": "configs/native_gpu.yaml"}, "stage1.2-rlvr2-native_gpu"),
        ({"EXP_NAME": "mine", "SCALE": "small"}, "mine"),
    ],
)
def test_the_run_that_is_followed_is_the_one_that_the_launch_names(environ: dict[str, str], name: str) -> None:
    found = answer(parse(shlex.split("super3 rl rlvr -c rlvr2 --run X")), environ)
    assert found.commands[-1] == ["watch", f"EXP_NAME={name}"]
    assert read_launch("stage1.2", (), environ).contract["EXP_NAME"] == name
    planned = answer(parse(shlex.split("super3 rl rlvr -c rlvr2 --run X")), {**environ, "DRY_RUN": "1"})
    assert [words[0] for words in planned.commands] == ["stage1.2"]


def test_what_a_trial_does_not_read_is_said() -> None:
    found = answer(parse(shlex.split("super3 rl rlvr -c test -b X run.env.container=i run.env.nodes=2 --sample 5")), {})
    assert found.notes == [
        "-c test trains a tiny model on its own rows on this machine, without X",
        "not read there: run.env.container, run.env.nodes, --sample",
    ]


def test_a_plan_is_printed_and_nothing_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["super3", "data", "prep", "rl", "rlhf", "--dry-run"]) == 0
    assert capfd.readouterr().out == "nemotron: make data BLEND=rlhf\n"


# Launch blocks: CONFIG_PATH, and the nodes that they ask for ("" where the block asks for none).
GUIDE, SUPER = "examples/nemo_gym/nemotron-3-super/", "examples/configs/super/"
BLOCKS = [
    (f"{GUIDE}stage1_rlvr.yaml", "stage1.1-rlvr1", "rlvr1", "183"),
    (f"{GUIDE}stage1_rlvr.yaml", "stage1.2-rlvr2", "rlvr2", "183"),
    (f"{GUIDE}stage1_rlvr.yaml", "stage1.3-rlvr3", "rlvr3", "183"),
    (f"{GUIDE}stage2_swe1.yaml", "stage2.1-swe1", "swe1", ""),
    (f"{GUIDE}stage2_swe2.yaml", "stage2.2-swe2", "swe2", ""),
    (f"{GUIDE}stage3_rlhf.yaml", "stage3-rlhf", "rlhf", "100"),
    (f"{SUPER}stage1_rlvr.yaml", "stage1.1-rlvr1", "rlvr1", ""),
    (f"{SUPER}stage1_rlvr.yaml", "stage1.2-rlvr2", "rlvr2", ""),
    (f"{SUPER}stage1_rlvr.yaml", "stage1.3-rlvr3", "rlvr3", ""),
    (f"{SUPER}stage2_swe1.yaml", "stage2.1-swe1", "swe1", ""),
    (f"{SUPER}stage2_swe2.yaml", "stage2.2-swe2", "swe2", ""),
]


@pytest.mark.parametrize(("path", "name", "blend", "nodes"), BLOCKS)
def test_a_launch_block_takes_our_file_of_its_stage_and_says_so_once(path, name, blend, nodes, tmp_path) -> None:
    block = {"EXP_NAME": name, "CONFIG_PATH": path, "MODEL_PATH": "/path/to/sft", "CONTAINER": "r/nemo-rl:v0.7.0"}
    block |= {"TRAIN_PATH": f"{tmp_path}/{blend}/train-split.jsonl", "VAL_PATH": f"{tmp_path}/{blend}/val-split.jsonl"}
    block |= dict.fromkeys(("SANDBOX_CONTAINER", "PERSISTENT_CACHE", "SLURM_PARTITION", "SLURM_ACCOUNT"), "/given")
    block |= {"SBATCH_NUM_NODES": nodes, "SIF_DIR": "/path/to/sif" if blend == "swe2" else ""}
    launch = read_launch("", (), block)
    assert [finding.code for finding in launch.findings] == ["ENV009"]
    assert f"is configs/{Path(path).name}," in launch.findings[0].problem.wrong.replace("file here ", "")
    assert launch.loaded.path == ROOT / "configs" / Path(path).name
    assert launch.sizes.num_nodes == int(nodes or "64" if "swe" in blend else nodes or "183")
    own = read_launch("", (), {**block, "PLATFORM": "b200", "SBATCH_NUM_NODES": ""})
    assert own.loaded.path == ROOT / "configs" / "b200" / Path(path).name


@pytest.mark.parametrize(
    ("name", "advises_b200"),
    [("stage2_swe1", True), ("small_scale/stage2_swe1_convergence_20node_h100", False), ("stage4_healing", None)],
)
def test_only_a_published_file_has_a_published_path(name, advises_b200):
    launch = read_launch("", (), {"CONFIG_PATH": f"{GUIDE}{name}.yaml"})
    fixes = ["PLATFORM=b200" in one.problem.fix for one in launch.findings if one.code == "ENV009"]
    assert fixes == ([] if advises_b200 is None else [advises_b200])


def test_a_path_that_is_there_is_taken_as_it_is(tmp_path) -> None:
    own = tmp_path / GUIDE / "stage1_rlvr.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(f"defaults: {ROOT}/configs/stage1_rlvr.yaml\n", encoding="utf-8")
    launch = read_launch("", (), {"CONFIG_PATH": str(own)})
    assert launch.loaded.path == own
    assert "ENV009" not in [finding.code for finding in launch.findings]


def test_a_stage_file_of_nemo_rl_gets_one_line_that_names_the_import(tmp_path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(
        "grpo: {max_rollout_turns: 1, normalize_rewards: true, val_batch_size: 256}\n"
        "policy: {dtensor_cfg: {enabled: false}, megatron_cfg: {optimizer: {adam_eps: 1e-8}}}\n",
        encoding="utf-8",
    )
    overlay = tmp_path / "small_scale.yaml"
    overlay.write_text("defaults: theirs.yaml\npolicy: {generation_batch_size: 32}\n", encoding="utf-8")
    for file in (theirs, overlay):
        (problem,) = load_config(file).problems
        assert f"make config-import FILE={file}" in str(problem)


# The other lines, by what tells them from all others.
OTHERS = (
    "nemo-rl:v0.7.0.prefetched_venvs",
    "nemo-rl:v0.5.0.nemotron_3_super_swe",
    "hf download nvidia/Nemotron-RL-Super-Training-Blends",
    "hf download nvidia/Nemotron-3-Super-RL-Training-Blends",
    "fill_placeholders.py",
    "`head` and `tail`",
    "NVIDIA-NeMo/RL.git",
    "NVIDIA-NeMo/Skills.git",
    "enroot import -o nemo-skills-sandbox.sqsh",
    "apptainer_1.3.1_amd64.deb",
    "download_swe_images.py --sif-dir ... --concurrency 16",
    "python data_prep.py --config config/data_prep.yaml",
    "python train.py --config config/grpo_nanov3.yaml",
)
ROWS = [row.split(" | ") for row in PAGE.splitlines() if row.startswith("| ") and " | " in row and "make " in row]


@pytest.mark.parametrize("line", OTHERS)
def test_any_other_line_has_a_row_whose_command_make_takes(line: str) -> None:
    (here,) = {row[1] for row in ROWS if line in row[0]}
    commands = re.findall(r"`make ([^`]*)`", here)
    assert commands
    for command in commands:
        words = ["make", "-n", "-o", ".venv/.synced", *shlex.split(command)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, env=dict(os.environ))
        assert done.returncode == 0, done.stderr


def pasted(text: str) -> set[str]:
    """Return the words of every nemotron line of a page, with short names for what the reader fills in."""
    joined = re.sub(r" *\\\n *", " ", text)
    lines = re.findall(r"^(?:\$ )?uv run nemotron (.+)$", joined, re.MULTILINE)
    return {line.strip().replace("YOUR-CLUSTER", "X").replace("your-registry/", "r/") for line in lines}


def test_the_list_is_whole() -> None:
    directory = recorded("PUBLISHED_PAGES", "published")
    pages = [page.read_text(encoding="utf-8") for page in sorted(directory.glob("*.txt"))]
    lines = set().union(*map(pasted, pages))
    assert lines - WRONG.keys() == set(LINES)
    assert {path for page in pages for path in re.findall(r"CONFIG_PATH=(\S+)", page)} == {path for path, *_ in BLOCKS}
    written = re.sub(r" *\\\n *", " ", "\n".join(pages))
    missing = [line for line in OTHERS if not all(word in written for word in re.findall(r"[\w./:=-]{4,}", line))]
    assert not missing


def test_a_line_of_a_page_is_read_whole() -> None:
    assert pasted("$ uv run nemotron super3 rl swe2 \\\n--run YOUR-CLUSTER a=b\nuv run python x.py\n") == {
        "super3 rl swe2 --run X a=b"
    }
