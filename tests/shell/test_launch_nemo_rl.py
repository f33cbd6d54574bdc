"""A launch with ENGINE=nemo_rl: the submission runs NeMo RL's entrypoint on the file it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RL = {"ENGINE": "nemo_rl", "CONFIG_PATH": "configs/stage2_swe1.yaml", "CONTAINER": "nvcr.io/nvidia/nemo-rl:v0.7.0"}


def test_submission_runs_their_entrypoint_on_the_written_file(launch):
    launch.env |= RL
    smaller = "policy.megatron_cfg.expert_model_parallel_size=1"  # the made-up model has no experts
    result = launch.plan("--force", "grpo.num_prompts_per_step=32", smaller, EXTRA_HYDRA_ARGS="grpo.seed=7")
    argv = result.words
    assert argv[:2] == ["exec", "sbatch"]
    run_dir = launch.directory / "results" / "exp"
    driver = argv[argv.index("--") + 1 :]
    assert driver[:3] == ["python", "-m", "tools.draft.nemo_rl.driver"]
    assert f"--config={run_dir}/nemo_rl.yaml" in driver
    assert "--env=VLLM_ATTENTION_BACKEND=FLASH_ATTN" in driver
    assert driver[-2:] == [f'policy.model_name="{launch.env["MODEL_PATH"].rstrip("/")}"', "grpo.seed=7"]
    assert "--nodes=64" in argv
    assert any(word.startswith("--container=") and "nemo-rl:v0.7.0" in word for word in argv)
    written = yaml.safe_load((run_dir / "nemo_rl.yaml").read_text(encoding="utf-8"))
    assert written["grpo"]["num_prompts_per_step"] == 32
    assert written["grpo"]["seed"] == 42  # their override parser changes it
    assert written["policy"]["train_global_batch_size"] == 32 * 16
    assert written["data"]["train"]["data_path"] == f"{launch.directory}/train.jsonl"
    assert written["checkpointing"]["checkpoint_dir"] == f"{run_dir}/checkpoints"
    assert "note: ENG004" in result.stderr
    assert "deadlines.refit: NeMo RL 0.7.0 has no such setting (value 1800)" in result.stderr


def test_native_refusals_do_not_apply(launch):
    words = ("--dry-run", "policy.megatron_cfg.fp8_cfg.enabled=true")
    assert "CFG003" not in launch.plan(*words, **RL).stderr
    assert "CFG003" in launch.plan(*words, CONFIG_PATH=RL["CONFIG_PATH"], expect=2).stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"EXTRA_HYDRA_ARGS": "grpo.sede=7"}, "ENG003 EXTRA_HYDRA_ARGS: grpo.sede=7: there is no such key"),
        (
            {"LAUNCHER": "local"},
            "ENG001 ENGINE=nemo_rl: there is no /opt/nemo-rl/examples/nemo_gym/",
        ),
        ({"LAUNCHER": "local", "PERSISTENT_CACHE": ""}, "ENV001 PERSISTENT_CACHE: not set"),
        ({"NUM_SPECULATIVE_TOKENS": "five"}, "NUM_SPECULATIVE_TOKENS: got five, expected a whole number"),
        ({"NUM_SPECULATIVE_TOKENS": "0"}, "NUM_SPECULATIVE_TOKENS: got 0, expected a whole number from 1 on"),
        ({"MAX_NUM_BATCHED_TOKENS": "00"}, "MAX_NUM_BATCHED_TOKENS: got 00, expected a whole number from 1 on"),
        ({"SBATCH_NUM_NODES": "0"}, "SBATCH_NUM_NODES: got 0, expected a whole number from 1 on"),
        ({"ENABLE_MTP_INFERENCE": "perhaps"}, "ENABLE_MTP_INFERENCE: got perhaps, expected true or false"),
    ],
)
def test_what_their_engine_cannot_do_is_refused(launch, variables, message):
    assert message in launch.plan(expect=2, **{**RL, **variables}).stderr
    assert not (launch.directory / "argv").exists()


@pytest.mark.parametrize("trusted", ["false", "true"])
def test_code_of_the_start_weights_runs_only_when_that_is_asked_for(launch, trusted):
    settings = launch.directory / "a-model" / "tokenizer_config.json"
    settings.write_text(
        json.dumps(
            {**json.loads(settings.read_text(encoding="utf-8")), "auto_map": {"AutoTokenizer": ["code.T", None]}}
        ),
        encoding="utf-8",
    )
    planned = launch.plan("--dry-run", **RL, TRUST_REMOTE_CODE=trusted, expect=0 if trusted == "true" else 2)
    assert ("--trust-remote-code" in planned.words) == (trusted == "true")
    assert (f"would be refused: ENG005 {settings}: `auto_map` names code" in planned.stderr) == (trusted == "false")


def test_both_engines_decode_with_the_heads_when_that_is_asked_for(launch):
    asked = {"ENABLE_MTP_INFERENCE": "1", "NUM_SPECULATIVE_TOKENS": "3"}
    words = launch.plan("--dry-run", **asked).words
    assert "policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 3}" in words
    assert "policy.generation.vllm_kwargs.max_num_batched_tokens=8480" in words
    assert not any("speculative" in word for word in launch.plan("--dry-run").words)
    allowed = launch.plan("--dry-run", **RL, ENABLE_MTP_INFERENCE="1").stderr
    assert "ENABLE_MTP_INFERENCE" not in allowed


def test_local_launch_inside_the_container_runs_the_supervisor(launch):
    home = launch.directory / "nemo-rl"
    program = home / "examples" / "nemo_gym" / "run_grpo_nemo_gym.py"
    program.parent.mkdir(parents=True)
    program.write_text("", encoding="utf-8")
    (home / "nemo_rl").mkdir()
    (home / "nemo_rl" / "package_info.py").write_text("MAJOR = 0\nMINOR = 7\n", encoding="utf-8")
    words = launch.plan("--dry-run", **RL, LAUNCHER="local", NEMO_RL_DIR=str(home), expect=2).words  # no GPUs here
    assert words[2:4] == ["-m", "tools.job.local"]
    assert words[words.index("--") + 2 : words.index("--") + 4] == ["-m", "tools.draft.nemo_rl.driver"]
    assert f"--home={home}" in words
