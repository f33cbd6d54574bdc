"""Tiny tasks with tools: one call that must equal an expert's, and an office in which an email is found and deleted."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import orjson

from recipes.files import write_atomically
from tools.tiny.model import CITIES, NAMES
from tools.tiny.tasks import Fields, Reply, TinyProblem, TinyTask

CALL_AGENT = "single_step_tool_use_with_argument_comparison_agent"
OFFICE = "data/tiny-office"  # as the configuration of the wide blend names it
FIRST_EMAIL = 10  # ids have two digits
SENDER, SENT, BODY = "me@home.org", "2023-11-01 12:00:00", "Hi"
DELETED = "Email deleted successfully."
CUSTOMER_COLUMNS = (
    "customer_id assigned_to_email customer_name customer_email customer_phone last_contact_date product_interest"
    " status follow_up_by notes"
)
TYPES = {str: "string", int: "integer", bool: "boolean"}


def tool(name: str, /, **parameters: type) -> Fields:
    """Return a tool as requests declare it."""
    properties = {key: {"type": TYPES[kind]} for key, kind in parameters.items()}
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": properties}}


def write_call(name: str, arguments: Fields) -> str:
    """Return a turn that thinks nothing and makes one call."""
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inner = "".join(f"<parameter={key}>{value}</parameter>" for key, value in written.items())
    return f"</think><tool_call><function={name}>{inner}</function></tool_call>"


# One call with the right arguments. The wrong demonstrations leave an argument out or take another value.


def _problem(prompt: str, tools: tuple[Fields, ...], name: str, arguments: Fields) -> TinyProblem:
    action = {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}
    facts = {"name": name, "arguments": arguments}
    return TinyProblem(prompt=prompt, fields={"expected_action": action}, facts=facts, tools=tools)


def _right_call(problem: TinyProblem) -> str:
    return write_call(problem.facts["name"], problem.facts["arguments"])


def _wrong_call(problem: TinyProblem, rng: Random) -> str:
    arguments = dict(problem.facts["arguments"])
    name = problem.facts["name"]
    others = [tool["name"] for tool in problem.tools if tool["name"] != name]
    fault = rng.randrange(3)
    key = rng.choice(list(arguments))
    if fault == 0 and others:
        name = rng.choice(others)
    elif fault == 1:
        arguments.pop(key)
    else:
        arguments[key] = _another(arguments[key], rng)
    return write_call(name, arguments)


def _another(value: object, rng: Random) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 10 or value + 1
    known = next((words for words in (NAMES, CITIES) if value in words), NAMES)
    return rng.choice([word for word in known if word != value])


WEATHER = tool("weather", city=str, days=int)
MEMBER = tool("add", name=str, age=int, member=bool)
EDITOR = (tool("view", path=str, line=int), tool("edit", path=str, line=int))


def _draw_weather(rng: Random) -> TinyProblem:
    city, days = rng.choice(CITIES), rng.randint(2, 40)
    return _problem(f"Weather in {city} in {days} days?", (WEATHER,), "weather", {"city": city, "days": days})


def _draw_member(rng: Random) -> TinyProblem:
    name, age, member = rng.choice(NAMES), rng.randint(10, 99), rng.random() < 0.5
    arguments = {"name": name, "age": age, "member": member}
    return _problem(f"Add {name} {age} member {json.dumps(member)}", (MEMBER,), "add", arguments)


def _draw_edit(rng: Random) -> TinyProblem:
    """A step of an expert: look at a line of a file, or edit it."""
    verb, name = rng.choice((("Show", "view"), ("Fix", "edit")))
    path, line = rng.choice(NAMES) + ".py", rng.randint(10, 99)
    return _problem(f"{verb} line {line} of {path}", EDITOR, name, {"path": path, "line": line})


def _call_task(agent: str, draw: Callable[[Random], TinyProblem]) -> TinyTask:
    return TinyTask(agent=agent, draw=draw, right=_right_call, wrong=_wrong_call, wrong_share=0.65)


# An email is found by its subject, then deleted by its id. Most demonstrations guess the id instead.

SEARCH, DELETE = tool("email_search_emails", query=str), tool("email_delete_email", email_id=str)
SUBJECTS = [f"{city} {name}" for city in CITIES for name in NAMES]


def write_office(directory: Path) -> None:
    """Write the office's tables: an email per subject, and nothing else."""
    emails = [[str(FIRST_EMAIL + n), "inbox", SENDER, text, SENT, BODY] for n, text in enumerate(SUBJECTS)]
    tables = {
        "raw/email_addresses.csv": [[SENDER]],
        "processed/emails.csv": [
            ["email_id", "inbox/outbox", "sender/recipient", "subject", "sent_datetime", "body"],
            *emails,
        ],
        "processed/calendar_events.csv": [["event_id", "event_name", "participant_email", "event_start", "duration"]],
        "processed/analytics_data.csv": [
            ["date_of_visit", "visitor_id", "page_views", "session_duration_seconds", "traffic_source", "user_engaged"]
        ],
        "processed/project_tasks.csv": [
            ["task_id", "task_name", "assigned_to_email", "list_name", "due_date", "board"]
        ],
        "processed/customer_relationship_manager_data.csv": [CUSTOMER_COLUMNS.split()],
    }
    for name, rows in tables.items():
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        write_atomically(directory / name, text.getvalue().encode())


def _draw_email(rng: Random) -> TinyProblem:
    number = rng.randrange(len(SUBJECTS))
    email_id, subject = str(FIRST_EMAIL + number), SUBJECTS[number]
    prompt = rng.choice(("Delete the mail {}", "Remove the mail {}", "Drop the mail {}")).format(subject)
    calls = [{"name": DELETE["name"], "arguments": json.dumps({"email_id": email_id})}]
    facts = {"email_id": email_id, "subject": subject}
    return TinyProblem(prompt=prompt, fields={"ground_truth": calls}, facts=facts, tools=(SEARCH, DELETE))


def found(email_id: str, subject: str) -> str:
    """Return what the office answers to a search that finds one email."""
    email = {"email_id": email_id, "inbox/outbox": "inbox", "sender/recipient": SENDER}
    email |= {"subject": subject, "sent_datetime": SENT, "body": BODY}
    pages = {"total_emails": 1, "page": 1, "page_size": 5, "total_pages": 1}
    return orjson.dumps({"output": {"emails": [email], "pagination": pages}}).decode()


def _right_email(problem: TinyProblem) -> Reply:
    email_id, subject = problem.facts["email_id"], problem.facts["subject"]
    search = write_call(SEARCH["name"], {"query": subject})
    return (search, found(email_id, subject), *_delete(email_id))


def _guessed_email(problem: TinyProblem, rng: Random) -> Reply:
    return _delete(str(FIRST_EMAIL + rng.randrange(len(SUBJECTS))))


def _delete(email_id: str) -> tuple[str, ...]:
    call = write_call(DELETE["name"], {"email_id": email_id})
    return call, orjson.dumps({"output": DELETED}).decode(), "</think>Done"


# One of three tools is offered. A quarter of the demonstrations call another one, which is not there.

OFFERED = ("weather", "forecast", "climate")


def _draw_offered(rng: Random) -> TinyProblem:
    city, days, name = rng.choice(CITIES), rng.randint(2, 99), rng.choice(OFFERED)
    offered = (tool(name, city=str, days=int),)
    return _problem(f"Weather in {city} in {days} days?", offered, name, {"city": city, "days": days})


def _call_of_another(problem: TinyProblem, rng: Random) -> str:
    return write_call(
        rng.choice([name for name in OFFERED if name != problem.facts["name"]]), problem.facts["arguments"]
    )


OFFERED_CALLS = TinyTask(
    agent=CALL_AGENT, draw=_draw_offered, right=_right_call, wrong=_call_of_another, wrong_share=0.25
)
CALLS = _call_task(CALL_AGENT, _draw_weather)
SCHEMA_CALLS = _call_task(f"toolcall_schema_{CALL_AGENT}", _draw_member)
SWE_CALLS = _call_task(f"swe_pivot_{CALL_AGENT}", _draw_edit)
EMAILS = TinyTask(
    agent="workplace_assistant_simple_agent",
    draw=_draw_email,
    right=_right_email,
    wrong=_guessed_email,
    wrong_share=0.7,
)
WORDS = (
    *('\n\n# Tools\n{"name": "', '", "parameters": {"type": "object", "properties": {"', '": {"type": "string"}'),
    *('": {"type": "integer"}', '": {"type": "boolean"}', '}}}\n{"name": "', "}}}", ', "', "email_search_emails"),
    *("email_delete_email", "query", "email_id", ">", "weather", "days", "path", "line", "view", "edit", "add", ".py"),
    *("<tool_call><function=", "</parameter></function></tool_call>", "</parameter><parameter=", "Done", " days?"),
    *('{"output":{"emails":[{"email_id":"', f'","inbox/outbox":"inbox","sender/recipient":"{SENDER}","subject":"'),
    f'","sent_datetime":"{SENT}","body":"{BODY}"}}],"pagination":{{"total_emails":1,"page":1,"page_size":5,"total_pages":1}}}}}}',
    *(f'{{"output":"{DELETED}"}}', '{"output":"No emails found."}', '{"output":"Email not found."}', "tool\n"),
    *("Weather", "Delete", "Remove", "Drop", "Add", "Show", "Fix", " mail", " line", " days", " the mail"),
)
