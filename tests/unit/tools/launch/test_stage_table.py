"""`make stages`: the README's table, and every configuration's sizes beside numbers worked out by hand."""

from pathlib import Path

import pytest

from recipes.config.load import load_stages
from tools.dev.stage_table import BEGIN, END, SIZES, main, size_rows

COLUMNS = {name: number for number, name in enumerate(SIZES)}


@pytest.fixture(scope="module")
def table() -> list[tuple[str, ...]]:
    """The sizes of every configuration."""
    return size_rows(load_stages())


def test_every_configuration_has_one_row(table):
    assert len(table) == 27  # five families: three scales, and production on two platforms; Nano, and one at scale tiny
    assert len({row[:3] for row in table}) == len(table)


@pytest.mark.parametrize(
    ("where", "values"),
    [
        # 176 - 144 = 32 nodes train: 256 GPUs / (TP 4 x CP 8) = 8 ranks; 4096 / 8 = 512 rollouts, a micro-batch each
        (("1.1, 1.2, 1.3", "prod", "h100"),
         {"nodes (train + generation + judges)": "183 (32 + 144 + 7)", "GPUs": "1,464", "data-parallel": "8",
          "engines x GPUs": "144 x 8", "rollouts/step": "4,096", "micro-batches/rank": "512",
          "tokens/step": "268,435,456", "length multiple": "64", "cohort": "16"}),
        # 16 nodes train: 128 GPUs / (TP 8 x CP 16) = 1 rank; 512 x 196608 tokens
        (("2.2", "small", "h100"),
         {"nodes (train + generation + judges)": "20 (16 + 4 + 0)", "GPUs": "160", "data-parallel": "1",
          "engines x GPUs": "4 x 8", "rollouts/step": "512", "micro-batches/rank": "512",
          "tokens/step": "100,663,296", "length multiple": "256", "cohort": "0"}),
        # 32 nodes train: 256 / (TP 4 x CP 4) = 16 ranks; 32 nodes / TP 4 = 64 engines
        (("3", "prod", "b200"),
         {"nodes (train + generation + judges)": "72 (32 + 32 + 8)", "data-parallel": "16",
          "engines x GPUs": "64 x 4", "micro-batches/rank": "128", "length multiple": "32", "cohort": "16"}),
        # 128 rollouts of 256 tokens, 16 of them in a micro-batch of 4096 tokens
        (("1.1, 1.2, 1.3", "tiny", "cpu"),
         {"GPUs": "2", "rollouts/step": "128", "micro-batches/rank": "8", "tokens/step": "32,768", "cohort": "0"}),
    ],
)  # fmt: skip
def test_sizes_follow_from_the_configuration(table, where: tuple[str, str, str], values: dict[str, str]):
    (row,) = [row for row in table if row[:3] == where]
    assert {name: row[COLUMNS[name]] for name in values} == values


def test_it_prints_both_tables_and_writes_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert main(["--write", str(readme)]) == 0
    printed = capsys.readouterr().out
    assert "| tokens/step |" in printed
    assert f"updated {readme}" in printed
    first, last = (
        readme.read_text(encoding="utf-8").split("\n")[0],
        readme.read_text(encoding="utf-8").rstrip().split("\n")[-1],
    )
    assert (first, last) == ("before", "after")
    table = readme.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert table in printed
    assert "tokens/step" not in table
    assert main(["--write", str(readme)]) == 0
    assert "updated" not in capsys.readouterr().out  # it is current
