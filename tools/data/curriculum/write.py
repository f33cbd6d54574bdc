"""Write the rows of a split in training order, some of them changed, as configs/data/curriculum.yaml says.

    python -m tools.data.curriculum.write --in data/rlvr1/train-split.jsonl --out data/rlvr1-ordered/train-split.jsonl
        --pass-rates results/profile/pass_rates.jsonl [--tokenizer DIR] [seed=1 low_effort.share=0.02 ...]

Unchanged rows are copied byte for byte. The manifest beside the output holds every parameter and the counts. Pass rates
come from the file of `make profile`, or from the rows themselves. The validation split is copied beside the output.

The settings of a curriculum: configs/data/curriculum.yaml with overrides, checked before any row is read.

Edits of one row: mark it as low-effort, remove its reasoning, or cut its reasoning to a budget.

Each edit returns a changed copy and leaves the row as it was.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from recipes.config.keys.schema import describe as describe_schema
from recipes.config.keys.schema import show
from recipes.config.merge import display_name, parse_value, put, read_yaml
from recipes.errors import DataError, InputError, Problem
from recipes.exact_json import dumps, loads
from recipes.grpo.data import row_id
from recipes.types import Row
from tools.command_line import exit_status
from tools.data.curriculum.order import PassRateSchedule, ProfiledRow, choose, gaussian_order, without_solved
from tools.data.files.manifest import changes, describe, lineage_of, manifest_of, write_manifest
from tools.data.files.parallel import Block, blocks_of, map_in_order
from tools.data.files.row_blocks import VALIDATION, HashedWriter, line_at, require_file
from tools.data.rows.pass_rates import pass_rate_of, read_pass_rates
from tools.locks import only_one

THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)

Cut = Callable[[str, int], str]
"""(text, budget) -> the first `budget` tokens of the text."""


def has_reasoning(row: Row) -> bool:
    """Return whether an earlier turn in the conversation of a row holds reasoning."""
    in_texts = any(_with_thoughts(holder[key], lambda _: "") != holder[key] for holder, key in _assistant_texts(row))
    return in_texts or bool(_summaries(row))


def template_kwargs(row: Row) -> dict[str, Any]:
    """Return the arguments that a row gives its chat template; raises `ValueError` for what is no object of JSON."""
    text = (row["responses_create_params"].get("metadata") or {}).get("chat_template_kwargs")
    try:
        value = loads(text) if text else {}
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"metadata.chat_template_kwargs: got {str(text)[:80]!r}, expected JSON text of an object")
    return value


def with_marker(row: Row, marker: str) -> dict[str, Any]:
    """Return the row with `marker` at the end of its last user turn, added only when it is not there."""
    changed = copy.deepcopy(dict(row))
    params = changed["responses_create_params"]
    if isinstance(params["input"], str):
        params["input"] = _marked(params["input"], marker)
        return changed
    for item in reversed(params["input"]):
        if item.get("role") != "user":
            continue
        if isinstance(item["content"], str):
            item["content"] = _marked(item["content"], marker)
        else:
            item["content"][-1]["text"] = _marked(item["content"][-1]["text"], marker)
        break
    return changed


def is_marked(row: Row, marker: str) -> bool | None:
    """Return whether the last user turn of a row ends with `marker`; None when the row has no user turn."""
    items = row["responses_create_params"]["input"]
    if not isinstance(items, str) and all(item.get("role") != "user" for item in items):
        return None
    return with_marker(row, marker) == row


def without_reasoning(row: Row) -> dict[str, Any]:
    """Return the row without reasoning, and with thinking switched off in the chat template."""
    changed = copy.deepcopy(dict(row))
    params = changed["responses_create_params"]
    if not isinstance(params["input"], str):
        params["input"] = [item for item in _items(changed) if item.get("type") != "reasoning"]
        for holder, key in _assistant_texts(changed):
            holder[key] = _with_thoughts(holder[key], lambda _: "").lstrip()
    kwargs = json.dumps(template_kwargs(row) | {"enable_thinking": False})
    params["metadata"] = dict(params.get("metadata") or {}) | {"chat_template_kwargs": kwargs}
    return changed


def with_budget(row: Row, budget: int, cut: Cut) -> dict[str, Any]:
    """Return the row with the reasoning of each turn cut to `budget` tokens; the answers stay whole."""
    changed = copy.deepcopy(dict(row))
    for part in _summaries(changed):
        part["text"] = cut(part["text"], budget)
    for holder, key in _assistant_texts(changed):
        holder[key] = _with_thoughts(holder[key], lambda thought: f"<think>{cut(thought, budget)}</think>")
    return changed


@lru_cache(maxsize=1)
def cut_by(tokenizer_dir: Path) -> Cut:
    """Return a `Cut` that counts tokens with the tokenizer in a Hugging Face directory."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))

    def cut(text: str, budget: int) -> str:
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= budget else text[: offsets[budget][0]]

    return cut


def _with_thoughts(text: str, replace: Callable[[str], str]) -> str:
    """Return a text with another one in place of each thought; in time linear in it, whatever tags it has."""
    end = text.rfind("</think>") + len("</think>")  # behind it no tag is closed, and a pattern would look for that
    return THINK.sub(lambda found: replace(found[1]), text[:end]) + text[end:] if "</think>" in text else text


def _marked(text: str, marker: str) -> str:
    return text if text.endswith(marker) else text + marker


def _summaries(row: Row) -> list[dict[str, Any]]:
    """Return the parts of reasoning items that hold text."""
    items = [item for item in _items(row) if item.get("type") == "reasoning"]
    return [part for item in items for part in item.get("summary") or () if isinstance(part.get("text"), str)]


def _assistant_texts(row: Row) -> list[tuple[dict[str, Any], str]]:
    """Return (object, key) of every text that the assistant wrote."""
    found: list[tuple[dict[str, Any], str]] = []
    for item in _items(row):
        if item.get("role") != "assistant":
            continue
        if isinstance(item.get("content"), str):
            found.append((item, "content"))
        elif isinstance(item.get("content"), list):
            found += [(part, "text") for part in item["content"] if isinstance(part.get("text"), str)]
    return found


def _items(row: Row) -> list[dict[str, Any]]:
    items = row["responses_create_params"]["input"]
    return [] if isinstance(items, str) else items


DEFAULT_SETTINGS = Path(__file__).resolve().parents[3] / "configs" / "data" / "curriculum.yaml"

SHARE = {"type": "number", "minimum": 0, "maximum": 1}
NAMES = {"type": "array", "items": {"type": "string"}}


def block(**keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a block with exactly these keys."""
    return {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}


SCHEMA = block(
    seed={"type": "integer"},
    unrated={"enum": ["last", "refuse"]},
    filter=block(max_pass_rate={"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    gaussian=block(
        prompts_per_step={"type": "integer", "minimum": 1},
        first_mean=SHARE,
        last_mean=SHARE,
        std={"type": "number", "exclusiveMinimum": 0},
    ),
    domains={"type": "object", "additionalProperties": NAMES},
    shares={"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}},
    low_effort=block(share=SHARE, domains=NAMES, marker={"type": "string", "minLength": 1}),
    reasoning=block(
        strip=SHARE,
        truncate=SHARE,
        budgets={"type": "array", "items": {"type": "integer", "minimum": 1}},
    ),
)


def load_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings; raises `DataError` with every problem of the file and the overrides."""
    document = read_yaml(path, name=display_name(path))
    settings, problems = document.data, document.problems
    if not problems:
        for text in overrides:
            problems += _override(settings, text)
        problems += [] if problems else [*_wrong_values(document.name, settings)]
        problems += [] if problems else [*_wrong_together(document.name, settings)]
    if problems:
        raise DataError(problems)
    return settings


def _override(settings: dict[str, Any], text: str) -> list[Problem]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        return [Problem(where="overrides", got=text, expected="KEY=VALUE", fix="write e.g. gaussian.std=0.1")]
    parsed, problems = parse_value(value, where=key)
    put(settings, key, parsed)
    return problems


def _wrong_values(name: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    for error in Draft202012Validator(SCHEMA).iter_errors(settings):
        where = f"{name}: {'.'.join(map(str, error.absolute_path))}".removesuffix(": ")
        node: Any = error.schema
        got, expected = show(error.instance), describe_schema(node)
        if error.validator in ("additionalProperties", "required"):
            got, expected = error.message, f"the keys {', '.join(node['properties'])}"
        yield Problem(where=where, got=got, expected=expected, fix="correct the file or the override")


def _wrong_together(name: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    agents = [agent for members in settings["domains"].values() for agent in members]
    for agent in sorted({agent for agent in agents if agents.count(agent) > 1}):
        yield Problem(where=f"{name}: domains", got=f"{agent} twice", expected="each agent once", fix="remove one")
    if settings["reasoning"]["truncate"] and not settings["reasoning"]["budgets"]:
        yield Problem(where=f"{name}: reasoning.budgets", got="[]", expected="numbers of tokens", fix="give some")
    if (both := settings["reasoning"]["strip"] + settings["reasoning"]["truncate"]) > 1:
        where, expected = f"{name}: reasoning", "strip and truncate that sum to at most 1"
        yield Problem(where=where, got=f"{both:g}", expected=expected, fix="no row can be both; lower one")


TOOL_VERSION = "3"  # raise it when the same inputs would give other rows or another order
ROWS_AT_ONCE = 256  # in memory while the output is written


@dataclass(frozen=True, slots=True)
class IndexedRow:
    """Where one row is in the file, and the facts that decide its place in the order."""

    block: Block
    row_id: str
    agent: str
    pass_rate: float | None
    has_reasoning: bool
    is_marked: bool | None  # ends with the low-effort marker; None: the row has no user turn


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """What a worker does with one block: read the facts of its rows."""

    path: Path
    marker: str

    def __call__(self, block: Block) -> list[IndexedRow]:
        rows, start = [], block.start
        for line in io.BytesIO(block.read(self.path)):
            try:
                row = loads(line)
                facts = (row_id(row), row["agent_ref"]["name"], pass_rate_of(row), has_reasoning(row))
                rows.append(IndexedRow(Block(start, start + len(line)), *facts, is_marked(row, self.marker)))
                template_kwargs(row)  # which are written anew
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                where = f"{self.path}:{line_at(self.path, start)}"
                wrong = f"the row cannot be read ({type(error).__name__}: {error})"
                raise DataError(Problem(where=where, wrong=wrong, fix="run `make data-validate`")) from error
            start += len(line)
        return rows


def make_curriculum(
    rows_file: Path, output: Path, settings: Mapping[str, Any], *, pass_rates: Path | None, tokenizer: Path | None
) -> dict[str, Any]:
    """Write `output` and its manifest unless they are up to date; return the manifest."""
    if output.resolve().parent == rows_file.resolve().parent:
        wrong, fix = "the output would lie in the directory of the input", "give --out another directory"
        raise InputError(Problem(where=str(output), wrong=wrong, fix=fix))
    validation = rows_file.with_name(VALIDATION)
    files = [rows_file, validation, pass_rates, tokenizer and tokenizer / "tokenizer.json"]
    used = [file for file in files if file and (file != validation or file.is_file())]
    for file in used:
        require_file(file, fix="make the data, or correct the path")
    manifest_file = output.with_name("manifest.json")
    origin = lineage_of(rows_file.with_name("manifest.json"))
    made_by = {file: {"made_by": origin} for file in (rows_file, validation) if origin}
    inputs = [describe(file, **made_by.get(file, {})) for file in used]
    parameters = {**settings, "output": output.name}
    known = {"tool": "curriculum", "tool_version": TOOL_VERSION, "inputs": inputs, "parameters": parameters}
    if not (reasons := changes(manifest_file, known)):
        print(f"curriculum: {output} is up to date")
        return known
    marker = settings["low_effort"]["marker"]
    work = BlockIndexer(rows_file, marker)
    rows = [row for block in map_in_order(blocks_of(rows_file), work) for row in block]
    rates = read_pass_rates(pass_rates) if pass_rates else None
    domain_of = {agent: domain for domain, agents in settings["domains"].items() for agent in agents}
    entries = [
        ProfiledRow(
            index=index,
            row_id=row.row_id,
            domain=domain_of.get(row.agent, row.agent),
            pass_rate=row.pass_rate if rates is None else rates.get(row.row_id),
            has_reasoning=row.has_reasoning,
        )
        for index, row in enumerate(rows)
    ]
    kept = without_solved(entries, max_pass_rate=settings["filter"]["max_pass_rate"])
    order, unrated = ordered(kept, settings)
    if not order:
        wrong = f"none of its {len(rows)} rows has a pass rate below {settings['filter']['max_pass_rate']:g}"
        raise DataError(Problem(where=str(rows_file), wrong=wrong, fix="profile other rows"))
    edits = Edits.chosen(order, rows, settings, tokenizer)
    with only_one(output.with_name(".curriculum.lock")):
        outputs = [_write(rows_file, output, order, rows, edits)]
        if validation in used:
            outputs.append(_copy(validation, output.with_name(VALIDATION)))
        counts = {
            "rows": len(rows),
            "always_solved": len(entries) - len(kept),
            "left_over": len(kept) - len(order),
            "without_pass_rate_last": len(unrated),
            **edits.counts(),
            "domains": dict(sorted(Counter(entry.domain for entry in order).items())),
        }
        manifest = {**known, "counts": counts, "mean_pass_rates": means(order), "outputs": outputs}
        write_manifest(manifest_file, manifest)
    print(f"curriculum: {output} ({', '.join(reasons)}): {len(order)} of {len(rows)} rows, {_summary(counts)}")
    return manifest


def control_reasoning(rows_file: Path, output: Path, settings: Mapping[str, Any], tokenizer: Path | None) -> Path:
    """Write all rows in their order, a share of them edited as `settings.reasoning` says, unless they are up to date.

    Both are shares of all rows. `strip` switches reasoning off. `truncate` cuts the reasoning of earlier turns to a
    budget: of rows that hold some, so that there may be fewer.
    """
    require_file(rows_file, fix="make the data, or correct the path")
    manifest_file, origin = manifest_of(output), lineage_of(manifest_of(rows_file))
    inputs = [describe(rows_file, **({"made_by": origin} if origin else {}))]
    inputs += [describe(tokenizer / "tokenizer.json")] if tokenizer else []
    reasoning = settings["reasoning"]
    parameters = {"seed": settings["seed"], "reasoning": reasoning}
    known = {"tool": "reasoning", "tool_version": TOOL_VERSION, "inputs": inputs, "parameters": parameters}
    if not (reasons := changes(manifest_file, known)):
        print(f"reasoning: {output} is up to date")
        return output
    work = BlockIndexer(rows_file, settings["low_effort"]["marker"])
    rows = [row for block in map_in_order(blocks_of(rows_file), work) for row in block]
    entries = [
        ProfiledRow(index=index, row_id=row.row_id, domain="", pass_rate=None, has_reasoning=row.has_reasoning)
        for index, row in enumerate(rows)
    ]
    edits = Edits.of_reasoning(entries, settings, tokenizer, of_all=len(entries))
    outputs = [_write(rows_file, output, entries, rows, edits)]
    counts = {"rows": len(rows), **edits.counts()}
    write_manifest(manifest_file, {**known, "counts": counts, "outputs": outputs})
    print(f"reasoning: {output} ({', '.join(reasons)}): {len(rows)} rows, {_summary(counts)}")
    return output


def ordered(kept: Sequence[ProfiledRow], settings: Mapping[str, Any]) -> tuple[list[ProfiledRow], list[ProfiledRow]]:
    """Return all rows in training order, and those of them without a pass rate, which come last where that is set."""
    unrated = [entry for entry in kept if entry.pass_rate is None] if settings["unrated"] == "last" else []
    rated = [entry for entry in kept if not unrated or entry.pass_rate is not None]
    schedule = PassRateSchedule(**settings["gaussian"])
    order = gaussian_order(rated, schedule, shares=settings["shares"], seed=settings["seed"])
    return (order + unrated if order else []), unrated


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Which rows are edited, and how."""

    settings: Mapping[str, Any]
    tokenizer: Path | None
    marked: frozenset[int]
    stripped: frozenset[int]
    truncated: frozenset[int]

    @classmethod
    def chosen(
        cls,
        order: Sequence[ProfiledRow],
        rows: Sequence[IndexedRow],
        settings: Mapping[str, Any],
        tokenizer: Path | None,
    ) -> Edits:
        """Choose the rows to edit; rows that have the low-effort marker already count towards its share."""
        seed, low = settings["seed"], settings["low_effort"]
        missing = max(0, round(low["share"] * len(order)) - sum(bool(rows[entry.index].is_marked) for entry in order))
        able = [entry for entry in order if entry.domain in low["domains"] and rows[entry.index].is_marked is False]
        if missing > len(able):
            wrong = f"it asks to mark {missing} rows, and the named domains have {len(able)}"
            fix = "lower it, or name more domains in low_effort.domains"
            raise DataError(Problem(where="low_effort.share", wrong=wrong, fix=fix))
        marked = choose(able, missing, seed=seed, what="low effort")
        able = [entry for entry in order if entry.has_reasoning]
        return replace(cls.of_reasoning(able, settings, tokenizer, of_all=len(able)), marked=marked)

    @classmethod
    def of_reasoning(
        cls, able: Sequence[ProfiledRow], settings: Mapping[str, Any], tokenizer: Path | None, *, of_all: int
    ) -> Edits:
        """Choose the rows whose reasoning is removed or cut, a share of `of_all`; only what is there can be cut."""
        seed, reasoning = settings["seed"], settings["reasoning"]
        stripped = choose(able, round(reasoning["strip"] * of_all), seed=seed, what="strip")
        left = [entry for entry in able if entry.has_reasoning and entry.index not in stripped]
        truncated = choose(left, round(reasoning["truncate"] * of_all), seed=seed, what="truncate")
        if truncated and tokenizer is None:
            wrong = "it is not given, and reasoning budgets are counted in tokens"
            fix = "give the model's directory, or set reasoning.truncate=0"
            raise DataError(Problem(where="--tokenizer", wrong=wrong, fix=fix))
        nothing: frozenset[int] = frozenset()
        return cls(settings=settings, tokenizer=tokenizer, marked=nothing, stripped=stripped, truncated=truncated)

    def counts(self) -> dict[str, int]:
        """Return how many rows each edit changes."""
        return {"low_effort": len(self.marked), "stripped": len(self.stripped), "truncated": len(self.truncated)}

    def apply(self, entry: ProfiledRow, line: bytes) -> bytes:
        """Return the line of a row, with the edits that it was chosen for."""
        if not any(entry.index in chosen for chosen in (self.marked, self.stripped, self.truncated)):
            return line if line.endswith(b"\n") else line + b"\n"
        row = loads(line)
        if entry.index in self.marked:
            row = with_marker(row, self.settings["low_effort"]["marker"])
        if entry.index in self.stripped:
            row = without_reasoning(row)
        elif entry.index in self.truncated:
            assert self.tokenizer is not None
            budget = random.Random(f"{self.settings['seed']}:budget:{entry.row_id}").choice(
                self.settings["reasoning"]["budgets"]
            )
            row = with_budget(row, budget, cut_by(self.tokenizer))
        return dumps(row) + b"\n"


def means(order: Sequence[ProfiledRow], parts: int = 10) -> list[float]:
    """Return the mean pass rate of each of `parts` equal parts of the order."""
    found = []
    for part in range(parts):
        rates = [
            entry.pass_rate or 0.0 for entry in order[part * len(order) // parts : (part + 1) * len(order) // parts]
        ]
        found.append(round(sum(rates) / len(rates), 4) if rates else 0.0)
    return found


def _write(
    rows_file: Path, output: Path, order: Sequence[ProfiledRow], rows: Sequence[IndexedRow], edits: Edits
) -> dict[str, Any]:
    with HashedWriter.open(output) as writer, rows_file.open("rb") as file:
        for first in range(0, len(order), ROWS_AT_ONCE):
            lines = []
            for entry in order[first : first + ROWS_AT_ONCE]:
                block = rows[entry.index].block
                file.seek(block.start)
                lines.append(edits.apply(entry, file.read(block.end - block.start)))
            writer.write(b"".join(lines))
    return writer.as_output(output, rows=len(order))


def _copy(source: Path, target: Path) -> dict[str, Any]:
    content = source.read_bytes()
    with HashedWriter.open(target) as writer:
        writer.write(content)
    return writer.as_output(target, rows=len(content.splitlines()))


def _summary(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{value} {key}" for key, value in counts.items() if isinstance(value, int) and key != "rows")


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.data.curriculum.write", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--in", dest="rows", type=Path, required=True, help="rows to train on")
    parser.add_argument("--out", type=Path, required=True, help="file to write, in a directory of its own")
    parser.add_argument("--pass-rates", type=Path, help="of `make profile` or a run; default: those in the rows")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory, to count reasoning budgets")
    parser.add_argument("--config", type=Path, default=DEFAULT_SETTINGS, help="settings of the curriculum")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of settings; the last one wins")
    options = parser.parse_intermixed_args(arguments)
    settings = load_settings(options.config, options.overrides)
    make_curriculum(options.rows, options.out, settings, pass_rates=options.pass_rates, tokenizer=options.tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
