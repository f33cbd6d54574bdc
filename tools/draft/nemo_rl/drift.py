"""Compare the published stage files with ours: every difference has a written reason, or the status is 1.

    python -m tools.draft.nemo_rl.drift --upstream CHECKOUT

CHECKOUT, of NeMo RL or of the Nemotron recipes, is a working tree, or a git directory, whose newest commit is read.
configs/engines/drift.yaml pairs the files and holds the reasons, each for a key and the two values that it has: with
another value the difference has no reason. What our keys cannot say is a difference too. Two messages of the import are
reasons by themselves, whatever the value: that a launch gives the key, and that nothing there reads it.

In a checkout of NeMo Gym the instances that its files declare, the types of servers and their settings are compared
with our list of them, configs/engines/nemo_rl_keys.yaml, in both directions; values and types of settings with the
digests of those that somebody has read, `seen` of the table.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.config.keys.schema import CONFIG_DIR, INSTANCES, lookup, show, upwards
from recipes.config.load import load_config, require_valid
from recipes.config.merge import leaves, read_yaml
from recipes.errors import ConfigError, Problem
from tools.command_line import exit_status
from tools.draft.nemo_rl.accepted import gym_files, is_setting, server_types, settings_of_type
from tools.draft.nemo_rl.import_file import base_path, import_over, read_file

TABLE = CONFIG_DIR / "engines" / "drift.yaml"
LACKED = "there, and not in our list"
GYM_MARK = "nemo_gym/__init__.py"  # a file that only a checkout of NeMo Gym has
# Messages of the import that are reasons whatever the value is.
EXPLAINED = ("given at launch by ", "reads it nowhere", "no server of NeMo Gym reads it")
NONE = "none"  # in place of our value: no key of ours can have it
KINDS = "resources_servers", "responses_api_agents", "responses_api_models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One key that a published file and ours do not have in common."""

    key: str
    what: str  # both values, or what the import says
    reason: str  # empty: nobody has written one


def differences(file: Path, ours: str, reasons: Reasons) -> Iterator[Drift]:
    """Yield every difference between a published file and the file of ours that `ours` names."""
    base = load_config(base_path(ours))
    require_valid(base)
    imported = import_over(read_file(file), [base])
    for key, value in leaves(imported.overlay).items():
        name = key.replace("~", "")
        if name == key and lookup(base.tree, name) == value:
            continue  # stated only because what it is computed from differs, which is a line of its own
        pair = f"{'absent' if '~' in key else shown(value)} -> {shown(lookup(base.tree, name))}"
        yield Drift(key=name, what=pair, reason=reasons.of(name, pair))
    for key, advice in imported.lost.items():
        if any(words in advice for words in EXPLAINED):
            yield Drift(key=key, what=advice, reason=advice)
            continue
        below = {leaf: value for leaf, value in imported.lost_values.items() if key in upwards(leaf)}
        block, _, file_name = key.partition(": ")
        for name, value in (below or {block: file_name or "unresolved"}).items():
            pair = f"{shown(value)} -> {NONE}"
            yield Drift(key=name, what=f"{pair}: {advice}", reason=reasons.of(name, pair))


def shown(value: Any) -> str:
    """Return a value on one line; of a long one the hash, so that another one is another difference."""
    text = json.dumps(value, default=str)
    return text if text == show(value) else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Reasons:
    """The written reasons of one group of files, and which of them were used."""

    def __init__(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self.texts: dict[tuple[str, str], str] = {}
        for entry in entries:
            why = " ".join(str(entry["why"]).split())
            for key, pairs in entry["at"].items():
                self.texts |= {(key, pair): why for pair in ([pairs] if isinstance(pairs, str) else pairs)}
        self.unused = set(self.texts)

    def of(self, key: str, pair: str) -> str:
        """Return the reason for a key with these two values; empty without one."""
        self.unused.discard((key, pair))
        return self.texts.get((key, pair), "")

    def moot(self) -> Iterator[tuple[str, Drift]]:
        """Yield the reasons that explain nothing."""
        for key, pair in sorted(self.unused):
            what = f"{pair}: no published file differs there so any more: remove the reason"
            yield TABLE.name, Drift(key=key, what=what, reason="")


def contents(upstream: Path, names: list[str]) -> Mapping[str, bytes]:
    """Return the files of a working tree, or of the newest commit of a git directory, that are there."""
    if not (upstream / "HEAD").is_file():
        return {name: (upstream / name).read_bytes() for name in names if (upstream / name).is_file()}
    git = ["git", f"--git-dir={upstream}"]
    listed = subprocess.run(
        [*git, "ls-tree", "--name-only", "HEAD", *names], capture_output=True, encoding="utf-8", check=False
    )
    found = [name for name in listed.stdout.splitlines() if name in names]
    return {
        name: subprocess.run([*git, "show", f"HEAD:{name}"], capture_output=True, check=True).stdout for name in found
    }


def listed_in(upstream: Path, kinds: Iterable[str]) -> list[str]:
    """Return the files below these folders of a working tree, or of the newest commit of a git directory."""
    if not (upstream / "HEAD").is_file():
        found = (file for kind in kinds for file in sorted((upstream / kind).rglob("*")) if file.is_file())
        return [file.relative_to(upstream).as_posix() for file in found]
    git = ["git", f"--git-dir={upstream}", "ls-tree", "-r", "--name-only", "HEAD", *kinds]
    return subprocess.run(git, capture_output=True, encoding="utf-8", check=True).stdout.splitlines()


def gym_differences(upstream: Path, reasons: Reasons) -> Iterator[tuple[str, Drift]]:
    """Yield what a checkout of NeMo Gym has otherwise than our list: files, instances, types, settings; both ways."""
    ours, there = gym_files(), listed_in(upstream, KINDS)
    texts = contents(upstream, list(ours))
    for name, instances in ours.items():
        found = set(yaml.safe_load(texts[name]) or {}) if name in texts else set()
        if found != set(instances):
            what = f"not declared by both: {', '.join(sorted(found ^ set(instances)))}" if found else "the file is gone"
            yield name, Drift(key="instances", what=what, reason=reasons.of(name, what))
    types = {f"{kind}/{server}": (kind, server) for kind, server in server_types()}
    for name in there:
        parts = name.split("/")
        place, is_type = "/".join(parts[:2]), len(parts) == 3 and parts[2] == "app.py"
        if is_type and place not in types:
            yield name, Drift(key=place, what=LACKED, reason=reasons.of(parts[0], parts[1]))
        elif place in types and parts[2] == "configs" and name.endswith(".yaml") and name not in ours:
            file = "/".join(parts[3:]).removesuffix(".yaml")
            yield name, Drift(key=place, what=LACKED, reason=reasons.of(place, file))
    sources = contents(upstream, [f"{place}/app.py" for place in types])
    words = {place: set(re.findall(r"\w+", sources.get(f"{place}/app.py", b"").decode())) for place in types}
    for place, (kind, server) in types.items():
        name = f"{place}/app.py"
        if name not in sources:
            yield name, Drift(key=server, what="there is no such type", reason=reasons.of(server, "gone"))
            continue
        for setting in sorted({name_of(line) for line in settings_in(sources[name].decode())}):
            if not is_setting(f"{INSTANCES}.any.{kind}.{server}.{setting}"):
                reason = reasons.of(server, setting)
                yield name, Drift(key=f"{server}.{setting}", what="a setting that our list lacks", reason=reason)
        of_files = [text for file, text in texts.items() if file.startswith(f"{place}/")]
        known = words[place].union(*(re.findall(r"\w+", text.decode()) for text in of_files))
        known |= set().union(*words.values()) if kind == "responses_api_models" else set()  # they build on each other
        for setting in sorted(set(settings_of_type(kind, server)) - known):
            what = "a setting of our list that nothing there reads"
            yield name, Drift(key=f"{server}.{setting}", what=what, reason=reasons.of(server, f"no {setting}"))


def unread(texts: Mapping[str, bytes], seen: Mapping[str, str]) -> Iterator[tuple[str, Drift]]:
    """Yield the files of NeMo Gym whose values or settings are not those that somebody has read."""
    for name, known in seen.items():
        if name in texts and (found := digest_of(name, texts[name])) != known:
            what = f"not what was read last ({known}): read it, mend our list, write {found} under `seen`"
            key = "values" if name.endswith(".yaml") else "types of settings"
            yield name, Drift(key=key, what=what, reason="")


def leaves_of(seen: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return path -> digest."""
    return {f"{place}/{file}": str(digest) for place, files in seen.items() for file, digest in files.items()}


def digest_of(name: str, content: bytes) -> str:
    """Return the hash of the values of a file, or of the settings that a source declares, with types and defaults."""
    text = content.decode()
    lines = None if name.endswith(".yaml") else sorted(ast.unparse(line) for line in settings_in(text))
    found = json.dumps(yaml.safe_load(text) if lines is None else lines, sort_keys=True, default=str)
    return hashlib.sha256(found.encode()).hexdigest()[:12]


def name_of(line: ast.AnnAssign) -> str:
    return line.target.id if isinstance(line.target, ast.Name) else ""


def settings_in(source: str) -> Iterator[ast.AnnAssign]:
    """Yield the settings that the configuration class of a server declares."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any(_is_config(base) for base in node.bases):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and name_of(line).islower():
                    yield line


def _is_config(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id.startswith("Base") and base.id.endswith("Config")


def table() -> Mapping[str, Any]:
    """Return the parsed pairs and reasons."""
    document = read_yaml(TABLE, name=TABLE.name)
    if document.problems:
        raise ConfigError(document.problems)
    return document.data


def compare(upstream: Path) -> Iterator[tuple[str, Drift]]:
    """Yield each difference with the published file; a file that is gone and a reason that is moot are differences."""
    if contents(upstream, [GYM_MARK]):
        reasons, seen = Reasons(table()["gym"]["reasons"]), leaves_of(table()["gym"].get("seen", {}))
        yield from gym_differences(upstream, reasons)
        yield from unread(contents(upstream, list(seen)), seen)
        yield from reasons.moot()
    for group in table().values():
        files, reasons = group["files"], Reasons(group["reasons"])
        there = contents(upstream, list(files))
        if not there:
            continue  # of another repository
        folder = Path(os.path.commonpath([Path(file).parent for file in files]))
        for name in listed_in(upstream, [str(folder)]):
            if name.endswith(".yaml") and name not in files:
                place = Path(name)
                yield name, Drift(key="the file", what=LACKED, reason=reasons.of(str(place.parent), place.name))
        with tempfile.TemporaryDirectory() as directory:
            for name, content in there.items():  # all of them first: one may be the parent of another
                file = Path(directory, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            for name, ours in files.items():
                if name not in there:
                    yield name, Drift(key="the file", what=f"it is gone; {ours} is made from it", reason="")
                    continue
                yield from ((name, drift) for drift in differences(Path(directory, name), ours, reasons))
        yield from reasons.moot()


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Print every difference, those without a reason last; return 1 when there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True, help="a checkout of NeMo RL or of the Nemotron recipes")
    upstream: Path = parser.parse_args(argv).upstream
    start = time.monotonic()
    found = list(compare(upstream))
    known = [GYM_MARK, *(file for group in table().values() for file in group["files"])]
    if not found and not contents(upstream, known):
        wrong = "none of the published stage files is there"
        raise ConfigError(Problem(where=f"UPSTREAM={upstream}", wrong=wrong, fix="give a checkout of NeMo RL"))
    for name, drift in sorted(found, key=lambda pair: not pair[1].reason):
        print(f"{name}: {drift.key}: {drift.reason or f'{drift.what}: NO REASON'}")
    unexplained = sum(not drift.reason for _, drift in found)
    seconds = time.monotonic() - start
    print(f"drift: {len(found)} differences, {unexplained} without a reason, in {seconds:.1f} s")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
