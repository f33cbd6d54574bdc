"""Judges are asked in the published words: taken from the pinned files, whole, byte for byte; never in others."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.config.keys.schema import CONFIG_DIR, resources_types, settings_of
from recipes.config.load import PLATFORMS, config_path, load_config, load_stages, require_valid, with_defaults
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.contract import keys_of, named_file, texts
from recipes.environments.contract.verifier import (
    JudgeQuestion,
    Response,
    Verdict,
    advance,
    message_item,
    response_object,
)
from recipes.environments.environments import Environments
from recipes.environments.instances import (
    ALL_VERIFIERS,
    GROUP_VERIFIERS,
    VERIFIERS,
    ServerInstance,
    agents_of,
    judge_texts_of,
    named_files_of,
    servers_of,
    texts_of,
    without_own_words,
)
from recipes.environments.scoring.judge import chat_request, response_of
from recipes.environments.verifiers import genrm_compare
from recipes.errors import ConfigError
from tests.judge_requests import Case, asked, cases, recorded, request_sha256
from tools.doctor.services import text_findings
from tools.draft.findings import forced
from tools.draft.provenance import differences, judge_text_digests, named_file_digests
from tools.show_config import render

ROOT = Path(__file__).parents[4]
FETCHED = Path(os.environ.get("SIDE_FILES_DIR", ROOT / "data" / "side_files"))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, ServerInstance]:
    """The servers of stage 1 with the published texts; without the files, tests that need them are skipped."""
    if not (FETCHED / "genrm_compare").is_dir():
        pytest.skip(f"{FETCHED} does not hold the published texts; set SIDE_FILES_DIR or run make data")
    env = require_valid(load_config(CONFIG_DIR / "stage1_rlvr.yaml")).env
    monkeypatch.setattr(texts, "SIDE_FILES", FETCHED)
    return servers_of(env.nemo_gym.instances, judge_texts=env.judge_texts)


def said(text: str) -> Response:
    return response_of({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


def played(case: Case, server: ServerInstance) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the requests of a case, and the rewards that follow from its replies."""
    verifier = ALL_VERIFIERS[server.verifier]
    task = verifier.parse_task(case.row, server.settings)
    is_group = server.verifier in GROUP_VERIFIERS
    given: Any = case.responses if is_group else case.responses[0]
    replies: list[Any] = []
    requests: list[dict[str, Any]] = []
    scored: Any = advance(verifier.score(given, task), replies)
    while not isinstance(scored, Verdict | list) or (isinstance(scored, list) and not isinstance(scored[0], Verdict)):
        if case.output:
            answers: list[Any] = [dict(case.output) for _ in scored]
        else:
            judge = server.judge
            assert judge is not None
            requests += [chat_request(question, judge.model, judge.params, judge.extra) for question in scored]
            first = len(requests) - len(scored)
            answers = [said(case.replies[(first + place) % len(case.replies)]) for place in range(len(scored))]
        replies.append(answers)
        scored = advance(verifier.score(given, task), replies)
    verdicts = scored if is_group else [scored]
    if case.output and (prompt := verdicts[0].details.get("correction_prompt")):
        requests = [{"prompt": prompt}]
    return requests, [verdict.reward for verdict in verdicts]


@pytest.mark.parametrize("server", sorted({case.server for case in cases()}))
def test_requests_are_the_published_ones_byte_for_byte(server: str, servers: Mapping[str, ServerInstance]) -> None:
    known = recorded()
    differ = []
    for case in cases():
        if case.server != server:
            continue
        requests, rewards = played(case, servers[server])
        expected = known[case.name]
        if [request_sha256(request) for request in requests] != expected["requests"]:
            differ.append((case.name, "requests", len(requests), len(expected["requests"])))
        if rewards != pytest.approx(expected["rewards"]):
            differ.append((case.name, "rewards", rewards, expected["rewards"]))
    assert not differ


def test_enough_is_recorded() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) >= 200
    assert set(names) == recorded().keys()
    assert len({case.server for case in cases()}) >= 9


STANDINS = {  # side -> file -> what stands in for the published one
    "genrm_compare": {
        "stage3_rlhf.yaml": "env: {nemo_gym: {genrm_compare_resources_server: {resources_servers: {genrm_compare: "
        "{default_principle: 'Stand-in principle.'}}}}}"
    },
    "over_refusal_detection": {
        "over_refusal_detection_nemotron_tp8.yaml": "over_refusal_detection: {resources_servers: "
        "{over_refusal_detection: {judge_prompt_template: 'P {safe_prompt} {{R}} {model_response}'}}}"
    },
    "inverse_if": {
        "inverse_if.yaml": "inverse_if: {resources_servers: {inverse_if: {default_judge_prompt_template: "
        "'I {criteria}', default_judge_system_prompt: 'IS'}}}"
    },
    "multichallenge": {
        "multichallenge.yaml": "multichallenge: {resources_servers: {multichallenge: {judge_prompt_template: "
        "'M {question} {pass_criteria}', judge_system_message: MS}}}"
    },
    "math_with_judge": {
        "app.py": 'class LibraryJudgeMathResourcesServer(Base):\n    JUDGE_SYSTEM_MESSAGE: ClassVar[str] = "A" "B"\n'
        "    JUDGE_PROMPT_TEMPLATE: ClassVar[str] = (\n"
        '        "<|Q|>\\n{question} {first_answer} {second_answer}"\n    )\n'
    },
    "math_formal_lean": {
        "app.py": 'REFINEMENT_PROMPT_TEMPLATE = """L {proof_attempt}\n{error_message}"""\n'
        'def format_error_feedback(x):\n    if x:\n        return "early"\n    return "silent"\n'
        "class MathFormalLeanResourcesServer:\n    async def verify(self):\n        if self:\n"
        '            error_msg = "empty one"\n'
    },
    "jailbreak_detection": {
        "app.py": "class JailbreakDetectionResourcesServer:\n    def _build_nemotron_prompt(self):\n"
        '        """Not this."""\n'
        '        return f"H {cfg.nemotron_safety_taxonomy} {{x}} {adversarial_prompt} {think_mode}"\n',
        "util.py": 'NEMOTRON_SAFETY_TAXONOMY = """S1: a.\nS2: b."""\n',
        "configs/jailbreak_detection_nemotron_combined_reward_tp8.yaml": "jailbreak_detection: {resources_servers: "
        "{jailbreak_detection: {quality_judge_prompt_template: 'Q {model_response}'}}}",
        "configs/verifier_prompt_templates.yaml": "one: {prompt_template: 'One {model_response}', "
        "labels: {positive: '+', negative: '-'}, rewards: {positive: 1.0, negative: 0.25, unclear: 0.5}}\n"
        "policy_verifier_map: {engagement: "
        "{verifiers: [one], reward_combination: single}}\n",
    },
    "equivalence_llm_judge": {"equivalence_llm_judge.txt": "\nE {question} \n", "lc_judge.txt": "LC {question}"},
}


def write_standins(directory: Path, patch: pytest.MonkeyPatch, standins: Mapping[str, Mapping[str, str]]) -> None:
    """Put files of our own in place of the published ones, pinned as those are."""
    table = {}
    for side, files in standins.items():
        for name, content in files.items():
            (directory / side / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / side / name).write_text(content, encoding="utf-8")
        hashes = {name: {"sha256": hashlib.sha256(content.encode()).hexdigest()} for name, content in files.items()}
        table[side] = {"repository": "o/r", "revision": "0" * 40, "path": "p", "files": hashes}
    patch.setattr(texts, "SIDE_FILES", directory)
    patch.setattr(texts, "pinned", lambda: table)


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_standins(tmp_path, monkeypatch, STANDINS)
    return tmp_path


# What stands in for a text -> the same with every field that the published one has.
WHOLE = {
    "P {safe_prompt} {{R}} {model_response}": "A {safe_prompt} | {{R}} | {model_response} Z",
    "I {criteria}": "A {prompt} | {standard_response} | {criteria} | {model_response} Z",
    "M {question} {pass_criteria}": "A {context} | {question} | {response} | {pass_criteria} Z",
    "E {question} ": "A {question} | {expected_answer} | {generated_answer} Z",
    "LC {question}": "A {question} | {expected_answer} | {generated_answer} Z",
    "One {model_response}": "A {adversarial_prompt} | {model_response} Z",
    "Q {model_response}": "A {adversarial_prompt} | {model_response} Z",
}
RENDERED = Path(__file__).parents[3] / "golden" / "standin_requests.json"


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, ServerInstance]:
    """The servers of stage 1, asked in texts of our own that have the fields of the published ones."""
    told = {side: dict(files) for side, files in STANDINS.items()}
    for files in told.values():
        for name in files:
            for short, full in WHOLE.items():
                files[name] = files[name].replace(short, full)
    env = require_valid(load_config(CONFIG_DIR / "stage1_rlvr.yaml")).env
    write_standins(tmp_path, monkeypatch, told)
    return servers_of(env.nemo_gym.instances, judge_texts=env.judge_texts)


def test_requests_in_other_words_are_rendered_as_they_were(whole: Mapping[str, ServerInstance]) -> None:
    """A clone without the published texts compares with requests that were recorded where the published ones agreed."""
    found = {}
    for case in cases():
        requests, _ = played(case, whole[case.server])
        found[case.name] = hashlib.sha256("".join(map(request_sha256, requests)).encode()).hexdigest()
    if os.environ.get("RECORD_STANDINS"):
        assert (FETCHED / "genrm_compare").is_dir(), "record only where the published requests are compared, too"
        RENDERED.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    assert found == json.loads(RENDERED.read_text(encoding="utf-8"))
    assert len(set(found.values())) > 150  # no text that hides what a row says


@functools.cache
def stage(**overrides: str) -> tuple[Mapping[str, Any], str]:
    env = require_valid(load_config(CONFIG_DIR / "stage1_rlvr.yaml", [f"{k}={v}" for k, v in overrides.items()])).env
    return env.nemo_gym.instances, env.judge_texts


SAID: Mapping[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {  # instance -> fields of a row, what is asked first
    "over_refusal_detection": ({}, [("user", "P q {R} a")]),
    "inverse_if": ({"rubric": [{"criteria": "c"}]}, [("system", "IS"), ("user", "I c")]),
    "multichallenge": ({"rubric": [{"question": "y", "pass_criteria": "no"}]}, [("system", "MS"), ("user", "M y no")]),
    "math_with_judge": ({"question": "q", "expected_answer": "5"}, [("system", "AB"), ("user", "<|Q|>\nq 5 a")]),
    "ns_tools": ({"question": "q", "expected_answer": "5"}, [("system", "AB"), ("user", "<|Q|>\nq 5 a")]),
    "jailbreak_detection": ({}, [("user", "H S1: a.\nS2: b. {x} q /no_think")]),
    "equivalence_llm_judge": ({"expected_answer": "5"}, [("user", "E q")]),
    "lc_judge": ({"expected_answer": "5"}, [("user", "LC q")]),
}


@pytest.mark.parametrize("name", SAID)
def test_texts_are_those_of_the_files(name: str, standins: Path) -> None:
    fields, expected = SAID[name]
    server = servers_of(stage()[0], judge_texts="published")[name]
    verifier = VERIFIERS[server.verifier]
    task = verifier.parse_task({**asked("q"), **fields}, server.settings)
    (question,) = advance(verifier.score(response_object([message_item("a")]), task), [])  # type: ignore[misc]
    assert isinstance(question, JudgeQuestion)
    request = chat_request(question, "m", {}, {})
    assert [(message["role"], message["content"]) for message in request["messages"]] == expected


def test_what_stands_in_code_is_read_without_running_it(standins: Path) -> None:
    servers = servers_of(stage()[0], judge_texts="published")
    lean = servers["math_formal_lean"].settings
    assert lean.refinement_prompt_template == "L {proof_attempt}\n{error_message}"
    assert (lean.silent_feedback, lean.empty_feedback) == ("silent", "empty one")
    assert servers["genrm_compare_resources_server"].settings.default_principle == "Stand-in principle."


def test_a_policy_earns_what_its_file_says(standins: Path) -> None:
    server = servers_of(stage()[0], judge_texts="published")["jailbreak_detection"]
    verifier = VERIFIERS["jailbreak_detection"]
    task = verifier.parse_task(asked("q", response_policy_mapped="engagement"), server.settings)
    answer = response_object([message_item("a")])
    for reply, reward in (("so +", 1.0), ("- or +", 0.25), ("who knows", 0.5)):
        verdict = advance(verifier.score(answer, task), [[said(reply)]])
        assert isinstance(verdict, Verdict) and verdict.reward == reward


def test_marks_of_a_template_stay_and_those_of_an_answer_do_not(standins: Path) -> None:
    server = servers_of(stage()[0], judge_texts="published")["math_with_judge"]
    verifier = VERIFIERS["math_with_judge"]
    task = verifier.parse_task(asked("q", question="<|Q|> q", expected_answer="5"), server.settings)
    answer = response_object([message_item("<|Q|> <|im_end|> \\boxed{six}")])
    (question,) = advance(verifier.score(answer, task), [])  # type: ignore[misc]
    assert isinstance(question, JudgeQuestion)
    shown = chat_request(question, "m", {}, {})["messages"][1]["content"]
    assert shown.startswith("<|Q|>\n<\u200b|Q|> q") and shown.count("<|Q|>") == 1 and "<|im_end|>" not in shown


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "another": lambda file: file.write_text("other words", encoding="utf-8"),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("side", STANDINS)
def test_a_missing_or_damaged_text_is_one_error(side: str, damage: str, standins: Path) -> None:
    file = standins / side / min(STANDINS[side])
    DAMAGES[damage](file)
    with pytest.raises(ConfigError) as caught:
        servers_of(stage()[0], judge_texts="published")
    problems = [problem for problem in caught.value.problems if str(file) in str(problem)]
    assert problems and len(caught.value.problems) == len(problems)
    assert all(f"`make side-files NAME={side}`" in problem.fix for problem in problems)
    assert {text.name.partition(".")[0] for text in judge_texts_of(*stage()) if text.problem}


def test_every_text_is_named_with_its_source_and_hash(standins: Path) -> None:
    published = judge_texts_of(*stage())
    assert len(published) >= 15 and all(text.sha256 and text.source.startswith("o/r@0000000 p/") for text in published)
    own = judge_texts_of(stage()[0], "own")
    assert [text.name for text in own] == [text.name for text in published]
    assert {text.source for text in own} == {"this project"}
    key = "env.nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare.default_principle"
    empty = {text.name: text for text in judge_texts_of(*stage(**{f"++{key}": "''"}))}
    assert empty["genrm_compare_resources_server.default_principle"].source.startswith("o/r@")  # none is given
    given = {text.name: text for text in judge_texts_of(*stage(**{f"++{key}": "Mine."}))}
    assert given["genrm_compare_resources_server.default_principle"].source == "the configuration"


def test_a_server_that_asks_in_the_words_of_another_one_is_listed_too(standins: Path) -> None:
    for words in ("published", "own"):
        found = {text.name: text.sha256 for text in judge_texts_of(stage()[0], words)}
        ours = {name.partition(".")[2]: sha256 for name, sha256 in found.items() if name.startswith("ns_tools.")}
        theirs = {
            name.partition(".")[2]: sha256 for name, sha256 in found.items() if name.startswith("math_with_judge.")
        }
        assert ours == theirs and all(ours.values()) and ours
    next((standins / "math_with_judge").iterdir()).write_text("x", encoding="utf-8")
    problems = [str(one.problem) for one in text_findings(draft("stage1_rlvr.yaml"))]
    assert problems and len(set(problems)) == len(problems)


def test_a_change_of_our_own_words_is_seen_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = load_config(CONFIG_DIR / "stage3_rlhf.yaml", ["env.judge_texts=own"]).tree
    before = judge_text_digests(tree)
    assert all(text["sha256"] for text in before.values()) and before == judge_text_digests(tree)
    monkeypatch.setattr(genrm_compare, "PRINCIPLE", "Another one.")
    (line,) = differences({"judge_texts": before}, {"judge_texts": judge_text_digests(tree)})
    assert line.startswith("judge_texts.genrm_compare_resource")


@pytest.mark.parametrize(
    "path", sorted(path for path in CONFIG_DIR.rglob("*.yaml") if path.parent.name != "tiny"), ids=str
)
def test_every_stage_but_the_tiny_ones_asks_in_the_published_words(path: Path) -> None:
    if "defaults:" in path.read_text(encoding="utf-8"):
        assert load_config(path).tree["env"]["judge_texts"] == "published"


def draft(file: str, *, scale: str = "", **env: Any) -> Any:
    """Return what the doctor reads of a launch of a configuration."""
    loaded = load_config(CONFIG_DIR / file)
    config = require_valid(loaded)
    contract = {"ENGINE": "native", "CONFIG_PATH": f"configs/{file}"}
    config = replace(config, env=replace(config.env, **env))
    environ = {"SCALE": scale}
    return SimpleNamespace(
        loaded=loaded, config=config, contract=contract, environ=environ, runs_in_checkout=True, root=ROOT
    )


def test_the_doctor_refuses_words_of_ours_and_missing_files(standins: Path, tmp_path: Path) -> None:
    assert list(text_findings(draft("stage1_rlvr.yaml"))) == []
    assert list(text_findings(draft("tiny/stage3_rlhf.yaml"))) == []
    for parent, codes in (("", ["JDG003"]), ("tiny/", [])):  # the files it lies over say it, not SCALE or its name
        mine = tmp_path / "tiny" / "mine.yaml"
        mine.parent.mkdir(exist_ok=True)
        mine.write_text(f"defaults: {CONFIG_DIR}/{parent}stage3_rlhf.yaml\n", encoding="utf-8")
        assert [one.code for one in text_findings(draft(str(mine), scale="tiny", judge_texts="own"))] == codes
    [found] = text_findings(draft("stage3_rlhf.yaml", judge_texts="own"))
    assert (found.code, found.severity) == ("JDG003", "error")
    assert "default_principle" in str(found.problem) and "`make side-files`" in found.problem.fix
    assert [one.severity for one in forced([found])] == ["error"]
    (standins / "genrm_compare" / "stage3_rlhf.yaml").write_text("x", encoding="utf-8")
    [found] = text_findings(draft("stage3_rlhf.yaml"))
    assert (found.code, found.severity) == ("JDG004", "error")
    assert "was changed" in str(found.problem) and "NAME=genrm_compare" in found.problem.fix


def test_make_config_and_the_lock_say_which_text_is_asked(standins: Path) -> None:
    loaded = load_config(CONFIG_DIR / "stage3_rlhf.yaml")
    digest = hashlib.sha256(b"Stand-in principle.").hexdigest()
    lines = "\n".join(render(with_defaults(loaded)))
    name = "genrm_compare_resources_server.default_principle"
    assert f"#   {name}: {digest[:12]}  o/r@0000000 p/stage3_rlhf.yaml env.nemo_gym." in lines
    locked = judge_text_digests(loaded.tree)
    assert locked[name]["sha256"] == digest and locked[name]["source"].startswith("o/r@0000000 p/stage3_rlhf.yaml")
    other = judge_text_digests(load_config(CONFIG_DIR / "stage3_rlhf.yaml", ["env.judge_texts=own"]).tree)
    assert len(differences({"judge_texts": locked}, {"judge_texts": other})) == 2


def test_every_pinned_text_is_read_by_somebody() -> None:
    """What `make data` brings for judges is what they are asked with: no file too many."""
    pinned = texts.pinned()
    env = require_valid(load_config(CONFIG_DIR / "stage1_rlvr.yaml")).env
    servers = servers_of(env.nemo_gym.instances).values()
    read = {(text.side, text.file) for server in servers for text in texts_of(server).values()}
    assert read == {(side, file) for side in pinned if side != "workplace_assistant" for file in pinned[side]["files"]}


BLENDS = {
    stage.blend: config_path(stage, "prod", platform)
    for platform in PLATFORMS
    for stage in load_stages()
    if platform in stage.configs["prod"]
}


@pytest.mark.parametrize(("blend", "path"), BLENDS.items())
def test_a_blend_comes_with_the_files_that_its_stage_reads(blend: str, path: Path) -> None:
    instances = require_valid(load_config(path)).env.nemo_gym.instances
    servers = servers_of(instances)
    read = {text.side for name in instances.keys() & servers.keys() for text in texts_of(servers[name]).values()}
    fetched = ROOT / "data" / "side_files"
    read |= {file.path.name for file in named_files_of(instances) if file.path.is_relative_to(fetched)}
    assert read == {side for side, entry in texts.pinned().items() if blend in entry["blends"]}


FPATH = "env.nemo_gym.equivalence_llm_judge.resources_servers.equivalence_llm_judge.judge_prompt_template_fpath"


def test_a_prompt_of_the_users_is_read_recorded_and_compared(standins: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Mine: {question}", encoding="utf-8")
    instances, words = stage(**{f"++{FPATH}": str(file)})
    name = "equivalence_llm_judge.judge_prompt_template_fpath"
    verifier, server = (
        VERIFIERS["equivalence_llm_judge"],
        servers_of(instances, judge_texts=words)["equivalence_llm_judge"],
    )
    task = verifier.parse_task({**asked("q"), "expected_answer": "5"}, server.settings)
    assert task.template == "Mine: {question}"
    assert "equivalence_llm_judge.judge_prompt" not in [text.name for text in judge_texts_of(instances, words)]
    loaded = load_config(CONFIG_DIR / "stage1_rlvr.yaml", [f"++{FPATH}={file}"])
    digest = hashlib.sha256(b"Mine: {question}").hexdigest()
    assert named_file_digests(loaded.tree, tmp_path)[name] == {"path": str(file), "sha256": digest}
    assert f"#   {name}: {digest[:12]}  {file}" in "\n".join(render(with_defaults(loaded)))
    file.write_text("Another: {question}", encoding="utf-8")
    (line,) = differences(
        {name: {"sha256": digest}}, {name: {"sha256": named_file_digests(loaded.tree, tmp_path)[name]["sha256"]}}
    )
    assert line.startswith(f"{name}.sha256: was {digest}")


@pytest.mark.parametrize(
    "value", ["/no/such.txt", "no/such.txt", "/elsewhere/lc_judge.txt", "prompt_templates/none.txt"]
)
def test_a_prompt_that_is_not_there_is_said_and_no_other_is_taken(value: str, standins: Path) -> None:
    config = load_config(CONFIG_DIR / "stage1_rlvr.yaml", [f"++{FPATH}={value}"])
    case = draft("stage1_rlvr.yaml", nemo_gym=require_valid(config).env.nemo_gym)
    (finding,) = text_findings(case)
    assert (finding.code, finding.severity) == ("JDG005", "error")
    assert value in str(finding.problem) and str(named_file(value)) in str(finding.problem)
    server = servers_of(case.config.env.nemo_gym.instances, judge_texts="published")["equivalence_llm_judge"]
    with pytest.raises(ValueError, match="judge_prompt_template_fpath"):
        VERIFIERS["equivalence_llm_judge"].parse_task({**asked("q"), "expected_answer": "5"}, server.settings)


def test_a_relative_file_lies_in_the_checkout_and_must_be_tracked(
    standins: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_file("configs/a.txt") == ROOT / "configs" / "a.txt" and named_file("/a.txt") == Path("/a.txt")
    config = load_config(CONFIG_DIR / "stage1_rlvr.yaml", [f"++{FPATH}=README.md"])
    case = draft("stage1_rlvr.yaml", nemo_gym=require_valid(config).env.nemo_gym)
    case.runs_in_checkout = False
    assert list(text_findings(case)) == []
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "README.md").write_text("not added", encoding="utf-8")
    case.root = tmp_path
    (finding,) = text_findings(case)
    assert finding.code == "JDG005" and "git add it" in finding.problem.fix
    subprocess.run(["git", "-C", str(tmp_path), "add", "README.md"], check=True)
    assert list(text_findings(case)) == []


def test_every_setting_that_names_a_file_is_declared_as_one() -> None:
    for name, verifier in VERIFIERS.items():
        nodes = settings_of(resources_types()[name])
        for key, node in ((key, nodes[key]) for key in keys_of(verifier.settings)):
            is_file = any(
                word in f"{key} {node['description']}" for word in ("path", "file with", "file,", "directory")
            )
            if is_file and not node.get("x-native") and "model" not in key:
                assert verifier.files(replace(verifier.settings(), **{key: "x"})) == {key: "x"}, (name, key)


LEAN = {
    **asked("Prove it."),
    "agent_ref": {"type": "responses_api_agents", "name": "math_formal_lean_refinement_agent"},
    "header": "import Mathlib\n",
    "formal_statement": "theorem t (n : Nat) : n + 0 = n := by\n",
}


@pytest.mark.parametrize(
    ("file", "words", "is_refused"),
    [
        ("stage1_rlvr.yaml", "published", False),
        ("stage2_swe1.yaml", "published", True),
        ("stage2_swe1.yaml", "own", False),
    ],
)
def test_a_server_that_no_configuration_has_uses_no_words_of_ours_in_secret(
    file: str, words: str, is_refused: bool
) -> None:
    """Without a judge nothing else refuses it: the prompt that asks to correct a proof would be ours."""
    config = require_valid(load_config(CONFIG_DIR / file, [f"env.judge_texts={words}"]))
    instances = config.env.nemo_gym.instances
    servers = servers_of(instances)
    servers = without_own_words(servers, instances) if words == "published" else servers
    agents = agents_of(instances, servers)
    patterns = FlagPatterns(invalid_tool_call=(), thinking_tags=())
    environments = Environments(None, servers=servers, agents=agents, patterns=patterns)  # type: ignore[arg-type]
    found = environments.check_row(LEAN)
    environments.close()
    assert bool(found) is is_refused
    assert not found or "environments/math_formal_lean.yaml" in found[0]
