"""What the check of two files finds: sixty corrupted rows, rows that come twice, and validation rows given away."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from recipes.config.load import load_stages
from tools.data.files import parallel
from tools.data.files.row_blocks import TRAIN, VALIDATION
from tools.data.rows.checks import RowChecker, shingles, text_of
from tools.data.rows.pass_rates import pass_rate_of
from tools.data.rows.stats import quantile
from tools.data.rows.validate import config_of, main, readers_in, validate
from tools.tiny.model import build_tokenizer
from tools.tiny.tasks import make_row
from tools.tiny.tool_tasks import EMAILS, write_office


def _load_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("row_table", Path(__file__).with_name("row_table.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = _load_table()
LONG = "A train leaves the station at nine and travels north at forty miles an hour for {} hours until it meets the {}"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def math(text: str) -> dict[str, Any]:
    return TABLE.row_of(TABLE.MATH, text)


def numbered(start: int, count: int) -> list[dict[str, Any]]:
    return [math(f"What is {n} + {n}?") for n in range(start, start + count)]


@pytest.mark.parametrize(("agent", "corrupt", "message"), TABLE.CORRUPTIONS, ids=range(len(TABLE.CORRUPTIONS)))
def test_a_corrupted_row_is_named_by_line(
    tmp_path: Path, agent: str, corrupt: Callable[[dict[str, Any]], Any], message: str
) -> None:
    bad = corrupt(TABLE.row_of(agent))
    train = write(tmp_path / "train.jsonl", [*numbered(0, 3), bad, *numbered(3, 2)])
    found = validate(train, write(tmp_path / "val.jsonl", numbered(10, 2)), None).findings
    assert [(finding.file, finding.line) for finding in found] == [(str(train), 4)]
    assert message in found[0].text


@pytest.mark.parametrize("agent", TABLE.FIELDS)
def test_a_good_row_has_no_problem(agent: str) -> None:
    checker = RowChecker.for_tokenizer(None)
    assert checker.check(json.dumps(TABLE.row_of(agent)).encode())[1] == []


JUNK: list[Any] = [
    None,
    5,
    -1.5,
    True,
    "x",
    "",
    [],
    {},
    [None],
    [5],
    [[]],
    [{}],
    {"a": None},
    {"": []},
    "[" * 2000,
    10**400,
]


def with_junk(value: Any, junk: Any, depth: int = 3) -> Iterator[Any]:
    """Yield a value with junk in place of each of its parts."""
    yield junk
    if depth and isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in with_junk(inner, junk, depth - 1))
            yield {name: kept for name, kept in value.items() if name != key}
    elif depth and isinstance(value, list):
        for at, inner in enumerate(value):
            yield from ([*value[:at], changed, *value[at + 1 :]] for changed in with_junk(inner, junk, depth - 1))


@pytest.mark.parametrize("agent", TABLE.FIELDS)
def test_no_row_ends_the_check(agent: str) -> None:
    checker, good = RowChecker.for_tokenizer(None), TABLE.row_of(agent)
    num_wrong = 0
    for junk in JUNK:
        for row in with_junk(good, junk):
            _, found = checker.check(json.dumps(row).encode())
            assert not any("cannot be read" in text for _, text in found), (row, found)
            num_wrong += bool(found)
    assert num_wrong > 50


@pytest.mark.parametrize("has_codec", [False, True])
def test_a_server_of_a_type_that_only_its_url_knows_reads_its_rows_itself(has_codec: bool, tmp_path: Path) -> None:
    server = {"resources_servers": {"of_others": {"url": "http://x:1"}}}
    agent = {"responses_api_agents": {"simple_agent": {"resources_server": {"name": "theirs"}}}}
    if has_codec:
        build_tokenizer().save_pretrained(tmp_path)
    checker = RowChecker.for_tokenizer(tmp_path if has_codec else None, {"theirs": server, "their_agent": agent})
    row = {**TABLE.row_of(TABLE.GYM), "agent_ref": {"type": "responses_api_agents", "name": "their_agent"}}
    assert checker.check(json.dumps(row).encode())[1] == []


def findings(tmp_path: Path, train: list[Any], validation: list[Any]) -> list[tuple[str, int, str, str]]:
    result = validate(write(tmp_path / "t.jsonl", train), write(tmp_path / "v.jsonl", validation), None)
    return [(Path(finding.file).name, finding.line, finding.kind, finding.text) for finding in result.findings]


def test_the_same_request_twice_is_a_duplicate_whatever_else_differs(tmp_path: Path) -> None:
    rows = numbered(0, 3)
    again = {**rows[1], "uuid": "another"}
    other_agent = {**rows[1], "agent_ref": {"name": TABLE.GYM}, **TABLE.FIELDS[TABLE.GYM]}
    assert findings(tmp_path, [*rows, again, other_agent], numbered(9, 1)) == [
        ("t.jsonl", 4, "duplicate", "it repeats the request of line 2")
    ]


def test_a_validation_row_in_training_is_found_despite_case_and_spacing(tmp_path: Path) -> None:
    train = [*numbered(0, 2), math("what IS\n 7  + 7?")]
    found = findings(tmp_path, train, [math("What is 8 - 7?"), math("What is 7 + 7?")])
    assert [(name, line, kind) for name, line, kind, _ in found] == [("v.jsonl", 2, "contamination")]
    assert found[0][3] == f"the text also stands in the training row {tmp_path}/t.jsonl:3"


def test_most_of_a_validation_row_in_training_is_found_and_a_shared_template_is_not(tmp_path: Path) -> None:
    held_out = math(LONG.format("three", "express that left Boston"))
    embedded = math("Think first. " + LONG.format("three", "express that left Boston") + " Give the answer in miles.")
    found = findings(tmp_path, [*numbered(0, 2), embedded], [held_out])
    assert [(name, line, kind) for name, line, kind, _ in found] == [("v.jsonl", 1, "contamination")]
    assert found[0][3].startswith("100 % of its own n-grams also stand in the training row ")
    names = ["red car", "blue bus", "green van", "old tram"]
    train = [math(LONG.format(n, "fast ferry")) for n in range(3)]
    assert findings(tmp_path, train, [math(LONG.format("some", name)) for name in names]) == []


def swe(instance: str, problem: str, **metadata: str) -> dict[str, Any]:
    facts = {"instance_id": instance, "problem_statement": problem, **metadata}
    return {"responses_create_params": {"input": [], "metadata": facts}, "agent_ref": {"name": "swe_agents_val"}}


def test_swe_tasks_are_compared_by_instance_and_problem(tmp_path: Path) -> None:
    renamed = swe("other__a-9", LONG.format("three", "express that left Boston"))
    train = [swe("a__a-1", "The sum is wrong."), swe("a__a-2", "It crashes.", split="test"), renamed]
    validation = [
        swe("a__a-3", "The sum is wrong"),
        swe("a__a-2", "It  crashes.", split="train"),
        swe("b__b-1", LONG.format("three", "express that left Boston")),
        swe("", ""),
        swe("", ""),
    ]
    found = findings(tmp_path, [*train, swe("", "", k="v")], validation)
    known = [(name, line) for name, line, kind, _ in found if kind == "contamination"]
    assert known == [("v.jsonl", 2), ("v.jsonl", 3)]


def test_shingles_of_a_text_by_hand() -> None:
    assert len(shingles("a b c d e f g h")) == 1
    assert len(shingles("a b c d e f g")) == 0
    assert len(shingles("1 + 2, 3 and so on: yes")) == 3  # ten words and signs
    parts = [{"type": "input_text", "text": "\uff21 b"}]
    row = {"responses_create_params": {"input": [{"role": "user", "content": parts}, {"type": "reasoning"}]}}
    assert text_of(row) == "a b"


def test_quantiles_by_hand() -> None:
    assert [quantile(list(range(1, 11)), share) for share in (0.5, 0.95, 1.0)] == [5, 10, 10]
    assert quantile([7], 0.5) == 7


def test_the_command_prints_some_and_writes_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(tmp_path / "t.jsonl", [*numbered(0, 4), *[b"[]"] * 3, b"{", b"7"])
    validation = write(tmp_path / "v.jsonl", [*numbered(9, 1), TABLE.row_of(TABLE.MCQA, "pick")])
    arguments = ["--train", str(train), "--val", str(validation)]
    assert main([*arguments, "--problems", str(tmp_path / "out.jsonl"), "--max-printed", "2"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count(f"{train}:") == 2, "three kinds, of which two are printed"
    assert f"{train}:5: a JSON list instead of an object (and in 2 further rows: 6, 7); " in printed.err
    assert "5 problems (5 x shape)" in printed.err
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [problem["line"] for problem in written] == [5, 6, 7, 8, 9]
    assert {problem["kind"] for problem in written} == {"shape"}
    table = {line.split()[0]: line.split()[1:5] for line in printed.out.splitlines()[1:]}
    assert table[TABLE.MATH] == ["4", "100.0%", "1", "50.0%"]
    assert table[TABLE.MCQA] == ["0", "0.0%", "1", "50.0%"]


def test_sound_files_end_well_and_missing_or_empty_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, validation = write(tmp_path / "t.jsonl", numbered(0, 4)), write(tmp_path / "v.jsonl", numbered(9, 1))
    assert main(["--train", str(train), "--val", str(validation)]) == 0
    assert "every row is valid" in capsys.readouterr().out
    assert main(["--train", str(tmp_path / "nowhere"), "--val", str(validation)]) == 2
    assert "nowhere: there is no such file" in capsys.readouterr().err
    train.write_bytes(b"")
    assert main(["--train", str(train), "--val", str(validation)]) == 2
    assert "an empty file" in capsys.readouterr().err


@pytest.mark.parametrize(("block", "workers"), [(1, "1"), (700, "1"), (3000, "2")])
def test_blocks_of_any_size_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, workers: str
) -> None:
    long = [
        math(LONG.format(n, f"thing number {n} that no other row names, in a town called {n * n}")) for n in range(3)
    ]
    train = [
        *numbered(0, 5),
        b"[]",
        *long,
        *numbered(2, 2),
        b"",
        math("think: " + LONG.format(7, "x")),
        *numbered(8, 3),
    ]
    train = write(tmp_path / "t.jsonl", [*train, {**long[1], "uuid": "again"}])
    validation = write(tmp_path / "v.jsonl", [*numbered(9, 2), long[2], math("What is 1 + 1?"), long[2]])

    def found() -> list[tuple[str, int, str, str]]:
        result = validate(train, validation, None)
        assert result.stats[train].num_lines == 17
        return [(finding.file, finding.line, finding.kind, finding.text) for finding in result.findings]

    whole = found()
    assert {kind for _, _, kind, _ in whole} == {"shape", "duplicate", "contamination"}
    assert len(whole) == 11
    monkeypatch.setattr(parallel, "BLOCK", block)
    monkeypatch.setenv("DATA_WORKERS", workers)
    assert found() == whole


def test_other_blends_may_repeat_rows_but_not_give_validation_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, other = tmp_path / "rlvr2", tmp_path / "rlvr1"
    for place in (ours, other):
        place.mkdir()
    write(ours / "train-split.jsonl", numbered(0, 5))
    write(ours / "val-split.jsonl", numbered(50, 2))
    write(other / "train-split.jsonl", [*numbered(20, 2), *numbered(3, 1), b"{"])
    arguments = ["--data", str(ours), "--others", str(other)]
    assert main(arguments) == 0
    assert f"{ours}/train-split.jsonl:4: {other}/train-split.jsonl:3 has the same request; " in capsys.readouterr().err
    write(other / "train-split.jsonl", [*numbered(20, 2), math("what is 51  + 51?")])
    assert main(arguments) == 2
    text = f"{ours}/val-split.jsonl:2: the text also stands in the training row {other}/train-split.jsonl:3"
    assert text in capsys.readouterr().err
    assert main(["--data", str(ours), "--others", str(ours)]) == 2
    assert "is the blend that is checked" in capsys.readouterr().err


def test_pass_rates_are_read_in_both_forms_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = [{"pass_rate": 0.5}, {"pass_rate": 0.25}]
    rows = [math("a b?") | {"pass_rate": 0.75}, math("c d?") | {"reward_profiles": profile}, *numbered(0, 1)]
    assert [pass_rate_of(row) for row in rows] == [0.75, 0.25, None]
    assert [pass_rate_of({"pass_rate": wrong}) for wrong in (True, 1.5, -1, "1", None)] == [None] * 5
    train, validation = write(tmp_path / "t.jsonl", rows), write(tmp_path / "v.jsonl", numbered(9, 1))
    assert main(["--train", str(train), "--val", str(validation)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[5] == "0.50"


def test_rows_are_read_with_the_settings_of_a_configuration(tmp_path: Path) -> None:
    rng = Random(0)
    rows = [make_row(EMAILS, EMAILS.draw(rng)) for _ in range(3)]
    train, validation = write(tmp_path / TRAIN, rows[:2]), write(tmp_path / VALIDATION, rows[2:])
    write_office(tmp_path / "office")
    config = tmp_path / "office.yaml"
    wide = Path(__file__).parents[5] / "configs/tiny/wide.yaml"
    office = {"workplace_assistant": {"tables": str(tmp_path / "office")}}
    tree = {"env": {"nemo_gym": {"workplace_assistant": {"resources_servers": office}}}}
    config.write_text(json.dumps({"defaults": str(wide), **tree}), encoding="utf-8")
    assert validate(train, validation, None, (), *readers_in(config)).findings == []
    elsewhere = {"workplace_assistant": {"resources_servers": {"workplace_assistant": {"tables": "/no/office"}}}}
    found = validate(train, validation, None, instances=elsewhere)
    assert [finding.kind for finding in found.findings] == ["environment"] * 3
    assert main(["--data", str(tmp_path), "--config", str(config)]) == 0
    assert main(["--data", str(tmp_path), "--config", str(tmp_path / "none.yaml")]) == 2


@pytest.mark.parametrize(
    ("blend", "file"),
    [
        ("rlvr1", "stage1_rlvr.yaml"),
        ("rlvr1-ordered", "stage1_rlvr.yaml"),
        ("swe2-good", "stage2_swe2.yaml"),
        ("rlhf", "stage3_rlhf.yaml"),
        ("swe1-sample20", "stage2_swe1.yaml"),
        ("mine", "stage1_rlvr.yaml"),
        ("nano", "nano_grpo.yaml"),
        ("nano-sample20", "nano_grpo.yaml"),
        ("tiny", "tiny/stage1_rlvr.yaml"),
        ("tiny-wide", "tiny/wide.yaml"),
        ("tiny-swe1", "tiny/stage2_swe1.yaml"),
        ("tiny-rlhf-ordered", "tiny/stage3_rlhf.yaml"),
    ],
)
def test_rows_are_read_by_the_stage_that_trains_on_them(blend: str, file: str) -> None:
    path = config_of(blend)
    assert path.is_file()
    assert str(path).endswith(f"configs/{file}")


def test_every_agent_that_a_stage_configures_is_known_to_the_check_of_its_blend() -> None:
    for stage in load_stages():
        configured, _ = readers_in(config_of(stage.blend))
        agents = [name for name, value in configured.items() if "responses_api_agents" in value]
        assert agents
        checker = RowChecker.for_tokenizer(None, configured)
        for agent in agents:
            row = {"responses_create_params": {"input": "x"}, "agent_ref": {"name": agent}}
            assert "unknown agent" not in str(checker.check(json.dumps(row).encode())[1]), agent


LEAN = {
    **math("Prove it."),
    "agent_ref": {"type": "responses_api_agents", "name": "math_formal_lean_refinement_agent"},
    "header": "import Mathlib\n",
    "formal_statement": "theorem t (n : Nat) : n + 0 = n := by\n",
}
REFUSED = {**math("How?"), "agent_ref": {"type": "responses_api_agents", "name": "over_refusal_detection_simple_agent"}}


@pytest.mark.parametrize(("row", "said"), [(LEAN, "needs published words"), (REFUSED, "needs a judge")])
def test_a_row_that_the_stage_refuses_is_found(
    row: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for blend, status in (("swe1", 2), ("rlvr1", 0)):
        (tmp_path / blend).mkdir()
        write(tmp_path / blend / TRAIN, [row])
        write(tmp_path / blend / VALIDATION, numbered(0, 1))
        assert main(["--data", str(tmp_path / blend)]) == status
        assert (said in capsys.readouterr().err) is (status == 2)


def test_keys_configure_agents_as_in_a_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = {"responses_create_params": {"input": "a"}, "agent_ref": {"name": "mine_agent"}, "expected_answer": "A"}
    keys = (
        "env.nemo_gym.mine.resources_servers.mine.url=http://127.0.0.1:1",
        "env.nemo_gym.mine_agent.responses_api_agents.simple_agent.resources_server.type=resources_servers",
        "env.nemo_gym.mine_agent.responses_api_agents.simple_agent.resources_server.name=mine",
    )
    for name, text in (("train-split.jsonl", "a"), ("val-split.jsonl", "b")):
        (tmp_path / name).write_text(json.dumps({**mine, "responses_create_params": {"input": text}}) + "\n", "utf-8")
    assert main(["--data", str(tmp_path)]) == 2
    assert "unknown agent 'mine_agent'" in capsys.readouterr().err
    assert main(["--data", str(tmp_path), *keys]) == 0, capsys.readouterr().err


def test_equal_problems_are_one_line_with_the_first_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"agent_ref": {"name": "nobody"}}
    lines = [json.dumps({**row, "responses_create_params": {"input": f"{number}"}}) for number in range(20)]
    (tmp_path / "train-split.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    (tmp_path / "val-split.jsonl").write_text(lines[0].replace('"0"', '"other"') + "\n", "utf-8")
    assert main(["--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 3  # of each file one, and the counts
    assert "(and in 19 further rows: 2, 3, 4, 5, 6, ...)" in said
    assert "21 problems (21 x environment)" in said
