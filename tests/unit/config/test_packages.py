"""Keys that need a package which is not installed are refused by the package's name, before the model is built."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.config import packages
from recipes.config.load import load_config, require_valid

BASE = Path(__file__).resolve().parents[3] / "configs" / "grpo_base.yaml"
UNFUSED: dict[str, Any] = {
    "attention_backend": "local",
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
FUSED = {*UNFUSED, "optimizer.use_precision_aware_optimizer"}


def test_every_fused_key_names_the_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = require_valid(load_config(BASE, ["policy.model_name=any"])).policy.megatron_cfg
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    found = packages.package_problems(megatron, {}, has_cuda=True)
    assert all("the package transformer_engine is not installed" in problem.wrong for problem in found)
    assert {problem.where.removeprefix("policy.megatron_cfg.") for problem in found} == FUSED

    optimizer = replace(megatron.optimizer, use_precision_aware_optimizer=False)
    plain = replace(megatron, **UNFUSED, optimizer=optimizer)
    assert packages.package_problems(plain, {}, has_cuda=True) == []
    offloaded = replace(plain, optimizer=replace(megatron.optimizer, optimizer_cpu_offload=True))
    assert packages.package_problems(offloaded, {}, has_cuda=True) == []
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    assert packages.package_problems(megatron, {}, has_cuda=True) == []


def test_deepep_needs_its_package_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    config = require_valid(load_config(BASE, ["policy.model_name=any"]))
    optimizer = replace(config.policy.megatron_cfg.optimizer, use_precision_aware_optimizer=False)
    plain = replace(config.policy.megatron_cfg, **UNFUSED, optimizer=optimizer)
    flex = replace(plain, moe_enable_deepep=True, moe_token_dispatcher_type="flex")

    def wrong(*, has_cuda: bool) -> list[tuple[str, str]]:
        found = packages.package_problems(flex, {}, has_cuda=has_cuda)
        return [(problem.where.rpartition(".")[2], problem.wrong) for problem in found]

    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    missing = "the package deep_ep is not installed where the policy runs"
    assert wrong(has_cuda=True) == wrong(has_cuda=False) == [("moe_enable_deepep", missing)]
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    no_cuda = "the package deep_ep needs CUDA, which is not there where the policy runs"
    assert wrong(has_cuda=True) == [] and wrong(has_cuda=False) == [("moe_enable_deepep", no_cuda)]


def test_mamba_layers_name_the_packages_they_need_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = require_valid(load_config(BASE, ["policy.model_name=any"])).policy.megatron_cfg
    hybrid = {"mamba_num_heads": 8}
    optimizer = replace(megatron.optimizer, use_precision_aware_optimizer=False)
    plain = replace(megatron, **UNFUSED, optimizer=optimizer)
    divided = replace(plain, context_parallel_size=8)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    mamba = [("policy.model_name (Mamba layers)", name) for name in ("mamba_ssm", "causal_conv1d")]
    context = ("policy.megatron_cfg.context_parallel_size (with Mamba layers)", "transformer_engine")
    for layout, expected in ((plain, mamba), (divided, [*mamba, context])):
        found = packages.package_problems(layout, hybrid, has_cuda=True)
        assert [(problem.where, problem.wrong.split()[2]) for problem in found] == expected
    assert packages.package_problems(divided, hybrid, has_cuda=False) == []
    assert packages.package_problems(divided, {}, has_cuda=True) == []


def test_sums_of_gradients_inside_the_kernel_need_an_extension_of_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = require_valid(load_config(BASE, ["policy.model_name=any"])).policy.megatron_cfg
    fused = replace(megatron, gradient_accumulation_fusion=True)
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name.startswith("fused_weight") else object())
    (problem,) = packages.package_problems(fused, {}, has_cuda=True)
    assert str(problem) == (
        "policy.megatron_cfg.gradient_accumulation_fusion: the package apex (its extension "
        "fused_weight_gradient_mlp_cuda) is not installed where the policy runs; set it to false, or install apex "
        "built with --cpp_ext and --cuda_ext"
    )
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "apex" else object())
    assert packages.package_problems(fused, {}, has_cuda=True) == []


def test_a_package_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron = require_valid(load_config(BASE, ["policy.model_name=any"])).policy.megatron_cfg
    module = tmp_path / "transformer_engine" / "pytorch.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").touch()
    module.write_text("import a_package_that_it_needs\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert packages.package_problems(megatron, {}, has_cuda=True) == [], "the doctor's machine may have no GPU"
    found = packages.package_problems(megatron, {}, has_cuda=True, imports=True)
    del sys.modules["transformer_engine"]
    assert len(found) == len(FUSED)
    why = "ModuleNotFoundError: No module named 'a_package_that_it_needs'"
    assert {problem.wrong for problem in found} == {
        f"the package transformer_engine cannot be imported where the policy runs: {why}"
    }
