"""Cluster profiles: what each field becomes, inheritance, who wins, and one line for everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from recipes.errors import Problem
from tools.draft.launch import read_launch
from tools.draft.profiles import (
    FIELDS,
    FILLED_BY_PROFILE,
    SETTINGS,
    VARIABLES,
    WITHOUT_EFFECT,
    read_profile,
    with_variables,
)
from tools.launch.command import gres_words

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "configs" / "env.example.toml"


def profile(tmp_path: Path, text: str, name: str = "mine", **environ: str):
    (tmp_path / "env.toml").write_text(text, encoding="utf-8")
    return read_profile({"CLUSTER": name, **environ}, tmp_path)


def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "mine") -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [str(problem) for problem in profile(tmp_path, text, name).problems]


def test_without_cluster_no_file_is_read(tmp_path):
    (tmp_path / "env.toml").write_text("this is no TOML", encoding="utf-8")
    found = read_profile({"ENV_TOML": "env.toml"}, tmp_path)
    assert (found.variables, found.job_environment, found.problems) == ({}, {}, [])
    assert found.over({"A": "1", "B": ""}) == {"A": "1"}


def test_every_field_becomes_what_it_means(tmp_path):
    found = profile(
        tmp_path,
        """
        [wandb]
        project = "p"
        entity = "team"
        [mine]
        executor = "slurm"
        account = "lab"
        partition = "batch"
        nodes = 190
        spare_nodes = 2
        time = "08:00:00"
        container_image = "/i/train.sqsh"
        runtime = "apptainer"
        persistent_cache = "/cache"
        sif_dir = "/sif"
        mounts = ["/a:/b", "/c"]
        startup_commands = []
        [mine.sandbox]
        container = "/i/sandbox.sqsh"
        port = 6000
        command = "/serve.sh"
        [mine.env_vars]
        A = "one two"
        B = 2
        """,
    )
    assert found.problems == []
    assert found.notes == []
    assert found.variables == {
        "LAUNCHER": "slurm",
        "SLURM_ACCOUNT": "lab",
        "SLURM_PARTITION": "batch",
        "SBATCH_NUM_NODES": "190",
        "SPARE_NODES": "2",
        "SLURM_TIME_LIMIT": "08:00:00",
        "CONTAINER": "/i/train.sqsh",
        "CONTAINER_RUNTIME": "apptainer",
        "PERSISTENT_CACHE": "/cache",
        "SIF_DIR": "/sif",
        "EXTRA_MOUNTS": "/a:/b,/c",
        "SANDBOX_CONTAINER": "/i/sandbox.sqsh",
        "SANDBOX_COMMAND": "/serve.sh",
        "WANDB_PROJ": "p",
    }
    assert found.job_environment == {"A": "one two", "B": "2", "WANDB_ENTITY": "team"}


def test_the_environment_wins_and_empty_counts_as_not_set(tmp_path):
    environ = {"SLURM_ACCOUNT": "other", "CONTAINER": "", "A": "mine"}
    text = '[mine]\naccount = "lab"\ncontainer = "c"\ngpus_per_node = 4\nenv_vars = {A = "theirs", B = "theirs"}\n'
    found = profile(tmp_path, text, **environ)
    filled = found.over(environ)
    assert filled["SLURM_ACCOUNT"] == "other"
    assert filled["CONTAINER"] == "c"
    assert found.overrides == ["cluster.gpus_per_node=4"]
    assert (filled["A"], filled["B"]) == ("mine", "theirs")
    assert found.job_variables(environ) == {"B": "theirs"}  # A is inherited by the job as it is


def test_a_profile_takes_over_what_it_does_not_say(tmp_path):
    found = profile(
        tmp_path,
        """
        [base]
        account = "lab"
        time = "04:00:00"
        container = "old"
        env_vars = {A = "base", B = "base"}
        [middle]
        extends = "base"
        partition = "batch"
        [mine]
        extends = "middle"
        batch_partition = "long"
        time = "08:00:00"
        container_image = "new"
        env_vars = {A = "mine"}
        """,
    )
    assert found.problems == []
    assert found.variables == {
        "SLURM_ACCOUNT": "lab",
        "SLURM_TIME_LIMIT": "08:00:00",
        "SLURM_PARTITION": "long",
        "CONTAINER": "new",
    }
    assert found.job_environment == {"A": "mine", "B": "base"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[mine]\nacount = 'lab'", "env.toml: mine.acount: profiles have no such field; "
         "did you mean account?"),
        ("[mine]\nfrobnicate = 1", "env.toml: mine.frobnicate: profiles have no such field; "
         "delete it; see configs/env.example.toml"),
        ("[mine]\nnodes = 'four'", 'env.toml: mine.nodes: got "four", expected a whole number >= 1; correct it; '
         "see configs/env.example.toml"),
        ("[mine]\nnodes = true", "env.toml: mine.nodes: got true, expected a whole number >= 1; correct it; "
         "see configs/env.example.toml"),
        ("[mine]\nmounts = '/a:/b'", 'env.toml: mine.mounts: got "/a:/b", expected a list of texts; correct it; '
         "see configs/env.example.toml"),
        ("[mine]\ntime = 04:00:00", 'env.toml: mine.time: got 04:00:00, expected a text; quote it: time = "04:00:00"'),
        ("[mine]\naccount = ''", 'env.toml: mine.account: got "", expected a text; correct it; '
         "see configs/env.example.toml"),
        ("[mine]\nexecutor = 'lepton'", "env.toml: mine.executor: got lepton, expected slurm or local; "
         "choose one of those: this recipe starts nothing else"),
        ("[mine]\nruntime = 'pixis'", "env.toml: mine.runtime: got pixis, expected pyxis or apptainer or podman or "
         "none; did you mean pyxis?"),
        ("[mine]\nstartup_commands = ['pip install x']", "env.toml: mine.startup_commands: nothing is installed when a "
         'job starts, so ["pip install x"] would not run; build it into the image, and remove it here'),
        ("[mine]\nmounts = ['/a:/b,/c:/d']", "env.toml: mine.mounts: got /a:/b,/c:/d, expected "
         "SOURCE[:TARGET[:ro]]; write one mount per item"),
        ("[mine]\nsandbox = {port = 7000}", "env.toml: mine.sandbox.port: got 7000, expected 6000; remove it: "
         "recipes/cluster/ports.py fixes the port"),
        ("[mine]\nsandbox = {contaner = 'x'}", "env.toml: mine.sandbox.contaner: got contaner, expected "
         "container or port or command; did you mean container?"),
        ("[mine]\nenv_vars = {HF_TOKEN = 'x'}", "env.toml: mine.env_vars.HF_TOKEN: a profile must not "
         "hold a secret; export HF_TOKEN in your shell: a job inherits it, and no command line shows it"),
        ("[mine]\nenv_vars = {'A-B' = 'x'}", "env.toml: mine.env_vars.A-B: got A-B, expected a variable's name; "
         "use letters, digits and _"),
        ("[mine]\nenv_vars = {A = 'x,y'}", 'env.toml: mine.env_vars.A: sbatch would split "x,y" at its comma or '
         "line end; export A in your shell, which a job inherits"),
        ("[mine]\ncontainer = 'a'\ncontainer_image = 'b'", "env.toml: mine: container and container_image are "
         "two names of one field; remove one of them"),
        ("[mine]\nextends = 'bsae'\n[base]", "env.toml: mine.extends: env.toml has no profile bsae; "
         "did you mean base?"),
        ("[mine]\nextends = 'other'\n[other]\nextends = 'mine'", "env.toml: other.extends: mine extends itself "
         "through others; remove one `extends`"),
        ("[min]\naccount = 'x'", "CLUSTER: env.toml has no profile mine; did you mean min?"),
        ("[wandb]\nproject = 'x'", "CLUSTER: env.toml has no profile mine; add it"),
    ],
)  # fmt: skip
def test_what_is_wrong_gives_one_line(tmp_path, monkeypatch, text, line):
    assert lines(tmp_path, monkeypatch, text) == [line]


def test_everything_wrong_is_listed_at_once(tmp_path, monkeypatch):
    text = "[mine]\nacount = 'x'\nnodes = 0\nextends = 'base'\n[base]\ntime = 4\nexecutor = 'docker'\n"
    assert [": ".join(line.split(": ")[:2]) for line in lines(tmp_path, monkeypatch, text)] == [
        "env.toml: mine.acount",
        "env.toml: mine.nodes",
        "env.toml: base.time",
        "env.toml: base.executor",
    ]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (line,) = lines(tmp_path, monkeypatch, "[mine\n")
    assert line.startswith("env.toml: this is not TOML: Expected")
    (tmp_path / "other.toml").write_text('[mine]\naccount = "lab"\n', encoding="utf-8")
    assert read_profile({"CLUSTER": "mine", "NEMOTRON_ENV_FILE": "other.toml"}, tmp_path).problems == []
    environ = {"CLUSTER": "mine", "ENV_TOML": "none.toml", "NEMOTRON_ENV_FILE": "other.toml"}
    (problem,) = read_profile(environ, tmp_path).problems
    assert problem.what == "the file cannot be read: No such file or directory"
    assert "env.example.toml" in problem.fix


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_a_field_without_effect_is_accepted_and_said(tmp_path, field):
    value = {"a text": '"x"', "a whole number >= 1": "8", "true or false": "true"}[FIELDS[field]]
    found = profile(tmp_path, f"[mine]\n{field} = {value}\n")
    assert found.problems == []
    assert found.variables == {}
    (note,) = found.notes
    assert note.fix == f"remove it: {WITHOUT_EFFECT[field]}"


def test_every_field_has_one_meaning():
    translated = {"executor", "mounts", "gpus_per_node", "sandbox", "env_vars"}
    assert {"extends", "startup_commands", *translated, *VARIABLES, *WITHOUT_EFFECT} == set(FIELDS)
    assert not set(VARIABLES) & set(WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("argv", "expected", "without"),
    [
        (
            ("sbatch", "--nodes=2", "job"),
            ("sbatch", "--export=ALL,A=one two,B=2", "--nodes=2", "job"),
            ("sbatch", "--export=ALL", "--nodes=2", "job"),  # whatever SBATCH_EXPORT says
        ),
        (("python", "-m", "x"), ("env", "A=one two", "B=2", "python", "-m", "x"), ("python", "-m", "x")),
    ],
)
def test_the_job_gets_its_variables(argv, expected, without):
    assert with_variables(argv, {"A": "one two", "B": "2"}) == expected
    assert with_variables(argv, {}) == without


@pytest.mark.parametrize("name", ["slurm", "my-cluster", "my-cluster-long", "workstation"])
def test_the_example_is_right(name):
    found = read_profile({"CLUSTER": name, "ENV_TOML": str(EXAMPLE)}, ROOT)
    assert found.problems == []
    assert found.notes == []
    assert set(found.variables) <= {*FILLED_BY_PROFILE, "LAUNCHER", "EXTRA_MOUNTS", "WANDB_PROJ"}


def test_the_example_shows_what_a_profile_may_hold():
    text = EXAMPLE.read_text(encoding="utf-8")
    shown = {"extends", "executor", "account", "partition", "batch_partition", "time", "container", "runtime",
             "mounts", "env_vars", "sandbox", "persistent_cache", "sif_dir"}  # fmt: skip
    assert all(field in text for field in shown)
    assert "[wandb]" in text
    assert "wandb" in SETTINGS


def test_a_draft_takes_the_profile_and_lists_its_problems_without_what_follows_from_them(tmp_path):
    (tmp_path / "env.toml").write_text(
        '[mine]\naccount = "lab"\npartition = "batch"\ngpus_per_node = 4\n[broken]\nacount = "lab"\n', encoding="utf-8"
    )
    environ = {"ENV_TOML": str(tmp_path / "env.toml"), "CONTAINER_RUNTIME": "none", "PERSISTENT_CACHE": "/c"}
    launch = read_launch("stage1.1", (), {**environ, "CLUSTER": "mine", "MODEL_PATH": "m"})
    assert (launch.contract["SLURM_ACCOUNT"], launch.contract["SLURM_PARTITION"]) == ("lab", "batch")
    assert [finding.code for finding in launch.findings if finding.code.startswith("ENV")] == []
    assert launch.config is not None
    assert launch.config.cluster.gpus_per_node == 4
    assert launch.config.policy.generation.colocated.resources.gpus_per_node == 4  # follows
    mine = read_launch("stage1.1", ("cluster.gpus_per_node=8",), {**environ, "CLUSTER": "mine", "MODEL_PATH": "m"})
    assert mine.config is not None
    assert mine.config.cluster.gpus_per_node == 8  # the user's own word is the last
    broken = read_launch("stage1.1", (), {**environ, "CLUSTER": "broken", "MODEL_PATH": "m"})
    assert [finding.code for finding in broken.findings if finding.code.startswith("ENV")] == ["ENV005"]


@pytest.mark.parametrize(
    ("shell", "profile", "expected"),
    [
        ({}, "", "auto"),
        ({"SBATCH_GRES": ""}, "", ""),
        ({"SBATCH_GRES": " "}, "", ""),
        ({"SBATCH_GRES": "gpu:h100:4"}, "", "gpu:h100:4"),
        ({}, 'gres = ""', ""),
        ({"SBATCH_GRES": "gpu"}, 'gres = ""', "gpu"),
        ({"SBATCH_GRES": ""}, 'gres = "gpu:a"', ""),
    ],
)
@pytest.mark.parametrize("stage", ["", "stage1.1"])
def test_an_empty_resource_asks_for_none(tmp_path, shell, profile, expected, stage):
    (tmp_path / "env.toml").write_text(f"[c]\n{profile}\n", encoding="utf-8")
    environ = {"CLUSTER": "c", "ENV_TOML": str(tmp_path / "env.toml"), "SCALE": "tiny", **shell}
    assert read_launch(stage, [], environ).contract["SBATCH_GRES"] == expected


@pytest.mark.parametrize(
    ("gres", "expected"),
    [("gpu", ("--gres=gpu:8",)), ("gpu:h100", ("--gres=gpu:h100:8",)), ("gpu:4", ("--gres=gpu:4",)), ("", ())],
)
def test_the_option_has_the_number_that_is_needed(gres, expected):
    assert gres_words(gres, 8, is_given=False) == expected
    assert gres_words(gres, 8, is_given=True) == (expected or ("--gres=none",))


def test_a_problem_has_the_name_that_the_user_wrote(tmp_path):
    """The number of nodes may stand in a profile, whose reader never saw SBATCH_NUM_NODES."""
    (tmp_path / "env.toml").write_text('[mine]\nexecutor = "slurm"\nnodes = 2\n', encoding="utf-8")
    given = {"CLUSTER": "mine", "ENV_TOML": str(tmp_path / "env.toml")}
    (of_profile,) = too_few_nodes(given)
    assert of_profile.where.endswith("env.toml: mine.nodes (SBATCH_NUM_NODES)")
    assert of_profile.got == "2" and of_profile.fix.startswith("remove it there")
    (of_shell,) = too_few_nodes({**given, "SBATCH_NUM_NODES": "3"})  # the shell wins
    assert (of_shell.where, of_shell.got) == ("SBATCH_NUM_NODES", "3") and of_shell.fix.startswith("unset it")
    assert too_few_nodes({**given, "SBATCH_NUM_NODES": "101"}) == []


def too_few_nodes(environ: Mapping[str, str]) -> list[Problem]:
    """Return what a launch of stage 3 says of the number of its nodes."""
    return [finding.problem for finding in read_launch("stage3", (), environ).findings if finding.code == "ALC001"]
