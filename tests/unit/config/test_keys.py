"""Base YAML, schema and dataclass tree declare the same keys, and each key says what it means."""

import ast
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from recipes.config.load import BASE, build, load_config, walk
from recipes.config.schema import CONFIG_DIR, declared, schema
from recipes.config.tree import Config
from recipes.config.upstream import HINTS
from recipes.config.yaml_files import leaves

FREE_FORM = {
    "policy.tokenizer.chat_template_kwargs",
    "policy.hf_config_overrides",
    "policy.megatron_cfg.env_vars",
    "policy.generation.vllm_kwargs",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs",
}
PINNED = {  # rules hold them to the value that is read in their place
    "env.nemo_gym.config_paths",  # the loader replaces it by what the files hold
    "policy.train_global_batch_size",
    "policy.megatron_cfg.pipeline_dtype",
    "policy.megatron_cfg.optimizer.clip_grad",
    "policy.generation.val_top_k",
}
ROOT = CONFIG_DIR.parent
LEAVES = {key: node for key, node in declared().items() if "properties" not in node}


def fields_of(cls: Any, prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, hint in get_type_hints(cls).items():
        if hasattr(hint, "__dataclass_fields__"):
            found.update(fields_of(hint, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = hint
    return found


def test_base_schema_and_tree_declare_the_same_keys() -> None:
    base = leaves(yaml.safe_load(BASE.read_text()))
    written = {next((free for free in FREE_FORM if key.startswith(free)), key) for key in base}
    tree = set(fields_of(Config)) - {"env.nemo_gym.instances"}
    assert written == set(LEAVES)
    assert tree == set(LEAVES)


def test_tree_and_schema_agree_on_types() -> None:
    names = {int: "integer", float: "number", bool: "boolean", str: "string", tuple: "array", type(None): "null"}
    for key, hint in fields_of(Config).items():
        if key in LEAVES:
            hints = get_args(hint) if type(None) in get_args(hint) else (hint,)
            types = {names.get(getattr(h, "__origin__", h), "object") for h in hints}
            allowed = LEAVES[key]["type"]
            assert types == set(allowed if isinstance(allowed, list) else [allowed]), key


def test_no_default_in_code() -> None:
    with pytest.raises(TypeError, match="missing"):
        build(Config, {})


def test_every_key_of_the_base_carries_its_meaning() -> None:
    comments: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    above = ""
    for line in BASE.read_text().splitlines():
        match = re.fullmatch(r"( *)([\w]+):(?: [^#]*?)?(?:  # (.*))?", line)
        if match:
            indent = len(match[1])
            path = [(i, name) for i, name in path if i < indent] + [(indent, match[2])]
            comments[".".join(name for _, name in path)] = match[3] or above
        above = line.strip().removeprefix("# ") if line.strip().startswith("#") else ""
    for key, node in declared().items():
        assert comments[key] == node["description"], key


def test_every_block_refuses_unknown_keys() -> None:
    blocks = {key: node for key, node in declared().items() if "properties" in node}
    assert schema()["additionalProperties"] is False
    assert {key for key, node in blocks.items() if node["additionalProperties"] is not False} == {"env.nemo_gym"}
    assert {key for key, node in LEAVES.items() if node.get("additionalProperties") is True} == FREE_FORM
    for key, node in blocks.items():
        assert set(node["required"]) == set(node["properties"]), key


def test_every_refusal_gives_a_reason() -> None:
    natives = {key: node["x-native"] for key, node in declared().items() if "x-native" in node}
    assert len(natives) > 30
    for key, native in natives.items():
        assert set(native) in ({"honours", "reason"}, {"inert"}), key
        assert all(len(native[name]) > 10 for name in ("reason", "inert") if name in native), key


def names_in_source(*directories: str) -> set[str]:
    found: set[str] = set()
    for path in [path for directory in directories for path in (ROOT / directory).rglob("*.py")]:
        if path.name == "derive.py" or not path.is_relative_to(ROOT / "recipes" / "config"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
    return found


def test_every_key_is_read_or_refused_or_said_to_be_inert() -> None:
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
        assert undeclared_reads(path.read_text()) == set(), path


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


def test_a_key_said_to_be_inert_is_read_nowhere() -> None:
    """In the engine: the doctor and the planner may look at it."""
    inert = {key for key, node in LEAVES.items() if "inert" in node.get("x-native", {})}
    read = names_in_source("recipes")
    assert not {key for key in inert if key.rpartition(".")[2] in read}


def test_left_out_keys_of_nemo_rl_are_not_declared() -> None:
    assert not set(HINTS) & set(declared())


def test_no_line_of_a_config_file_is_too_long() -> None:
    """Of stages and environments; yamllint bounds the tables of engines and data."""
    for path in [path for path in CONFIG_DIR.rglob("*.yaml") if path.parent.name not in ("engines", "data")]:
        for line in path.read_text().splitlines():
            assert len(line) <= 120 or "${" in line or " " not in line.strip(), f"{path}: {line}"


def test_walk_finds_every_leaf() -> None:
    config = load_config(BASE).config
    assert {key for key, _ in walk(config)} == set(fields_of(Config))
