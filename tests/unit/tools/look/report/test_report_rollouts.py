"""The page with every logged rollout: all of them, as data that no text of a model can leave."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page_text import Balance
from tools.look.report import trajectory
from tools.look.report.__main__ import main
from tools.look.report.load import load_run
from tools.look.report.trajectory import browser

MakeRun = Callable[..., Path]
EVIL = "</script><img src=x onerror=alert(1)><!--<script>\u2028\ud800]]>"


def data_of(page: str) -> list[dict[str, Any]]:
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert inside
    assert "<" not in inside[1]
    found: list[dict[str, Any]] = json.loads(inside[1])
    return found


def add_line(run_dir: Path, **values: object) -> None:
    with (run_dir / "rollouts" / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 3, "prompt_id": "p", **values}) + "\n")


def test_every_logged_rollout_is_there_the_newest_first(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=10)
    assert main(["--run-dir", str(run_dir)]) == 0
    shown = data_of((run_dir / "rollouts.html").read_text(encoding="utf-8"))
    logged = [len((run_dir / "rollouts" / f"{kind}.jsonl").read_text().splitlines()) for kind in ("train", "val")]
    assert len(shown) == sum(logged) == 10 * 8 + 2 * 6
    assert [one["step"] for one in shown] == sorted((one["step"] for one in shown), reverse=True)
    assert shown[0]["group_rewards"][shown[0]["member"]] == shown[0]["reward"]


def test_hostile_text_stays_data(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=1)
    hostile = dict.fromkeys(("prompt", "prompt_text", "output_text", "reason", "agent", "status"), EVIL)
    add_line(run_dir, **hostile, reward=1.0)
    page = browser(load_run(run_dir))
    page.encode()
    (one,) = [one for one in data_of(page) if one["reason"] == EVIL]
    assert {key: one[key] for key in hostile} == hostile
    assert "<img" not in page and "onerror=" not in page.replace(json.dumps(EVIL)[1:-1].replace("<", r"\u003c"), "")
    parser = Balance()
    parser.feed(page)
    assert not parser.open


def test_the_page_runs_its_own_script_only_and_that_parses_no_html(make_run: MakeRun) -> None:
    page = browser(load_run(make_run(num_steps=1)))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", script)
    assert not re.search(r"\ssrc=|url\(|@import|https?://", page)
    ids = set(re.findall(r'byId\("(\w+)"\)', script))
    assert ids <= set(re.findall(r'id="(\w+)"', page))


def test_what_is_beyond_the_size_is_counted(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(make_run(num_steps=4))
    monkeypatch.setattr(trajectory, "MAX_BYTES", 5000)
    page = browser(run)
    shown = data_of(page)
    assert 1 < len(shown) < 40
    assert f"{4 * 8 + 6 - len(shown)} older ones are left out" in page


def test_a_log_of_an_older_form_has_its_page(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=1)
    add_line(run_dir)
    (one,) = [one for one in data_of(browser(load_run(run_dir))) if one["step"] == 3]
    assert (one["output_text"], one["versions"], one["kind"]) == ("", [], "train")
