"""Each key is declared once: schema and comments follow from the classes, and no key is declared and forgotten."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.config.keys.schema import CONFIG_DIR, declared, schema
from recipes.config.keys.upstream import HINTS
from recipes.config.load import BASE, build, load_config, walk
from recipes.config.tree import Config
from recipes.errors import ConfigError
from tools.dev import keys
from tools.dev.keys import commented, generated_files, schema_of_keys

FREE_FORM = {
    "policy.tokenizer.chat_template_kwargs",
    "policy.hf_config_overrides",
    "policy.megatron_cfg.env_vars",
    "policy.generation.vllm_kwargs",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs",
}
PINNED = {  # rules hold them to the value that is read in their place
    "env.nemo_gym.config_paths",  # the loader replaces it by what the files hold
    "policy.megatron_cfg.pipeline_dtype",
    "policy.megatron_cfg.optimizer.clip_grad",
    "policy.generation.top_k",
    "policy.generation.val_top_k",
}
ROOT = CONFIG_DIR.parent
LEAVES = {key: node for key, node in declared().items() if "properties" not in node}


def test_generated_files_are_current() -> None:
    for path, text in generated_files().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is older than recipes/config/tree: make config-keys"
        )


def test_the_classes_have_the_fields_that_the_schema_declares() -> None:
    assert {key for key, _ in walk(load_config(BASE).config)} == {*LEAVES, "env.nemo_gym.instances"}


def test_no_default_in_code() -> None:
    with pytest.raises(TypeError, match="missing"):
        build(Config, {})


def test_a_new_key_needs_its_default() -> None:
    schema = schema_of_keys()
    schema["properties"]["cluster"]["properties"]["num_racks"] = {"type": "integer", "minimum": 1, "description": "x"}
    del schema["properties"]["logger"]["properties"]["wandb_enabled"]
    with pytest.raises(ConfigError) as caught:
        commented(BASE.read_text(encoding="utf-8"), schema)
    assert [str(problem) for problem in caught.value.problems] == [
        "grpo_base.yaml: cluster.num_racks: a key of recipes/config/tree is missing here; add it with its default; it "
        "is an integer >= 1",
        "grpo_base.yaml: logger.wandb_enabled: no class of recipes/config/tree declares this key; declare it there, or "
        "delete it here",
    ]


ENTRIES: dict[str, Any] = {
    "properties": {
        "a": {
            "description": "A block.",
            "properties": {
                "b": {"type": "integer", "description": "first"},
                "c": {
                    "type": "string",
                    "description": " ".join(["second"] * 18),
                    "x-native": {"honours": {"enum": ["x", "y"]}, "reason": "not built"},
                },
                "d": {"type": "object", "additionalProperties": True, "description": "third"},
            },
        },
        "e": {"type": "boolean", "description": "fourth", "x-native": {"no_effect": "until it is built"}},
    }
}
OLD = """# The head of the file.

a:  # old
  # Why it is 3.
  b: 3
  # c: old
  #   and long
  c: x
  d:  # old
    free: "a # b"  # of the user

e: true
"""
NEW = f"""# The head of the file.

a:  # A block.
  # Why it is 3.
  b: 3  # first
  # c: {" ".join(["second"] * 16)}
  #   second second [native: only x or y]
  c: x
  d:  # third
    free: "a # b"  # of the user

e: true  # fourth [native: no effect]
"""


def test_comments_are_replaced_and_nothing_else() -> None:
    assert commented(OLD, ENTRIES) == NEW
    assert commented(NEW, ENTRIES) == NEW


def test_stale_files_are_written_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("schema.json", BASE.name):
        (tmp_path / name).write_bytes((CONFIG_DIR / name).read_bytes())
    base = tmp_path / BASE.name
    base.write_text(
        BASE.read_text(encoding="utf-8").replace("  seed: 42  # seed", "  seed: 42  # old seed"), encoding="utf-8"
    )
    monkeypatch.setattr(keys, "SCHEMA", tmp_path / "schema.json")
    monkeypatch.setattr(keys, "BASE", base)
    assert keys.main() == 0
    assert capsys.readouterr().out == f"wrote {base}\n"
    assert base.read_text(encoding="utf-8") == BASE.read_text(encoding="utf-8")


def test_loading_needs_neither_pydantic_nor_torch() -> None:
    code = (
        "import sys; from recipes.config.load import BASE, load_config; load_config(BASE)\n"
        "assert not {'pydantic', 'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_every_block_refuses_unknown_keys() -> None:
    blocks = {key: node for key, node in declared().items() if "properties" in node}
    assert schema()["additionalProperties"] is False
    assert {key for key, node in blocks.items() if node["additionalProperties"] is not False} == {"env.nemo_gym"}
    assert {key for key, node in LEAVES.items() if node.get("additionalProperties") is True} == FREE_FORM
    for key, node in blocks.items():
        assert set(node["required"]) == set(node["properties"]), key


def test_every_refusal_gives_a_reason() -> None:
    natives = {key: node["x-native"] for key, node in declared().items() if "x-native" in node}
    assert len(natives) > 10
    for key, native in natives.items():
        assert set(native) in ({"honours", "reason"}, {"no_effect"}), key
        assert all(len(native[name]) > 10 for name in ("reason", "no_effect") if name in native), key


def names_in_source(*directories: str) -> set[str]:
    found: set[str] = set()
    for path in [path for directory in directories for path in (ROOT / directory).rglob("*.py")]:
        if path.name == "derive.py" or not path.is_relative_to(ROOT / "recipes" / "config"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
    return found


def test_every_key_is_read_or_refused_or_said_to_have_no_effect() -> None:
    """A search by name: weak, but no key can be declared, documented and forgotten."""
    read = names_in_source("recipes", "tools")
    unread = {
        key
        for key, node in LEAVES.items()
        if key.rpartition(".")[2] not in read and "x-native" not in node and "const" not in node
    }
    assert unread == PINNED


def chains(tree: ast.AST) -> Iterator[str]:
    """Yield `a.b.c` for every chain of attributes on a name, the longest ones."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names: list[str] = []
            at: ast.expr = node
            while isinstance(at, ast.Attribute):
                names.insert(0, at.attr)
                at = at.value
            if isinstance(at, ast.Name):
                yield ".".join([at.id, *names])


def undeclared_reads(source: str) -> set[str]:
    """Return what code reads of a whole configuration, `config.BLOCK...`, that the schema does not declare.

    A leaf may be followed by attributes of its value, and a block may have the instances that its schema leaves open.
    """
    found = set()
    for chain in chains(ast.parse(source)):
        root, _, key = chain.partition(".")
        if root != "config" or key.partition(".")[0] not in BLOCKS:
            continue
        parts = key.split(".")
        prefixes = [".".join(parts[: end + 1]) for end in range(len(parts))]
        known = [prefix for prefix in prefixes if prefix in declared()]
        is_leaf = known and known[-1] in LEAVES
        if not (is_leaf or known == prefixes or key.startswith("env.nemo_gym.instances")):
            found.add(key)
    return found


BLOCKS = {key for key in declared() if "." not in key}


def test_a_key_that_is_read_is_declared() -> None:
    """mypy finds the same in typed code; this is quick and finds it in the tests' own words."""
    for path in [*(ROOT / "recipes").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        assert undeclared_reads(path.read_text(encoding="utf-8")) == set(), path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = config.grpo.sed", {"grpo.sed"}),
        ("x = config.policy.megatron_cfg.optimizer.lrate * 2", {"policy.megatron_cfg.optimizer.lrate"}),
        ("x = config.policy.model_name.upper()", set()),
        ("x = config.env.nemo_gym.instances.items()", set()),
        ("x = config.loss_fn", set()),
        ("x = run.config.grpo.sed, config.read()", set()),
    ],
)
def test_an_undeclared_read_is_found(line: str, found: set[str]) -> None:
    assert undeclared_reads(line) == found


def test_a_key_said_to_have_no_effect_is_read_nowhere() -> None:
    """In the engine: the doctor and the planner may look at it."""
    without_effect = {key for key, node in LEAVES.items() if "no_effect" in node.get("x-native", {})}
    read = names_in_source("recipes")
    assert not {key for key in without_effect if key.rpartition(".")[2] in read}


def test_left_out_keys_of_nemo_rl_are_not_declared() -> None:
    assert not set(HINTS) & set(declared())


def test_no_line_of_a_config_file_is_too_long() -> None:
    """Of stages and environments; yamllint bounds the tables of engines and data."""
    for path in [path for path in CONFIG_DIR.rglob("*.yaml") if path.parent.name not in ("engines", "data")]:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert len(line) <= 120 or "${" in line or " " not in line.strip(), f"{path}: {line}"
