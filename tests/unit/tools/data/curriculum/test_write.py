"""The order of training, by hand for small cases and by its statistics for large ones; edits; the command."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import DataError
from recipes.grpo.data import row_id
from tools.data.curriculum.order import PassRateSchedule, ProfiledRow, choose, gaussian_order, without_solved
from tools.data.curriculum.write import (
    DEFAULT_SETTINGS,
    control_reasoning,
    has_reasoning,
    is_marked,
    load_settings,
    main,
    template_kwargs,
    with_budget,
    with_marker,
    without_reasoning,
)

MARKER = "\n\n{reasoning effort: low}"
SCHEDULE = PassRateSchedule(prompts_per_step=10, first_mean=0.8, last_mean=0.2, std=0.05)


def entries(count: int, *, domain: str = "math", first: int = 0) -> list[ProfiledRow]:
    """Return rows whose pass rates are spread evenly over 0 ... 1."""
    return [
        ProfiledRow(index=first + n, row_id=f"{domain}{n}", domain=domain, pass_rate=n / (count - 1))
        for n in range(count)
    ]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_rows_that_are_always_solved_go_and_unknown_ones_stay() -> None:
    rows = [
        ProfiledRow(index=n, row_id="x", domain="d", pass_rate=rate) for n, rate in enumerate([0.0, 1.0, None, 0.99])
    ]
    assert [entry.index for entry in without_solved(rows, max_pass_rate=1.0)] == [0, 2, 3]
    assert [entry.index for entry in without_solved(rows, max_pass_rate=0.5)] == [0, 2]


def test_every_row_comes_once_and_the_mean_falls() -> None:
    rows = entries(1000)
    order = gaussian_order(rows, SCHEDULE, shares={}, seed=1)
    assert sorted(entry.index for entry in order) == list(range(1000))
    tenths = [mean([entry.pass_rate or 0.0 for entry in order[n : n + 100]]) for n in range(0, 1000, 100)]
    assert tenths[0] > 0.75
    assert tenths[2] < tenths[0]
    assert tenths[5] < tenths[2]
    random_order = rows[:]
    random.Random(1).shuffle(random_order)
    assert abs(mean([entry.pass_rate or 0.0 for entry in random_order[:100]]) - 0.5) < 0.1  # what it is compared with


def test_a_step_aims_at_the_gaussian_of_its_mean() -> None:
    order = gaussian_order(entries(20_000), SCHEDULE, shares={"math": 1.0}, seed=3)
    num_steps = len(order) // 10
    for step in (0, 60, 120):  # while all pass rates are still there
        rates = [entry.pass_rate or 0.0 for entry in order[step * 10 : (step + 40) * 10]]
        expected = mean([SCHEDULE.mean(n, num_steps) for n in range(step, step + 40)])
        assert mean(rates) == pytest.approx(expected, abs=0.01)
        assert mean([(rate - expected) ** 2 for rate in rates]) ** 0.5 == pytest.approx(0.05, abs=0.01)
    assert [SCHEDULE.mean(n, 3) for n in range(3)] == pytest.approx([0.8, 0.5, 0.2])
    assert SCHEDULE.mean(0, 1) == 0.8


def test_shares_hold_in_every_step_and_end_with_the_scarcest_domain() -> None:
    rows = [*entries(400, domain="math"), *entries(90, domain="code", first=400)]
    order = gaussian_order(rows, SCHEDULE, shares={"math": 0.7, "code": 0.3}, seed=5)
    assert len(order) == 300  # 90 / 0.3
    steps = [Counter(entry.domain for entry in order[n : n + 10]) for n in range(0, 300, 10)]
    assert steps == [Counter(math=7, code=3)] * 30
    uneven = gaussian_order(rows, SCHEDULE, shares={"math": 0.75, "code": 0.25}, seed=5)
    per_step = [Counter(entry.domain for entry in uneven[n : n + 10])["code"] for n in range(0, len(uneven), 10)]
    assert set(per_step) == {2, 3}
    assert all(abs(sum(per_step[: n + 1]) - 2.5 * (n + 1)) < 1 for n in range(len(per_step)))


def test_without_shares_domains_keep_theirs_to_the_last_row() -> None:
    rows = [*entries(66, domain="math"), *entries(39, domain="code", first=66)]
    order = gaussian_order(rows, SCHEDULE, shares={}, seed=5)
    assert sorted(entry.index for entry in order) == list(range(105))
    assert {Counter(e.domain for e in order[n : n + 10])["code"] for n in range(0, 100, 10)} <= {3, 4}


@pytest.mark.parametrize(("sizes", "prompts_per_step"), [((1, 1, 3), 2), (tuple(range(1, 16)), 4), ((1,) * 15, 7)])
def test_no_domain_gives_a_row_that_it_does_not_have(sizes: tuple[int, ...], prompts_per_step: int) -> None:
    names = [name for name, size in enumerate(sizes) for _ in range(size)]
    rows = [ProfiledRow(index=n, row_id=str(n), domain=f"d{name}", pass_rate=0.5) for n, name in enumerate(names)]
    schedule = PassRateSchedule(prompts_per_step=prompts_per_step, first_mean=0.8, last_mean=0.2, std=0.05)
    order = gaussian_order(rows, schedule, shares={}, seed=1)
    assert sorted(entry.index for entry in order) == list(range(len(rows)))
    for end in range(prompts_per_step, len(rows), prompts_per_step):
        counts = Counter(entry.domain for entry in order[:end])
        assert all(counts[f"d{name}"] < size * end / len(rows) + 1 for name, size in enumerate(sizes))


def test_the_seed_alone_decides() -> None:
    rows = entries(200)
    assert gaussian_order(rows, SCHEDULE, shares={}, seed=1) == gaussian_order(rows, SCHEDULE, shares={}, seed=1)
    assert gaussian_order(rows, SCHEDULE, shares={}, seed=1) != gaussian_order(rows, SCHEDULE, shares={}, seed=2)
    assert gaussian_order([], SCHEDULE, shares={}, seed=1) == []


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"math": 0.5, "art": 0.5}, "shares: got art, expected domains of code, math"),
        ({"math": 0.5, "code": 0.6}, "shares: got a sum of 1.1"),
        ({"math": 1.5, "code": -0.5}, "expected positive numbers that sum to 1"),
        ({"math": 0.01, "code": 0.99}, r"too few rows for one step of 10 \(code 5, math 50\)"),
    ],
)
def test_shares_that_do_not_fit_are_named(shares: dict[str, float], message: str) -> None:
    rows = [*entries(50), *entries(5, domain="code", first=50)]
    with pytest.raises(DataError, match=message):
        gaussian_order(rows, SCHEDULE, shares=shares, seed=1)


def test_rows_without_a_pass_rate_are_counted_by_domain() -> None:
    rows = [*entries(3), *(ProfiledRow(index=n, row_id="", domain="code", pass_rate=None) for n in range(2))]
    with pytest.raises(DataError, match="code: 2 rows have no pass rate"):
        gaussian_order(rows, SCHEDULE, shares={}, seed=1)


def test_choices_are_exact_and_follow_the_row_not_its_place() -> None:
    rows = entries(100)
    chosen = choose(rows, 30, seed=1, what="strip")
    assert len(chosen) == 30
    assert choose(rows[::-1], 30, seed=1, what="strip") == chosen
    assert choose(rows, 30, seed=2, what="strip") != chosen
    assert choose(rows, 30, seed=1, what="truncate") != chosen


def conversation(*items: dict[str, Any], **params: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": list(items), **params}, "agent_ref": {"name": "a"}}


USER = {"role": "user", "content": "question"}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "one two three four"}]}
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "<think>five six seven</think>\nanswer"}]}


def words(text: str, budget: int) -> str:
    return " ".join(text.split()[:budget])


def test_a_marker_goes_behind_the_last_user_turn_once() -> None:
    parts = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    row = conversation(USER, ANSWER, parts, REASONING)
    marked = with_marker(row, MARKER)
    assert marked["responses_create_params"]["input"][2]["content"][1]["text"] == "b" + MARKER
    assert marked["responses_create_params"]["input"][0] == USER
    assert with_marker(marked, MARKER) == marked
    assert (is_marked(row, MARKER), is_marked(marked, MARKER)) == (False, True)
    assert is_marked(conversation(ANSWER), MARKER) is None  # no turn to put it behind
    plain = {"responses_create_params": {"input": "hello"}}
    assert with_marker(plain, MARKER)["responses_create_params"]["input"] == "hello" + MARKER
    assert plain == {"responses_create_params": {"input": "hello"}}


def test_reasoning_is_taken_out_and_the_template_told() -> None:
    row = conversation(USER, REASONING, ANSWER, metadata={"chat_template_kwargs": '{"a": 1}', "k": "v"})
    stripped = without_reasoning(row)["responses_create_params"]
    assert stripped["input"] == [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "answer"}]}]
    assert json.loads(stripped["metadata"]["chat_template_kwargs"]) == {"a": 1, "enable_thinking": False}
    assert stripped["metadata"]["k"] == "v"
    assert has_reasoning(row)
    assert not has_reasoning({"responses_create_params": stripped})
    assert not has_reasoning({"responses_create_params": {"input": "<think>x</think>"}})


def test_reasoning_is_cut_to_its_budget_and_answers_stay() -> None:
    cut = with_budget(conversation(USER, REASONING, ANSWER), 2, words)["responses_create_params"]["input"]
    assert cut[1]["summary"][0]["text"] == "one two"
    assert cut[2]["content"][0]["text"] == "<think>five six</think>\nanswer"
    assert REASONING["summary"][0]["text"] == "one two three four"


@pytest.mark.parametrize(
    "text", ["<think>" * 100_000, "</think>" + "<think>" * 100_000, "<think>a</think>" * 50_000], ids=len
)
def test_tags_that_do_not_match_cost_little(text: str) -> None:
    start = time.process_time()
    row = conversation(USER, {"role": "assistant", "content": text})
    assert has_reasoning(row) == text.endswith("</think>")
    without_reasoning(row)
    assert time.process_time() - start < 1.0


AGENTS = ["math_with_judge_simple_agent", "mcqa_simple_agent"]


def write_rows(place: Path) -> list[dict[str, Any]]:
    """Write 40 rows of two agents, half of them with reasoning, and their profile; the last four are always solved."""
    rows = []
    for n in range(40):
        turns = [USER, ANSWER] if n % 2 else []
        row = conversation(*turns, {"role": "user", "content": f"question {n}"})
        rows.append(row | {"agent_ref": {"name": AGENTS[n % 4 == 0]}, "n": n})
    (place / "in").mkdir()
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    (place / "in/train-split.jsonl").write_bytes(b"".join(lines))
    (place / "in/val-split.jsonl").write_bytes(b'{"v": 1}\n')
    profile = [{"row_id": row_id(row), "pass_rate": min(1.0, n / 36)} for n, row in enumerate(rows)]
    (place / "rates.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in profile), encoding="utf-8")
    return rows


def command(place: Path, *overrides: str) -> list[str]:
    files = ["--in", str(place / "in/train-split.jsonl"), "--out", str(place / "out/train-split.jsonl")]
    return [*files, "--pass-rates", str(place / "rates.jsonl"), "gaussian.prompts_per_step=8", *overrides]


def test_the_command_writes_the_order_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path)
    shares = ["low_effort.share=0.25", "low_effort.domains=[stem_qa]", "reasoning.strip=0.5"]
    assert main(command(tmp_path, *shares)) == 0
    written = [json.loads(line) for line in (tmp_path / "out/train-split.jsonl").read_bytes().splitlines()]
    assert sorted(row["n"] for row in written) == list(range(36))
    assert sum(is_marked(row, MARKER) for row in written) == 9  # a quarter of 36, and nine rows are of that domain
    assert {row["agent_ref"]["name"] for row in written if is_marked(row, MARKER)} == {AGENTS[1]}
    assert sum(has_reasoning(row) for row in written) == 9  # half of 18
    untouched = [row for row in written if row == rows[row["n"]]]
    assert len(untouched) == 36 - 9 - 9
    manifest = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))
    assert manifest["counts"] == {
        "rows": 40,
        "always_solved": 4,
        "left_over": 0,
        "without_pass_rate_last": 0,
        "low_effort": 9,
        "stripped": 9,
        "truncated": 0,
        "domains": {"math": 27, "stem_qa": 9},
    }
    assert manifest["parameters"]["seed"] == 42
    assert [entry["file"] for entry in manifest["inputs"]] == ["train-split.jsonl", "val-split.jsonl", "rates.jsonl"]
    assert (tmp_path / "out/val-split.jsonl").read_bytes() == b'{"v": 1}\n'
    before = (tmp_path / "out/train-split.jsonl").read_bytes()
    capsys.readouterr()
    assert main(command(tmp_path, *shares)) == 0
    assert "up to date" in capsys.readouterr().out
    assert main(command(tmp_path, *shares, "seed=7")) == 0
    assert "parameters changed: seed was 42, is 7" in capsys.readouterr().out
    assert (tmp_path / "out/train-split.jsonl").read_bytes() != before


def test_reasoning_is_off_in_a_share_of_all_rows_and_cut_where_there_is_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path)
    source, output = tmp_path / "in/train-split.jsonl", tmp_path / "out/controlled.jsonl"
    settings = load_settings(DEFAULT_SETTINGS, ["reasoning.strip=0.25", "reasoning.truncate=0.1"])
    with pytest.raises(DataError, match="--tokenizer: it is not given"):
        control_reasoning(source, output, settings, None)
    settings["reasoning"]["truncate"] = 0
    assert control_reasoning(source, output, settings, None) == output
    written = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [row["n"] for row in written] == list(range(40))  # in their order
    off = [row for row in written if "metadata" in row["responses_create_params"]]
    assert len(off) == 10 and any(row["n"] % 2 == 0 for row in off)  # of all rows, not of those with reasoning
    assert all(template_kwargs(row) == {"enable_thinking": False} and not has_reasoning(row) for row in off)
    assert [row for row in written if row not in off] == [row for row in rows if row["n"] not in {r["n"] for r in off}]
    assert "40 rows, 0 low_effort, 10 stripped, 0 truncated" in capsys.readouterr().out
    control_reasoning(source, output, settings, None)
    assert "up to date" in capsys.readouterr().out


def test_another_name_is_another_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path)
    assert main(command(tmp_path)) == 0
    arguments = command(tmp_path)
    arguments[3] = str(tmp_path / "out/other.jsonl")
    assert main(arguments) == 0
    assert "parameters changed: output was train-split.jsonl, is other.jsonl" in capsys.readouterr().out
    assert (tmp_path / "out/other.jsonl").read_bytes() == (tmp_path / "out/train-split.jsonl").read_bytes()


def test_a_row_that_the_profile_lacks_has_no_rate_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = write_rows(tmp_path)[0]
    with (tmp_path / "in/train-split.jsonl").open("a") as file:
        file.write(json.dumps(row | {"n": 40, "uuid": "new", "pass_rate": 0.5}) + "\n")
    assert main([*command(tmp_path), "unrated=refuse"]) == 2
    assert "stem_qa: 1 rows have no pass rate" in capsys.readouterr().err


def test_rows_without_a_user_turn_are_not_low_effort(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | conversation(ANSWER) | {"uuid": row["n"], "pass_rate": 0.5} for row in write_rows(tmp_path)]
    lines = [json.dumps(row | {"agent_ref": {"name": AGENTS[1]}}) + "\n" for row in rows]
    (tmp_path / "in/train-split.jsonl").write_text("".join(lines), encoding="utf-8")
    arguments = command(tmp_path, "low_effort.share=0.25", "low_effort.domains=[stem_qa]")
    del arguments[4:6]  # the rates are the rows' own
    assert main(arguments) == 2
    assert "low_effort.share: it asks to mark 10 rows, and the named domains have 0" in capsys.readouterr().err


def test_budgets_need_a_tokenizer_and_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_rows(tmp_path)
    overrides = ["reasoning.truncate=1.0", "reasoning.budgets=[2]"]
    assert main(command(tmp_path, *overrides)) == 2
    assert "--tokenizer: it is not given" in capsys.readouterr().err
    vocabulary = {word: index for index, word in enumerate(["five", "six", "seven", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert main([*command(tmp_path), "--tokenizer", str(tmp_path), *overrides]) == 0
    texts = (tmp_path / "out/train-split.jsonl").read_text(encoding="utf-8")
    assert texts.count("<think>five six </think>") == 18
    assert texts.count("seven") == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "gaussian.sdt=0.1",
            "gaussian: got Additional properties are not allowed ('sdt' was unexpected), expected the",
        ),
        ("gaussian.prompts_per_step=0", "gaussian.prompts_per_step: got 0, expected an integer >= 1"),
        ("gaussian.prompts_per_step=1.5", "gaussian.prompts_per_step: got 1.5, expected an integer >= 1"),
        ("gaussian.std=wide", 'gaussian.std: got "wide", expected a number > 0'),
        ("gaussian=3", "gaussian: got 3, expected a block of keys"),
        ("gaussian=", "gaussian: there is nothing after '='"),
        ("seed=abc", 'seed: got "abc", expected an integer'),
        ("filter.max_pass_rate=0", "filter.max_pass_rate: got 0, expected a number > 0 and <= 1"),
        ("reasoning.strip=1.5", "reasoning.strip: got 1.5, expected a number >= 0 and <= 1"),
        ("reasoning={strip: 0.6, truncate: 0.6, budgets: [1]}", "reasoning: got 1.2, expected strip and truncate that"),
        ("reasoning={strip: 0, truncate: 0.1, budgets: []}", "reasoning.budgets: got []"),
        ("shares={math: 0.5}", "a sum of 0.5"),
        ("shares={math: half}", 'shares.math: got "half", expected a number > 0 and <= 1'),
        ("domains={math: mcqa_simple_agent}", 'domains.math: got "mcqa_simple_agent", expected a list of texts'),
        ("domains={math: [a, b], code: [b]}", "domains: got b twice, expected each agent once"),
        (
            "low_effort={share: 0.5, domains: [stem_qa], marker: m}",
            "low_effort.share: it asks to mark 18 rows, and the named domains have 9",
        ),
        ("low", "overrides: got low, expected KEY=VALUE"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path)
    assert main(command(tmp_path, override)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "x.yaml: this file cannot be read (No such file or directory)"),
        ("a: [", "x.yaml:2: this is not YAML"),
        ("seed: 1\nseed: 2\n", "x.yaml:2: seed: this key stands here a second time"),
        (
            "seed: 1\n",
            "x.yaml: got 'unrated' is a required property, expected the keys seed, unrated, filter, gaussian",
        ),
    ],
)
def test_a_wrong_file_of_settings_is_named(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path)
    if content is not None:
        (tmp_path / "x.yaml").write_text(content, encoding="utf-8")
    assert main([*command(tmp_path)[:-1], "--config", str(tmp_path / "x.yaml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"row_id": "a", "pass_rate": 50}',
            "rates.jsonl:41: it has no row_id with a pass_rate from 0 to 1 (ValueError: pass_rate 50)",
        ),
        ('{"row_id": "a"}', "0 to 1 (KeyError: 'pass_rate')"),
        ("[]", "rates.jsonl:41: it has no row_id with a pass_rate from 0 to 1 (TypeError"),
        ("{", "rates.jsonl:41: it has no row_id with a pass_rate from 0 to 1 (JSONDecodeError"),
    ],
)
def test_a_wrong_profile_is_named(tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path)
    with (tmp_path / "rates.jsonl").open("a") as file:
        file.write(f"{line}\n")
    assert main(command(tmp_path)) == 2
    assert message in capsys.readouterr().err


def test_a_profile_in_which_all_is_solved_leaves_nothing_to_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path)
    solved = [json.dumps({"row_id": row_id(row), "pass_rate": 1.0}) + "\n" for row in rows]
    (tmp_path / "rates.jsonl").write_text("".join(solved), encoding="utf-8")
    assert main(command(tmp_path)) == 2
    assert "in/train-split.jsonl: none of its 40 rows has a pass rate below 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


ODD_ROWS = [
    {"metadata": {"chat_template_kwargs": "{"}},
    {"metadata": {"chat_template_kwargs": "[1]"}},
    {"metadata": {"chat_template_kwargs": {"enable_thinking": True}}},
    {"metadata": {"chat_template_kwargs": '{"a":' * 100_000}},
    {"metadata": "x"},
    {"input": [{"role": "user", "content": []}]},
    {"input": [{"role": "user"}]},
    {"input": [5]},
]


@pytest.mark.parametrize("params", ODD_ROWS, ids=lambda params: str(params)[:60])
def test_an_odd_row_is_named_with_its_line_before_anything_is_written(
    tmp_path: Path, params: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path)
    row = conversation({"role": "user", "content": "q"}) | {"agent_ref": {"name": AGENTS[0]}}
    row["responses_create_params"] |= params
    with (tmp_path / "in/train-split.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert main(command(tmp_path)) == 2
    shown = capsys.readouterr().err
    assert "in/train-split.jsonl:41: the row cannot be read (" in shown
    assert len(shown) < 1000
    assert not (tmp_path / "out").exists()


def test_rows_and_places_that_do_not_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path)
    with (tmp_path / "in/train-split.jsonl").open("a") as file:
        file.write('{"agent_ref": {}}\n')
    assert main(command(tmp_path)) == 2
    assert "in/train-split.jsonl:41: the row cannot be read (KeyError: 'name')" in capsys.readouterr().err
    (tmp_path / "in/val-split.jsonl").unlink()  # also without it, an output beside the input would take its manifest
    arguments = command(tmp_path)
    arguments[3] = str(tmp_path / "in/ordered.jsonl")
    assert main(arguments) == 2
    assert "ordered.jsonl: the output would lie in the directory of the input" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["train-split.jsonl"]


def test_changed_validation_rows_are_copied_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path)
    assert main(command(tmp_path)) == 0
    (tmp_path / "in/val-split.jsonl").write_bytes(b'{"v": 2}')
    assert main(command(tmp_path)) == 0
    assert "inputs changed: val-split.jsonl.bytes was 9, is 8" in capsys.readouterr().out
    assert (tmp_path / "out/val-split.jsonl").read_bytes() == b'{"v": 2}'
    assert json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))["outputs"][1]["rows"] == 1


def test_the_committed_settings_load() -> None:
    settings = load_settings(DEFAULT_SETTINGS, [])
    assert settings["low_effort"]["marker"] == MARKER
    PassRateSchedule(**settings["gaussian"])


def test_rows_without_a_pass_rate_come_last_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As most do after a short run, whose pass rates the page of this command names."""
    row = write_rows(tmp_path)[0]
    with (tmp_path / "in/train-split.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"n": 40, "uuid": "new", "pass_rate": 0.5}) + "\n")
    assert main(command(tmp_path)) == 0
    assert "1 without_pass_rate_last" in capsys.readouterr().out
    lines = (tmp_path / "out/train-split.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["uuid"] == "new"
