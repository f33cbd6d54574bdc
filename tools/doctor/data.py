"""The rows that training and validation read: every one of them, in one pass over each file.

Equal problems are one finding, at the first row that has them, with the number of the others.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson

from recipes.config.tree import Config
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.contract.rows import last_user_text
from recipes.environments.environments import Environments
from recipes.environments.instances import agents_of, coding_settings_of, find_agent, reading_servers, servers_of
from recipes.environments.scoring.known_answers import LateProblem
from recipes.errors import InputError
from recipes.exact_json import dumps
from recipes.grpo.data import COMPARED_ALONE, check_line, few_rows, too_few_rows
from recipes.types import Row
from tools.data.files.manifest import manifest_of, read_manifest
from tools.data.placeholders import PLACEHOLDER
from tools.data.rows.checks import FAILURES, schema_problem, text_digest, text_of
from tools.doctor import services
from tools.draft.findings import Finding, as_finding, as_findings, found
from tools.draft.launch import Launch

EFFORT_MARKER = "{reasoning effort: low}"  # what the published template appends to a prompt that asks for low effort
JUDGE_SECONDS = 50.0  # for all judges side by side; with the search for silent ones less than a minute
MAX_LISTED = 10  # different problems per file and code
FIXES = {
    "DAT002": "fill the file again: `make data BLEND=...`",
    "DAT003": "correct the name, configure the agent, or remove its rows",
}
EFFORT = "env.nemo_gym.effort_levels"


@dataclass(slots=True)
class FileScan:
    """What one pass over a file has found."""

    sha256: str = ""
    num_bytes: int = 0
    num_rows: int = 0
    num_compared: int = 0  # rows whose answers are scored by comparing them
    num_marked: int = 0  # rows that ask for low effort
    texts: dict[bytes, int] = field(default_factory=dict)  # digest of a row's text -> its line
    first: dict[tuple[str, str], int] = field(default_factory=dict)  # (code, text) -> line
    count: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, code: str, text: str, line: int) -> None:
        self.first.setdefault((code, text), line)
        self.count[code, text] = self.count.get((code, text), 0) + 1


class RowCheck:
    """Says what is wrong with one row, each problem under its code."""

    def __init__(self, config: Config | None, *, is_native: bool) -> None:
        self.findings: list[Finding] = []  # of the configuration of the environments
        self._environments: Environments | None = None
        self._agents: Mapping[str, Any] = {}
        self._known_tools: dict[bytes, str | None] = {}
        if config is None or not is_native:  # another engine routes rows by its own table
            return
        instances = config.env.nemo_gym.instances
        try:
            servers = reading_servers(instances, config.env.judge_texts)
        except InputError as error:
            self.findings = as_findings("CFG001", error.problems)
            servers = reading_servers({}, config.env.judge_texts)
        try:
            coding_settings_of(instances)
        except InputError as error:
            self.findings += as_findings("CFG001", error.problems)
        self._agents = agents_of(instances, servers)
        patterns = FlagPatterns(invalid_tool_call=(), thinking_tags=())
        self._environments = Environments(_codec_of(config), servers=servers, agents=self._agents, patterns=patterns)

    def __call__(self, line: bytes) -> tuple[Row | None, list[tuple[str, str]]]:
        """Return the row, or None where it has not even the shape of one, and its problems as (code, text)."""
        tagged: list[tuple[str, str]] = []
        rows: list[Row] = []  # the one that was read from the line

        def check_row(row: Row) -> list[str]:
            rows.append(row)
            return self._environment_problems(row, tagged)

        texts = check_line(line, check_row)
        if texts:
            code = "DAT002" if f'"{PLACEHOLDER}"'.encode() in line and "placeholder" in texts[0] else "DAT004"
            return None, [(code, text) for text in texts]
        (row,) = rows
        return row, tagged + [("DAT005", text) for text in self._tool_problems(row["responses_create_params"])]

    @property
    def asked_for(self) -> Collection[str]:
        """The resources servers of the rows so far."""
        return self._environments.asked_for if self._environments is not None else ()

    def compares(self, row: Row) -> bool:
        """Whether one answer to a row would have no verdict; False for a row without an agent that is known."""
        try:
            return self._environments is not None and self._environments.compares(row)
        except ValueError:
            return False

    def _environment_problems(self, row: Row, tagged: list[tuple[str, str]]) -> list[str]:
        if self._environments is None:
            return []
        try:
            find_agent(row["agent_ref"]["name"], self._agents)
        except ValueError as error:
            tagged.append(("DAT003", str(error)))
            return []  # without the agent nothing says how to read the rest
        try:
            return self._environments.check_row(row)
        except FAILURES as error:
            return [f"a row that cannot be read ({type(error).__name__}: {error})"]

    def _tool_problems(self, params: Mapping[str, Any]) -> Iterator[str]:
        tools = params.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            if not isinstance(tool, Mapping) or "parameters" not in tool:
                continue
            key = dumps(tool["parameters"])
            if key not in self._known_tools:
                self._known_tools[key] = schema_problem(tool["parameters"])
            if problem := self._known_tools[key]:
                yield f"tool '{tool.get('name')}': parameters are no JSON Schema of an object: {problem}"


def _codec_of(config: Config) -> ChatCodec:
    """Return the codec of a run; none when its tokenizer cannot be used, which the check of the model reports."""
    try:
        return ChatCodec.from_config(config.policy)
    except (InputError, OSError, ValueError):
        return cast(ChatCodec, None)


def check(launch: Launch) -> Iterator[Finding]:
    """Check the rows of both files, and the configuration of the environments that read them."""
    check_row = RowCheck(launch.config, is_native=launch.contract["ENGINE"] == "native")
    yield from check_row.findings
    scans: dict[Path, FileScan] = {}
    for variable in ("TRAIN_PATH", "VAL_PATH"):
        path = launch.path(variable)
        if path is None or not path.is_file():  # the check of the files names it
            continue
        scan = scans[path] = scan_file(path, check_row, marker_of(launch.config))
        yield from scan_findings(path, scan, lister(launch))
        yield from manifest_findings(path, scan)
        if variable == "TRAIN_PATH" and launch.config is not None:
            yield from effort_findings(path, scan, launch.config)
            if scan.num_rows and (problem := too_few_rows(path, scan.num_rows, launch.config.grpo)):
                yield as_finding("DAT012", problem)
            if problem := few_rows(path, scan.num_rows, launch.config.grpo):
                yield as_finding("DAT011", problem)
        elif launch.config is not None and scan.num_compared and launch.config.grpo.val_num_generations_per_prompt == 1:
            yield as_finding("DAT013", COMPARED_ALONE)
    if len(scans) == 2:
        yield from contamination_findings(*scans.items())
    if launch.config is not None:
        yield from judge_findings(launch.config, check_row.asked_for)


def judge_findings(config: Config, asked_for: Collection[str]) -> Iterator[Finding]:
    """Ask the judges that are given by URL, and answer, about known answers, as the start of a run does.

    Of a judge that the run starts nothing can be known before its engine runs; of one that does not answer from here
    the check of servers says so.
    """
    env = config.env
    if env.judge_probe == "off":
        return
    try:
        servers = servers_of(env.nemo_gym.instances, judge_texts=env.judge_texts)
        environments = Environments.from_config(env, _codec_of(config))
    except InputError:  # said already
        return
    judged = {name: judge.urls for name in asked_for if (judge := servers[name].judge) and judge.urls}
    silent = unreached(url for urls in judged.values() for url in urls)
    asked = [name for name, urls in judged.items() if silent.isdisjoint(urls)]
    try:
        problems = environments.wrong_judges(asked, seconds=JUDGE_SECONDS)
    finally:
        environments.close()
    late = [problem for problem in problems if isinstance(problem, LateProblem)]  # a start waits longer
    wrong = [problem for problem in problems if problem not in late]
    yield from as_findings("JDG006" if env.judge_probe == "refuse" else "JDG007", wrong)
    yield from as_findings("JDG007", late)


def unreached(bases: Iterable[str]) -> set[str]:
    """Return the addresses of judges at which nobody answers; all are tried side by side."""
    named = list(dict.fromkeys(bases))
    with ThreadPoolExecutor(max(1, len(named))) as pool:
        answers = list(pool.map(lambda base: services.probe(services.models_url(base)), named))
    return {base for base, problem in zip(named, answers, strict=True) if problem}


def marker_of(config: Config | None) -> str:
    """Return the text that marks a prompt which asks for low effort."""
    return (config.env.nemo_gym.effort_levels.low_string if config else "") or EFFORT_MARKER


RowProblems = tuple[Row | None, list[tuple[str, str]]]  # the row, where it is one, and its problems as (code, text)


def scan_file(path: Path, check_row: RowCheck, marker: str) -> FileScan:
    """Read a file once: its hash, its rows and what is wrong with them."""
    scan, digest, needle = FileScan(), hashlib.sha256(), orjson.dumps(marker)[1:-1]
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            scan.num_bytes += len(line)
            if not line.strip():
                continue
            scan.num_rows += 1
            row, problems = check_row(line)
            for code, text in problems:
                scan.add(code, text, number)
            if row is not None:
                scan.num_compared += check_row.compares(row)
                scan.num_marked += needle in line and marker in last_user_text(row)
                if text := readable_text(row):
                    scan.texts.setdefault(text_digest(text), number)
    scan.sha256 = digest.hexdigest()
    return scan


def lister(launch: Launch) -> str:
    """Return the command that lists every bad row, read as this launch reads them."""
    contract, train = launch.contract, launch.path("TRAIN_PATH")
    words = {"--config": contract["CONFIG_PATH"], "--tokenizer": contract["MODEL_PATH"]}
    given = " ".join(f"{option} {value}" for option, value in words.items() if value)
    blend = os.path.relpath(train.parent, launch.root / "data") if train else "..."
    return f"make data-validate BLEND={blend} ARGS={shlex.quote(given)}"


def scan_findings(path: Path, scan: FileScan, listing: str) -> Iterator[Finding]:
    """Return the problems of the rows, equal ones once; `listing` is the command that lists them all."""
    fix = f"correct or remove the row; `{listing}` lists all"
    if scan.num_rows == 0:
        yield found("DAT001", where=str(path), wrong="the file has no rows", fix="run `make data` again")
    for code in sorted({code for code, _ in scan.first}):
        texts = [text for known, text in scan.first if known == code]
        for text in texts[:MAX_LISTED]:
            others = scan.count[code, text] - 1
            wrong = f"{text} (and in {others} further rows)" if others else text
            yield found(code, where=f"{path}:{scan.first[code, text]}", wrong=wrong, fix=FIXES.get(code, fix))
        if len(texts) > MAX_LISTED:
            rows = sum(scan.count[code, text] for text in texts[MAX_LISTED:])
            wrong = f"{rows} further bad rows of {scan.num_rows}"
            yield found(code, where=str(path), wrong=wrong, fix=FIXES.get(code, fix))


def manifest_findings(path: Path, scan: FileScan) -> Iterator[Finding]:
    """Compare a file with the manifest that the step which made it has left."""
    for place in (manifest_of(path), path.with_name("manifest.json")):
        outputs = (read_manifest(place) or {}).get("outputs")
        entry = entry_of(outputs, path.name) if isinstance(outputs, Sequence) else None
        if entry is None:
            continue
        facts = {"bytes": scan.num_bytes, "rows": scan.num_rows, "sha256": scan.sha256}
        for name, value in facts.items():
            if name in entry and entry[name] != value:
                got, fix = f"{name} {value}", "make the data again; the file was edited, or copied in part"
                yield found("DAT006", where=str(path), got=got, expected=f"{entry[name]} ({place})", fix=fix)
                return
        return
    wrong = f"beside it is neither {path.name}.manifest.json nor a manifest.json that names it"
    yield found("DAT008", where=str(path), wrong=wrong, fix="make the data with `make data`")


def entry_of(outputs: Sequence[Any], name: str) -> Mapping[str, Any] | None:
    """Return the entry of a file in a manifest."""
    return next((entry for entry in outputs if isinstance(entry, Mapping) and entry.get("file") == name), None)


def contamination_findings(training: tuple[Path, FileScan], validation: tuple[Path, FileScan]) -> Iterator[Finding]:
    """Note validation rows whose text is also a training row's: the held-out reward then measures memory as well."""
    (train_path, train), (path, held_out) = training, validation
    lines = [(line, train.texts[key]) for key, line in held_out.texts.items() if key in train.texts]
    if lines:
        line, train_line = min(lines)
        wrong = (
            f"{len(lines)} of {held_out.num_rows} validation rows have the text of a training row, "
            f"the first that of {train_path}:{train_line}"
        )
        fix = "remove the training rows; `make data-validate` lists them, and rows that are nearly equal"
        yield found("DAT010", where=f"{path}:{line}", wrong=wrong, fix=fix)


def readable_text(row: Row) -> str:
    """Return the text of a row, "" for a row in which it cannot be read."""
    try:
        return text_of(row)
    except FAILURES:
        return ""


def effort_findings(path: Path, scan: FileScan, config: Config) -> Iterator[Finding]:
    """Compare the rows that ask for low effort with the shaping that would reward it."""
    effort = config.env.nemo_gym.effort_levels
    is_on = effort.low_weight > 0 and effort.low_string != ""
    share = f"{scan.num_marked} of {scan.num_rows} rows with {marker_of(config)!r}"
    if scan.num_marked and not is_on:
        fix = "set, to reward short answers, low_weight 0.2, low_penalty 1, low_ub 3000 and low_string"
        yield found("DAT007", where=str(path), wrong=f"{share}, and {EFFORT} is off", fix=fix)
    elif is_on and scan.num_rows and not scan.num_marked:
        fix = "make the data again if the marker was lost, e.g. in the fill step; else set low_weight to 0"
        yield found("DAT009", where=str(path), wrong=f"{share}, though {EFFORT} is on", fix=fix)
