"""The stage table of the README and the sizes that `make stages` prints, from stages.yaml and the configurations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.config.keys.derive import derive
from recipes.config.load import Stage, config_path, load_config, load_stages, require_valid
from tools.command_line import exit_status

BEGIN, END = "<!-- stage table: begin (make stages) -->", "<!-- stage table: end -->"
HEADER = (
    *("stage", "name", "data", "H100 nodes (train + generation + judges)", "B200 nodes", "small-scale nodes"),
    *("context", "rollouts per step", "starts from"),
)
SIZES = (
    *("stage", "scale", "platform", "nodes (train + generation + judges)", "engines x GPUs", "GPUs", "data-parallel"),
    *("rollouts/step", "micro-batches/rank", "tokens/step", "length multiple", "cohort"),
)  # micro-batches and tokens when every rollout is as long as allowed


def rows(stages: Sequence[Stage]) -> list[tuple[str, ...]]:
    """Return one row per stage with its sizes; stages that share their files share the work."""
    table: list[tuple[str, ...]] = []
    seen: dict[str, tuple[str, ...]] = {}
    for stage in stages:
        parent = stage.after or "the SFT checkpoint"
        key = str(stage.configs)
        seen[key] = seen.get(key) or _sizes(stage)
        table.append((stage.id, stage.name, f"data/{stage.blend}", *seen[key], parent))
    return table


def _sizes(stage: Stage) -> tuple[str, ...]:
    """Return nodes on H100, on B200, at small scale, then context and rollouts; empty where there is no file."""
    nodes = []
    policy = sizes = None
    for scale, platform in (("small", "h100"), ("prod", "b200"), ("prod", "h100")):
        if platform not in stage.configs.get(scale, {}):
            nodes.append("")
            continue
        config = require_valid(load_config(config_path(stage, scale, platform)))
        sizes, policy = derive(config), config.policy
        parts = (sizes.num_train_nodes, sizes.num_generation_nodes, sizes.num_judge_nodes)
        split = " + ".join(map(str, parts))
        if sizes.is_one_node:
            split = f"{sizes.train_gpus} + {sizes.generation_gpus} GPUs"
        nodes.append(f"{sizes.num_nodes} ({split})")
    if policy is None or sizes is None:
        return ("at scale tiny alone" if stage.configs.get("tiny") else "not built yet", "", "", "", "")
    return (*reversed(nodes), f"{policy.max_total_sequence_length:,}", f"{sizes.samples_per_step:,}")


def size_rows(stages: Sequence[Stage]) -> list[tuple[str, ...]]:
    """Return one row per configuration of the table with what follows from it."""
    users: dict[Path, list[str]] = {}
    names = {}
    for stage in stages:
        for scale, platforms in stage.configs.items():
            for platform in platforms:
                path = config_path(stage, scale, platform)
                users.setdefault(path, []).append(stage.id.removeprefix("stage"))
                names[path] = (scale, platform)
    table = []
    for path, ids in users.items():
        sizes = derive(require_valid(load_config(path)))
        parts = (sizes.num_train_nodes, sizes.num_generation_nodes, sizes.num_judge_nodes)
        numbers = (
            *(sizes.total_gpus, sizes.data_parallel_size, sizes.samples_per_step, sizes.max_train_microbatches),
            *(sizes.max_tokens_per_step, sizes.length_multiple, sizes.cohort_size),
        )
        table.append(
            (
                *(", ".join(ids), *names[path]),
                f"{sizes.num_nodes} ({' + '.join(str(part) for part in parts)})",
                f"{sizes.num_engines} x {sizes.gpus_per_engine}",
                *(f"{number:,}" for number in numbers),
            )
        )
    return table


def markdown(table: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> str:
    """Return the table with aligned columns."""
    widths = [max(len(row[column]) for row in [header, *table]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *table]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def replaced(readme: str, table: str) -> str:
    """Return the README with the table between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables; put the first into a file that has its markers."""
    parser = argparse.ArgumentParser(description="Print the stage table and the sizes of every configuration.")
    parser.add_argument("--write", type=Path, metavar="README", help="put it between the markers of this file")
    args = parser.parse_args(argv)
    stages = load_stages()
    table, sizes = markdown(rows(stages)), markdown(size_rows(stages), SIZES)
    print(f"{table}\n\n{sizes}")
    if args.write and args.write.read_text(encoding="utf-8") != (
        text := replaced(args.write.read_text(encoding="utf-8"), table)
    ):
        args.write.write_text(text, encoding="utf-8")
        print(f"\nupdated {args.write}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
