"""The tiny tasks with programs, in a real sandbox: demonstrations earn what they should, in the ids of a rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from small_root import require

from recipes.config.load import load_config
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.types import Rollout, RolloutStatus
from tests.scripted import Scripted
from tools.tiny.model import build_tokenizer
from tools.tiny.program_tasks import PROGRAMS, REMAINDERS
from tools.tiny.sft import IGNORED, Demonstration, _ids_and_labels, wide_settings
from tools.tiny.tasks import Reply, TinyProblem, TinyTask, make_row

pytestmark = [pytest.mark.functional, pytest.mark.timeout(120)]

WIDE = Path(__file__).resolve().parents[2] / "configs" / "tiny" / "wide.yaml"


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    require("bwrap", "prlimit", "setpriv")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(wide_settings(seed=0).more_words).save_pretrained(directory)
    return ChatCodec(directory)


@pytest.fixture(scope="module")
def environments(codec: ChatCodec) -> Iterator[Environments]:
    """Return the environments of the wide stage."""
    loaded = load_config(WIDE, ())
    assert loaded.repaired is not None
    made = Environments.from_config(loaded.repaired.env, codec)
    yield made
    made.close()


async def run(
    environments: Environments, codec: ChatCodec, task: TinyTask, problem: TinyProblem, reply: Reply
) -> Rollout:
    row = json.loads(json.dumps(make_row(task, problem)))
    assert environments.check_row(row) == []
    says = (reply,) if isinstance(reply, str) else reply[::2]
    policy = Scripted(codec, [f"{text}<|im_end|>" for text in says])
    rollout = await environments.run(row, policy, max_tokens=64)
    assert rollout.status == RolloutStatus.COMPLETED, rollout.reason
    return rollout


@pytest.mark.parametrize("task", [PROGRAMS, REMAINDERS], ids=lambda task: task.agent)
async def test_right_demonstrations_earn_everything_and_wrong_ones_nothing(
    environments: Environments, codec: ChatCodec, task: TinyTask
) -> None:
    rng, tokenizer = Random(3), build_tokenizer(wide_settings(seed=0).more_words)
    for _ in range(3):
        problem = task.draw(rng)
        right, wrong = task.right(problem), task.wrong(problem, rng)
        rollout = await run(environments, codec, task, problem, right)
        assert rollout.reward == 1.0, rollout.reason
        assert (await run(environments, codec, task, problem, wrong)).reward == 0.0
        ids, labels = _ids_and_labels(tokenizer, Demonstration(problem, right))
        assert [token for turn in rollout.turns for token in (*turn.prompt_token_ids, *turn.token_ids)] == ids
        assert [token for turn in rollout.turns for token in turn.token_ids] == [x for x in labels if x != IGNORED]
        assert len(ids) <= 128
