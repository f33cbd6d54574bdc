"""A launch of NeMo RL's entrypoint: what it adds to the configuration, the environment, the command, the overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import LoadedConfig, load_config
from tools import show_config
from tools.draft.contract import Contract, read_contract
from tools.draft.nemo_rl.export import (
    driver_words,
    environment,
    export,
    exported_for,
    override_problems,
    render_export,
    write_config,
)

RUN = Path("/runs/exp")
GIVEN = ("policy.model_name=/w/sft", "data.train.data_path=/d/t.jsonl", "data.validation.data_path=/d/v.jsonl")
ENVIRON = {"ENGINE": "nemo_rl", "EXP_NAME": "exp", "MODEL_PATH": "/w/sft", "PERSISTENT_CACHE": "/cache"}


def contract(**variables: str) -> Contract:
    found, _ = read_contract({**ENVIRON, **variables})
    return found


@pytest.fixture(scope="module")
def loaded() -> LoadedConfig:
    return load_config(CONFIG_DIR / "stage2_swe2.yaml", (*GIVEN, "sif_dir=/images"))


def test_paths_are_those_of_the_run_and_of_the_container(loaded: LoadedConfig) -> None:
    tree = exported_for(loaded, contract(GYM_VENV_DIR="/venvs", NEMO_RL_DIR="/opt/x"), RUN).tree
    assert lookup(tree, "checkpointing.checkpoint_dir") == "/runs/exp/checkpoints"
    assert lookup(tree, "logger.log_dir") == "/runs/exp/logs"
    assert lookup(tree, "env.nemo_gym.uv_venv_dir") == "/venvs"
    plugin = lookup(tree, "policy.generation.vllm_cfg.reasoning_parser_plugin")
    assert plugin.startswith("/opt/x/nemo_rl/models/generation/vllm/")
    assert lookup(tree, "policy.tokenizer.name") == "${policy.model_name}"  # follows the word in the command
    assert lookup(tree, "data.train.data_path") == "/d/t.jsonl"


def test_speculative_decoding_is_what_the_published_launcher_makes_of_it(loaded: LoadedConfig) -> None:
    plain = exported_for(loaded, contract(), RUN).tree
    found = exported_for(loaded, contract(ENABLE_MTP_INFERENCE="1", NUM_SPECULATIVE_TOKENS="3"), RUN).tree
    kwargs = lookup(found, "policy.generation.vllm_kwargs")
    assert kwargs["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert kwargs["enable_chunked_prefill"] is True
    assert kwargs["max_num_batched_tokens"] == 8480
    assert kwargs["mamba_cache_mode"] == "align"
    assert kwargs["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    assert lookup(found, "policy.generation.vllm_cfg.enable_prefix_caching") is False
    assert "speculative_config" not in lookup(plain, "policy.generation.vllm_kwargs")
    assert lookup(plain, "policy.generation.vllm_cfg.enable_prefix_caching") is True
    assert lookup(export(loaded).tree, "policy.generation.vllm_kwargs.compilation_config.cudagraph_capture_sizes")


def test_file_is_written_with_its_losses(loaded: LoadedConfig, tmp_path: Path) -> None:
    path = write_config(loaded, contract(), tmp_path)
    assert path == tmp_path / "nemo_rl.yaml"
    assert [file.name for file in tmp_path.iterdir()] == ["nemo_rl.yaml"]
    assert lookup(yaml.safe_load(path.read_text(encoding="utf-8")), "grpo.num_prompts_per_step") == 16
    assert "# not the same: configs/grpo_base.yaml: deadlines.refit" in path.read_text(encoding="utf-8")


def test_environment_is_the_published_one_and_the_users_wins() -> None:
    found = environment(contract(), {})
    assert found["VLLM_ATTENTION_BACKEND"] == "FLASH_ATTN"
    assert found["VLLM_DEEP_GEMM_WARMUP"] == "skip"
    assert found["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
    assert found["NRL_WG_USE_RAY_REF"] == "1"
    assert found["NRL_MEGATRON_CHECKPOINT_DIR"] == "/cache/megatron_ckpt_cache"
    assert found["MEGATRON_CONFIG_LOCK_DIR"] == "/cache/hf_config_locks"
    assert found["HF_MODULES_CACHE"] == "/cache/hf_modules/exp"
    assert found["NEMO_GYM_VENV_DIR"] == "/opt/gym_venvs"
    assert environment(contract(), {"UV_HTTP_TIMEOUT": "60"})["UV_HTTP_TIMEOUT"] == "60"


def test_users_overrides_are_the_last_words_and_whole() -> None:
    variables = contract(MODEL_PATH="/w/a model", EXTRA_HYDRA_ARGS="grpo.seed=3 'logger.wandb.name=two words'")
    words = driver_words(variables, {}, RUN)
    assert words[:4] == ("-m", "tools.draft.nemo_rl.driver", "--home=/opt/nemo-rl", "--config=/runs/exp/nemo_rl.yaml")
    assert words[-4:] == ("--", 'policy.model_name="/w/a model"', "grpo.seed=3", "logger.wandb.name=two words")
    assert all(word.startswith("--env=") for word in words[4:-4])


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("grpo.max_num_step=3", "there is no such key", "correct the name"),
        ("policy.megatron_cfg.recompute_granularity=full", "there is no such key",
         "write ++policy.megatron_cfg.recompute_granularity=..."),
        ("+grpo.seed=3", "this key is there already", "write grpo.seed=..."),
        ("++grpo.sede=3", "NeMo RL does not read this key", "did you mean grpo.seed?"),
        ("grpo.seed=x", '"x"', "correct the value"),
        ("grpo.seed", "this is not an override of NeMo RL 0.7.0", "write key=value, +key=value, ++key=value or ~key"),
        ("~grpo.sede", "there is no such key", "correct the name"),
        ("+cluster.num_nodes=3", "this key decides how many nodes the job asks for",
         "give cluster.num_nodes=... to super_launch.sh or as ARGS of make, where "
         "nodes are counted"),
        ("++policy.model_name=/other", "MODEL_PATH sets this key, and what it names is checked and recorded",
         "set MODEL_PATH in its place"),
    ],
)  # fmt: skip
def test_override_that_nobody_would_read_is_refused(loaded: LoadedConfig, word: str, what: str, fix: str) -> None:
    (problem,) = override_problems(export(loaded), [word])
    assert problem.where == f"EXTRA_HYDRA_ARGS: {word}"
    assert (problem.got or problem.wrong, problem.fix) == (what, fix)


@pytest.mark.parametrize(
    "word",
    [
        "grpo.max_num_steps=3",
        "++policy.megatron_cfg.recompute_granularity=selective",
        "policy.generation.vllm_kwargs.max_num_seqs=16",
        "+policy.generation.vllm_kwargs.max_model_len=4096",
        "~policy.generation.vllm_kwargs.max_num_batched_tokens",
        "env.nemo_gym.swe_agents_train.responses_api_agents.swe_agents.concurrency=64",
        "policy.megatron_cfg.optimizer.lr=1e-6",
    ],
)
def test_override_that_they_read_passes(loaded: LoadedConfig, word: str) -> None:
    assert list(override_problems(export(loaded), [word])) == []


def test_messages_name_the_version_of_the_checkout(loaded: LoadedConfig, tmp_path: Path) -> None:
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "package_info.py").write_text("MAJOR = 0\nMINOR = 9\n", encoding="utf-8")
    found = exported_for(loaded, contract(NEMO_RL_DIR=str(tmp_path)), RUN)
    said = [str(problem) for problem in (*found.notes, *found.problems, *override_problems(found, ["grpo.seed"]))]
    assert any("NeMo RL 0.9 " in text for text in said) and not any("NeMo RL 0.7" in text for text in said)
    assert next(render_export(loaded, found)).startswith("# NeMo RL 0.9: ")
    assert any("NeMo RL 0.7.0 " in str(note) for note in export(loaded).notes)


def test_make_config_reads_the_checkout_that_a_launch_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "package_info.py").write_text("MAJOR = 0\nMINOR = 9\n", encoding="utf-8")
    monkeypatch.setenv("NEMO_RL_DIR", str(tmp_path))
    assert show_config.main(["--stage", "stage2.2", "--engine", "nemo_rl"]) == 0
    assert capsys.readouterr().out.startswith("# NeMo RL 0.9: ")
