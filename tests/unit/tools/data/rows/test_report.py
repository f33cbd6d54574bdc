"""The report of the blends: numbers of the text, bars of the page, rows that cannot be read."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recipes.grpo.data import row_id
from tools.data.rows.report import main, read_blend
from tools.look.report.chart import MAX_COLORS, bars, drawn_as, palette


def row(agent: str, text: str, **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": text}, "agent_ref": {"name": agent}, **more}


def blend(place: Path) -> Path:
    """Write ten training rows of two agents and two validation rows; the first five are harder and harder."""
    place.mkdir()
    train = [row("a", "x" * 2 ** (n + 4), pass_rate=1 - n / 10) for n in range(5)]
    train += [row("b", "y" * 100, n=n) for n in range(4)]
    lines = [json.dumps(entry) for entry in train] + ["{broken"]
    (place / "train-split.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "val-split.jsonl").write_text(
        "".join(json.dumps(row("b", "z", n=n)) + "\n" for n in range(2)), encoding="utf-8"
    )
    return place


def test_text_counts_rows_lengths_and_pass_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(blend(tmp_path / "one"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("one: 9 rows to train on, 2 to validate, 1 lines that cannot be read: run `make data-validate`")
    assert lines[2].split() == [
        "a",
        "5",
        "55.6%",
        "0",
        "0.0%",
        "0.80",
        "-",
        "76,",
        "268,",
        "268",
    ]  # {"input":""} is 12 more
    assert lines[3].split()[:6] == ["b", "4", "44.4%", "2", "100.0%", "-"]


def test_a_profile_counts_instead_of_the_rows(tmp_path: Path) -> None:
    directory = blend(tmp_path / "one")
    first = json.loads((directory / "train-split.jsonl").read_text(encoding="utf-8").splitlines()[5])
    stats = read_blend(directory, None, {row_id(first): 0.25}).train
    assert list(stats.agents["b"].pass_rates) == [0.25]
    assert list(stats.agents["a"].pass_rates) == []
    assert (list(stats.rated_lines), stats.num_lines) == ([6], 10)


class Page(HTMLParser):
    """Checks that tags close and collects what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "rect"):
            self.open.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_every_blend(tmp_path: Path) -> None:
    directories = [str(blend(tmp_path / name)) for name in ("one", "<two>")]
    assert main(["--data", *directories, "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert text.count("<figure>") == 8
    assert "&lt;two&gt;" in text
    tips = dict(re.findall(r">(\d[\d.]*) · all (\d+)", text))
    assert {label: tips[label] for label in ("1", "0.875", "0.75", "0.625", "0.5", "0.375")} == {
        "1": "1",
        "0.875": "1",
        "0.75": "1",
        "0.625": "1",  # 0.7
        "0.5": "1",  # 0.6
        "0.375": "0",
    }


def test_an_agent_whose_share_of_validation_is_off_is_marked(tmp_path: Path) -> None:
    directory = blend(tmp_path / "one")
    assert main(["--data", str(directory), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    cells = dict(re.findall(r"<tr><td>(\w)</td>(.*?)</tr>", text, re.DOTALL))
    assert '<td class="down">0.0 %</td>' in cells["a"]
    assert '<td class="up">100.0 %</td>' in cells["b"]
    assert 'class="span up" style="left:44.4%;width:55.6%"' in cells["b"]  # of the widest share


def test_a_blend_that_was_never_profiled_says_how_to_do_it(tmp_path: Path) -> None:
    directory = blend(tmp_path / "one")
    rows = [json.dumps(row("a", "x", n=n)) for n in range(3)]
    (directory / "train-split.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert main(["--data", str(directory), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<figure>") == 1
    assert "`make profile`" in text


def test_bars_add_up_and_each_agent_keeps_its_color() -> None:
    parts = {f"agent {n}": [float(n), 1.0] for n in range(12)}
    names = palette({name: round(sum(values)) for name, values in parts.items()})
    assert list(names)[:8] == sorted(f"agent {n}" for n in range(4, 12))
    assert {names[f"agent {n}"] for n in range(4)} == {"4 others"}
    assert palette(dict.fromkeys("cab", 1)) == {"a": "a", "b": "b", "c": "c"}
    one = bars("t", ["left"], drawn_as(names, {"agent 9": [2.0]}))
    assert f'rect class="c{list(names).index("agent 9")}"' in one
    assert "agent 8" not in one
    figure = bars("t", ["left", "right"], drawn_as(names, parts), unit="rows")
    assert "4 others" in figure
    assert "left · all 66" in figure
    assert "right · all 12" in figure
    colors = {int(number) for number in re.findall(r'rect class="c(\d+)"', figure)}
    assert colors == set(range(MAX_COLORS))
    assert "nothing recorded" in bars("t", ["left"], {"a": [0]})


def test_missing_inputs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 2
    assert "train-split.jsonl: there is no such file" in capsys.readouterr().err
    assert main(["--data", str(blend(tmp_path / "one")), "--tokenizer", str(tmp_path)]) == 2
