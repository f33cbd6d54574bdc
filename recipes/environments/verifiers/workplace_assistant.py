"""Tasks in a made-up office, done with its tools. Reward 1.0 for the state that the right calls leave, else 0.0.

The answer's function calls are done again, in their order, on a fresh office, those of `ground_truth` on another one,
and the two are compared: emails, events, plots, tasks, customers. The text of an answer, and calls that only read, do
not matter. The tables come with the training data (`configs/data/side_files.yaml`); rewards depend on exactly those.

Kept from the reference, because rewards depend on it:

* Records must be in the same order and have the same labels. A new email, task or customer counts its table's labels
  anew, a deletion leaves a gap, a new event has the label 0. So "send, then delete" leaves another state than "delete,
  then send". With the setting `ignore_order` neither order nor labels matter.
* Case does not matter, except for `status`, `list_name` and `board`. A cell that is no text equals every other such
  cell, so a duration of 30 as a number equals 45 as a number, and neither equals "30".
* The next id is one more than the greatest id read as text: after email 999 comes 1000, and after that 1000 again.
  Ids of emails are not padded with zeros. An update may change an id.
* Adding a customer takes any status; updating one does not. Starts and durations of events are kept as written.
* A call that fails changes nothing and costs nothing. Null arguments are left out when a tool runs; they are not when
  calls are done again for the reward, so `"notes": null` differs from no notes.

Decided otherwise:

* A text that is searched for is a text. The reference reads it as a regular expression, in which a model can write one
  that never ends. An empty cell contains no text; the reference fails there.
* Start times are read in ISO 8601 and in common written forms (`office/tables.py`); the reference reads some more.
* Arguments that are lists or objects, or longer than 20,000 characters, are refused; an office takes 1,000 changes.
* `ground_truth` must be a list of calls. Of a text, the reference does no call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.environments.contract import (
    Agent,
    Response,
    Row,
    Text,
    Tools,
    Verdict,
    Verifier,
    function_calls,
    named_file,
    read_arguments,
    wrong,
)
from recipes.environments.verifiers.office.tables import Office, load_office
from recipes.environments.verifiers.office.tools import CHANGES, call
from recipes.exact_json import dumps

TABLES = "data/side_files/workplace_assistant"
CHEAP_CALLS = 50  # of a row that is scored in the process that asks
MAX_STEPS = 6  # model calls of a rollout, where the agent's configuration names no other number


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Tools of a made-up office, graded by the state they leave."""

    tables: Text = TABLES
    """directory of the office's tables, relative to the checkout; the default is where `make data` puts them"""
    ignore_order: bool = False
    """compare what the tables hold, in whatever order it was made"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The calls that do a task, as (tool, arguments as JSON text), and the directory of the office's tables."""

    ground_truth: tuple[tuple[str, str], ...]
    tables: str
    is_order_ignored: bool = False


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `ground_truth`; the tables are read here too, so that a row without them is refused and not rewarded."""
    calls = row.get("ground_truth")
    if not isinstance(calls, list):
        raise wrong("ground_truth", calls, "a list of calls")
    for entry in calls:
        if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("name", "arguments")):
            raise wrong("ground_truth", entry, "calls with a name and arguments as JSON text")
    load_office(str(named_file(settings.tables)))
    return Task(
        ground_truth=tuple((entry["name"], entry["arguments"]) for entry in calls),
        tables=str(named_file(settings.tables)),
        is_order_ignored=settings.ignore_order,
    )


def score(response: Response, task: Task) -> Verdict:
    """Compare the office that the answer's calls leave with the one that the right calls leave."""
    calls = [(item.get("name"), item.get("arguments")) for item in function_calls(response)]
    office = load_office(task.tables)
    after, expected = _done(office, calls), _done(office, task.ground_truth)
    is_right = after.is_same(expected, in_order=not task.is_order_ignored)
    changes = f"{after.num_changes} changes, {expected.num_changes} expected"
    reason = f"the office is {'as' if is_right else 'not as'} it should be ({changes})"
    return Verdict(reward=float(is_right), reason=reason, metrics={"num_tool_calls": float(len(calls))})


def _done(office: Office, calls: Iterable[tuple[object, object]]) -> Office:
    """Return the office after calls; those that cannot be read, and those that only read, are passed over."""
    for name, text in calls:
        if not isinstance(name, str) or name not in CHANGES:
            continue
        try:
            arguments = read_arguments(text)
        except ValueError:
            continue
        office, _ = call(office, name, arguments)
    return office


def _start(settings: Settings) -> Office:
    return load_office(str(named_file(settings.tables)))


def _call(office: Office, name: str, arguments: Mapping[str, Any]) -> tuple[Office, str]:
    after, value = call(office, name, {key: value for key, value in arguments.items() if value is not None})
    return after, dumps({"output": value}).decode()


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="WorkbenchResourcesServer",
    agents={
        "workplace_assistant_simple_agent": Agent(kind="tool_loop", server="workplace_assistant", max_steps=MAX_STEPS)
    },
    settings=Settings,
    files=lambda settings: {"tables": settings.tables},
    tools=Tools(start=_start, call=_call),
    is_cheap=lambda task: len(task.ground_truth) <= CHEAP_CALLS,
)
