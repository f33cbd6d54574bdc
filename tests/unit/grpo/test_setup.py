"""What is refused before policy and engines are started."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.config.load import load_config, require_valid
from recipes.config.tree import AsyncGrpoConfig
from recipes.errors import CheckpointError, ConfigError, DataError
from recipes.generation.serving.requests import AtPush
from recipes.grpo.checkpoint import LedgerEntry, SavedState, window_problems
from recipes.grpo.data import CollectorState, DataIdentity, DrawnPrompt, PromptDataset, PromptStream
from recipes.grpo.setup import _at_push, _num_steps, _open_data, _validation, on_same_data
from recipes.tokens import pack_rollouts
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn

G, LENGTH = 2, 16  # rollouts of a group, tokens of its longest sequence


@functools.cache
def usual() -> AsyncGrpoConfig:
    path = Path(__file__).resolve().parents[3] / "configs" / "tiny" / "stage1_rlvr.yaml"
    return require_valid(load_config(path, ["policy.model_name=m"])).grpo.async_grpo


def async_grpo(age: int, **changes: bool) -> AsyncGrpoConfig:
    return replace(usual(), max_trajectory_age_steps=age, **changes)


def config(
    *, prompts: int, age: int = 1, path: Path | None = None, enabled: bool = True, size: int = G, longest: int = LENGTH
) -> Any:
    return SimpleNamespace(
        policy=SimpleNamespace(max_total_sequence_length=longest),
        grpo=SimpleNamespace(
            num_prompts_per_step=prompts,
            num_generations_per_prompt=size,
            max_num_epochs=2,
            max_num_steps=1,
            seed=0,
            async_grpo=async_grpo(age, enabled=enabled),
        ),
        data=SimpleNamespace(
            shuffle=False, train=SimpleNamespace(data_path=str(path)), validation=SimpleNamespace(data_path=None)
        ),
    )


def test_data_that_gives_no_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"responses_create_params": {"input": "question"}, "agent_ref": {"name": "a"}}
    path.write_text(f"{json.dumps(row)}\n" * 3, encoding="utf-8")
    environments: Any = SimpleNamespace(check_row=lambda _row: [])
    with pytest.raises(DataError, match=r"train\.jsonl: got 6 prompts \(3 rows, 2 times\), expected .* is 7; add rows"):
        _open_data(config(prompts=7, path=path), environments)
    stream, validation = _open_data(config(prompts=6, path=path), environments)
    assert (stream.num_prompts, validation) == (6, None)


def test_one_answer_alone_cannot_be_validated_where_answers_are_compared() -> None:
    generation = SimpleNamespace(val_temperature=1.0, val_top_p=1.0, max_new_tokens=8)
    grpo = SimpleNamespace(val_num_generations_per_prompt=1, val_greedy=False)
    cfg: Any = SimpleNamespace(
        policy=SimpleNamespace(generation=generation), grpo=grpo, deadlines=SimpleNamespace(progress=1.0)
    )
    rows: Any = [{"agent_ref": {"name": "single"}}, {"agent_ref": {"name": "compared"}}]
    environments: Any = SimpleNamespace(compares=lambda row: row["agent_ref"]["name"] == "compared")
    with pytest.raises(ConfigError, match=r"val_num_generations_per_prompt: is 1, .* set it to 2 or more"):
        _validation(cfg, rows, environments)
    assert _validation(cfg, rows[:1], environments) is not None
    grpo.val_num_generations_per_prompt = 2
    assert _validation(cfg, rows, environments) is not None


def group(row: int, *, target: int, version: int) -> Group:
    """Return a group of G rollouts: one failed, another has a long branch beside its short main sequence."""
    ref = PromptRef(epoch=0, row_index=row, prompt_id="ab" * 8)
    main, branch = (
        Turn(prompt_token_ids=(1,) * length, token_ids=(), logprobs=(), versions=(), finish_reason="stop")
        for length in (3, LENGTH)
    )
    failed = Rollout(turns=(), status=RolloutStatus.ABORTED, reason="lost", reward=None)
    whole = Rollout(turns=(main,), status=RolloutStatus.COMPLETED, reason="", reward=1.0, branches=((branch,),))
    headers, _ = pack_rollouts([failed, whole])
    return Group(prompt=ref, agent="a", prompt_text="", target_step=target, version=version, rollouts=headers)


def saved(in_flight: tuple[tuple[int, int], ...], *finished: Group) -> SavedState:
    ref = PromptRef(epoch=0, row_index=0, prompt_id="ab" * 8)
    drawn = tuple(DrawnPrompt(position=position, target_step=target, prompt=ref) for position, target in in_flight)
    collector = CollectorState(position=20, in_flight=drawn, finished=finished, failed=())
    data = DataIdentity(sha256="", num_rows=0, shuffle=False, seed=0)
    return SavedState(step=4, data=data, collector=collector, ledger=(), metrics={})


def problems(state: SavedState, *, prompts: int, age: int, **changes: int) -> list[str]:
    changed = config(prompts=prompts, age=age, **changes)
    return [str(problem) for problem in window_problems(state, changed, Path("step_000004"))]


def test_a_resume_needs_the_window_it_was_saved_with() -> None:
    state = saved(((11, 4), (12, 5), (13, 5)), group(10, target=4, version=3))
    assert problems(state, prompts=2, age=1) == problems(state, prompts=8, age=2) == []
    assert problems(state, prompts=1, age=1) == [], "a prompt in flight beyond those of its step finds another"
    full = saved(((12, 5),), group(10, target=4, version=3), group(11, target=4, version=3))
    (prompts,) = problems(full, prompts=1, age=1)
    assert prompts.startswith("grpo.num_prompts_per_step: got 1, expected at least 2: it was larger when step_000004")
    assert prompts.endswith("restore it, or start a new run with MODEL_PATH=step_000004/hf")
    (age,) = problems(state, prompts=2, age=0)
    assert age.startswith("grpo.async_grpo.max_trajectory_age_steps: got 0, expected at least 1")
    assert len(problems(full, prompts=1, age=0)) == 2


def test_a_resume_that_no_longer_generates_ahead_says_which_key_does_that() -> None:
    state = saved(((12, 5),), group(10, target=4, version=3))
    [problem] = map(str, window_problems(state, config(prompts=2, enabled=False), Path("step_000004")))
    assert problem.startswith("grpo.async_grpo.enabled: got false, so that the age limit is 0, expected at least 1")


@pytest.mark.parametrize("size", [G - 1, 2 * G])
def test_a_resume_needs_groups_of_the_size_it_was_saved_with(size: int) -> None:
    """Else a step would have another number of rollouts, and so of optimizer steps."""
    state = saved(((12, 5),), group(10, target=4, version=3))
    [problem] = problems(state, prompts=2, age=1, size=size)
    assert problem.startswith(f"grpo.num_generations_per_prompt: got {size}, expected {G}, as when step_000004 was")
    assert problems(saved(((12, 5),)), prompts=2, age=1, size=size) == [], "what is in flight is sampled anew"


def test_a_resume_needs_room_for_the_longest_saved_sequence() -> None:
    state = saved((), group(10, target=4, version=3))
    [problem] = problems(state, prompts=2, age=1, longest=LENGTH - 1)
    assert problem.startswith(f"policy.max_total_sequence_length: got {LENGTH - 1}, expected at least {LENGTH}: it was")
    assert problems(saved(((12, 5),)), prompts=2, age=1, longest=1) == []


def test_running_requests_keep_their_caches_unless_the_configuration_says_otherwise() -> None:
    assert _at_push(async_grpo(1)) is AtPush.KEEP
    assert _at_push(async_grpo(1, recompute_kv_cache_after_weight_updates=True)) is AtPush.RECOMPUTE
    assert _at_push(async_grpo(1, in_flight_weight_updates=False)) is AtPush.DRAIN
    both = async_grpo(1, in_flight_weight_updates=False, recompute_kv_cache_after_weight_updates=True)
    assert _at_push(both) is AtPush.DRAIN


def test_a_group_from_weights_that_are_too_old_now_needs_their_age() -> None:
    state = saved((), group(10, target=4, version=2))
    assert len(problems(state, prompts=1, age=1)) == 1
    assert problems(state, prompts=1, age=2) == []


def stream_of(path: Path, names: str, *, shuffle: bool = False, seed: int = 0, epochs: int = 1) -> PromptStream:
    """Return the stream over a file with one row per letter."""
    rows = [{"responses_create_params": {"input": name}, "agent_ref": {"name": "a"}} for name in names]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return PromptStream(PromptDataset(path), num_epochs=epochs, shuffle=shuffle, seed=seed)


def saved_on(stream: PromptStream, *, trained: int, in_flight: int) -> SavedState:
    """Return a state that has trained the first `trained` prompts and has `in_flight` more in flight."""
    refs = [drawn[0] for position in range(trained + in_flight) if (drawn := stream.draw(position))]
    ledger = tuple(LedgerEntry(key=ref.key, step=1 + index // 2) for index, ref in enumerate(refs[:trained]))
    flying = tuple(
        DrawnPrompt(position=trained + index, target_step=2, prompt=ref) for index, ref in enumerate(refs[trained:])
    )
    collector = CollectorState(position=trained + in_flight, in_flight=flying, finished=(), failed=())
    return SavedState(step=trained // 2, data=stream.identity, collector=collector, ledger=ledger, metrics={})


def text_at(stream: PromptStream, position: int) -> str:
    drawn = stream.draw(position)
    assert drawn is not None
    return str(drawn[1]["responses_create_params"]["input"])


def left(state: SavedState, stream: PromptStream) -> str:
    """Return the rows that a run continued from `state` still draws."""
    ahead = [position for position in range(stream.num_prompts) if position not in state.collector.skipped]
    ahead = [position for position in ahead if position >= state.collector.position]
    return "".join(text_at(stream, position) for position in ahead)


def test_a_resume_on_the_same_data_goes_on_where_it_was(tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "train.jsonl", "abcdefgh")
    state = saved_on(stream, trained=4, in_flight=2)
    assert on_same_data(state, stream, "refuse", tmp_path) == state
    assert left(state, stream) == "gh"


@pytest.mark.parametrize(
    ("names", "options", "named"),
    [
        ("abcdefgX", {}, ["sha256"]),
        ("bcdefgha", {}, ["sha256"]),
        ("abcdefghi", {}, ["sha256", "rows"]),
        ("abcdefgh", {"shuffle": True}, ["data.shuffle"]),
        ("abcdefgh", {"seed": 7}, ["grpo.seed"]),
    ],
)
def test_a_resume_on_other_data_is_refused_and_says_what_differs(
    tmp_path: Path, names: str, options: dict[str, Any], named: list[str]
) -> None:
    state = saved_on(stream_of(tmp_path / "train.jsonl", "abcdefgh"), trained=4, in_flight=2)
    stream = stream_of(tmp_path / "train.jsonl", names, **options)
    with pytest.raises(CheckpointError) as caught:
        on_same_data(state, stream, "refuse", tmp_path / "step_000002")
    assert [problem.where.split(": ")[-1] for problem in caught.value.problems] == named
    assert all("step_000002 was saved" in str(problem) for problem in caught.value.problems)
    assert all("data.on_change" in problem.fix for problem in caught.value.problems)


def test_restart_draws_every_row_of_the_new_data(tmp_path: Path) -> None:
    state = saved_on(stream_of(tmp_path / "train.jsonl", "abcdefgh"), trained=4, in_flight=2)
    stream = stream_of(tmp_path / "train.jsonl", "gabxyz")
    got = on_same_data(state, stream, "restart", tmp_path)
    assert left(got, stream) == "gabxyz"
    assert got.data == stream.identity
    assert got.ledger == state.ledger


def test_keep_ledger_draws_what_was_not_trained_wherever_it_is_now(tmp_path: Path) -> None:
    state = saved_on(stream_of(tmp_path / "train.jsonl", "abcdefgh"), trained=4, in_flight=2)
    stream = stream_of(tmp_path / "train.jsonl", "hxdaec")  # a, c and d are trained; e was in flight
    got = on_same_data(state, stream, "keep_ledger", tmp_path)
    assert left(got, stream) == "hxe"
    assert _num_steps(SimpleNamespace(max_num_steps=99, num_prompts_per_step=2), stream, got) == 3  # type: ignore[arg-type]


def test_keep_ledger_counts_how_often_a_prompt_was_trained(tmp_path: Path) -> None:
    state = saved_on(stream_of(tmp_path / "train.jsonl", "aab"), trained=2, in_flight=0)
    stream = stream_of(tmp_path / "train.jsonl", "abaa", epochs=2)
    assert left(on_same_data(state, stream, "keep_ledger", tmp_path), stream) == "baabaa"


def test_a_prompt_that_is_not_where_it_was_is_named(tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "train.jsonl", "abcdefgh")
    state = saved_on(stream, trained=4, in_flight=2)
    moved = replace(state.collector.in_flight[0], position=6)
    state = replace(
        state, collector=replace(state.collector, in_flight=(moved,), finished=(group(7, target=2, version=1),))
    )
    with pytest.raises(CheckpointError) as caught:
        on_same_data(state, stream, "refuse", tmp_path)
    assert [problem.where.split(": ")[-1] for problem in caught.value.problems] == [
        "row 5 of pass 1",
        "row 8 of pass 1",
    ]
