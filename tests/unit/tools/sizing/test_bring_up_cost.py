"""What is concluded from measured bring-up figures; the measuring itself is in tests/functional/test_bringup.py."""

from __future__ import annotations

import pytest

from tools.bench.bring_up_cost import Assumed, Figures, parse, start_seconds, table


def figures(num_nodes: int) -> Figures:
    return Figures(
        num_nodes=num_nodes,
        register_seconds=0.5,
        barrier_seconds=2.0,
        poll_seconds=0.001,
        reply_bytes=25000,
        barrier_log_bytes=6600,
        checks_per_second=91.0,
        loads_per_second=182.0,
    )


def test_the_start_adds_up_and_the_image_is_read_by_all_nodes():
    assumed = Assumed(slurm_seconds=4.0, image_gb=3.0, file_system_gb_per_second=50.0, ray_seconds=10.0)
    assert start_seconds(figures(100), assumed) == pytest.approx(4 + 100 * 3 / 50 + 10 + 0.5 + 2)


def test_the_table_names_what_is_assumed():
    text = table([figures(64), figures(183)], Assumed())
    rows = {line[:36].strip(): line[36:].split() for line in text.splitlines()[:13]}
    assert rows["nodes"] == ["64", "183"]
    assert rows["calls to slurmctld"] == ["13", "13"]
    assert rows["... files"] == ["1,216", "3,477"]  # 19 per node
    assert "Assumed, for the last line: slurm_seconds 4," in text


def test_sizes_default_to_those_of_the_recipe():
    assert parse([]).nodes == [64, 183]
    assert parse(["--nodes", "20", "--image-gb", "12"]).image_gb == 12.0
