"""The modules that are mutated, the tests that must notice, and the mutants that no test can notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """A mutant that behaves like the original: one line and what it becomes."""

    module: str
    before: str
    after: str
    reason: str


SEQUENCES, RAGGED = "tests/unit/grpo/test_sequences.py", "tests/unit/policy/test_ragged.py"
GOLDEN = "tests/unit/test_golden.py"
TARGETS: dict[str, tuple[str, ...]] = {
    "recipes/grpo/loss.py": (
        GOLDEN,
        "tests/unit/grpo/test_loss.py",
        "tests/unit/grpo/test_loss_options.py",
        SEQUENCES,
    ),
    "recipes/grpo/advantage.py": (
        GOLDEN,
        "tests/unit/grpo/test_advantage.py",
        "tests/unit/grpo/test_advantage_options.py",
        SEQUENCES,
    ),
    "recipes/grpo/batch.py": (GOLDEN, "tests/unit/grpo/test_batch.py", "tests/unit/grpo/test_effects.py", SEQUENCES),
    "recipes/grpo/buffer.py": ("tests/unit/grpo/test_buffer.py", "tests/unit/grpo/test_checkpoint.py"),
    "recipes/environments/verifiers/mcqa.py": (
        "tests/unit/environments/verifiers/test_mcqa.py",
        "tests/unit/environments/verifiers/test_golden_cases.py",
    ),
    "recipes/policy/packing.py": ("tests/unit/policy/test_packing.py",),
    "recipes/policy/shards.py": (
        "tests/unit/policy/test_shards.py",
        "tests/unit/grpo/test_batch.py",
        SEQUENCES,
        RAGGED,
    ),
    "tools/data/split.py": ("tests/unit/tools/data/test_split.py", "tests/unit/tools/data/lineage/test_record.py"),
}

PACKING, SHARDS = "recipes/policy/packing.py", "recipes/policy/shards.py"
_ASSERTION = 'assert position is not None, "{}"'
_ZEROS = "result_BS = torch.zeros(shape, {})"

EQUIVALENT = (
    *(
        Equivalent(
            module=PACKING,
            before=_ASSERTION.format("the second smallest was checked to fit"),
            after=_ASSERTION.format(text),
            reason="the text of an assertion that never fails",
        )
        for text in ("XXthe second smallest was checked to fitXX", "THE SECOND SMALLEST WAS CHECKED TO FIT")
    ),
    *(
        Equivalent(
            module=SHARDS,
            before=_ZEROS.format("dtype=torch.float32"),
            after=_ZEROS.format(argument),
            reason="float32 is torch's default",
        )
        for argument in ("dtype=None", "")
    ),
)
