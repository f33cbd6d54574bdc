"""Overlays hold only differences."""

from pathlib import Path

import pytest

from recipes.config.keys.schema import CONFIG_DIR
from tools.dev.lint_overlays import lint_overlay

SMALL = CONFIG_DIR / "small_scale" / "stage1_rlvr_convergence_27node_h100.yaml"
OVERLAYS = [path for path in CONFIG_DIR.rglob("*.yaml") if "defaults:" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: str(path.relative_to(CONFIG_DIR)))
def test_shipped_overlay_is_minimal(path: Path) -> None:
    assert lint_overlay(path) == []


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: str(path.relative_to(CONFIG_DIR)))
def test_shipped_overlay_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 50


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("grpo: {num_prompts_per_step: 256}",
         "x.yaml:2: grpo.num_prompts_per_step: this line changes nothing: the value is 256 without it; delete it"),
        ("policy:\n  train_global_batch_size: 4096",  # follows from P and G already
         "x.yaml:3: policy.train_global_batch_size: this line changes nothing: the value is 4096 without it; "
         "delete it"),
        ("policy: {megatron_cfg: {optimizer: {lr: 1.0e-5, min_lr: 1.0e-5}}}",  # min_lr follows lr
         "x.yaml:2: policy.megatron_cfg.optimizer.min_lr: this line changes nothing: the value is 1e-05 without it; "
         "delete it"),
        ("grpo: {sed: 1}",
         "x.yaml: grpo.sed: there is no such key; did you mean grpo.seed?"),
    ],
)  # fmt: skip
def test_line_that_changes_nothing(text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(f"defaults: {SMALL}\n{text}\n", encoding="utf-8")
    assert [str(problem) for problem in lint_overlay(Path("x.yaml"))] == [line]


def test_line_that_changes_something(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"defaults: {SMALL}\ngrpo: {{seed: 43}}\npolicy: {{generation: {{vllm_kwargs: {{x: 1}}}}}}\n", encoding="utf-8"
    )
    assert lint_overlay(path) == []
