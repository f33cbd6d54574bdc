"""A cluster's profile as a user names it: what is submitted, who wins, and what a wrong one says."""

from __future__ import annotations

PROFILES = """
[shared]
account = "lab2"
runtime = "none"
[mine]
extends = "shared"
partition = "long"
time = "02:00:00"
persistent_cache = "/tmp"
gpus_per_node = 2
env_vars = {GREETING = "two words"}
[uncounted]
extends = "mine"
gres = ""
[local]
executor = "local"
"""
FROM_PROFILE = dict.fromkeys(
    ("SLURM_ACCOUNT", "SLURM_PARTITION", "PERSISTENT_CACHE", "CONTAINER", "SANDBOX_CONTAINER"), ""
)


def named(launch, name: str) -> dict[str, str]:
    path = launch.directory / "env.toml"
    path.write_text(PROFILES, encoding="utf-8")
    return {"ENV_TOML": str(path), "CLUSTER": name, "SKIP_CODE_SNAPSHOT": "true"}


def test_profile_is_what_is_submitted(launch):
    variables = {**named(launch, "mine"), **FROM_PROFILE}
    printed, executed = (launch.plan(*option, **variables).words for option in (["--dry-run"], []))
    assert (printed[0], executed[:2]) == ("print", ["exec", "sbatch"])
    assert printed[1:] == executed[1:]
    argv = executed[2:]
    assert argv[0] == "--export=ALL,GREETING=two words"
    assert "--variables=GREETING" in argv  # by name into the containers, too
    assert {"--account=lab2", "--partition=long", "--time=02:00:00", "--gres=gpu:2"} <= set(argv)
    assert "cluster.gpus_per_node=2" in argv


def test_environment_wins_over_the_profile(launch):
    variables = {**named(launch, "mine"), **FROM_PROFILE, "SLURM_ACCOUNT": "other", "GREETING": "mine"}
    words = launch.plan("--dry-run", **variables).words
    assert "--account=other" in words
    assert "--partition=long" in words
    assert [word for word in words if word.startswith("--export")] == ["--export=ALL"]  # the job inherits it as it is
    assert "--variables=GREETING" in words


def test_a_cluster_without_gres_is_asked_for_none(launch):
    variables = {**named(launch, "uncounted"), **FROM_PROFILE}
    for stage in ([], ["--stage=stage1.1"]):
        words = launch.plan(*stage, "--dry-run", **variables).words
        assert words[1] == "sbatch"
        assert [word for word in words if word.startswith("--gres")] == ["--gres=none"]
    chosen = launch.plan("--dry-run", **variables, SBATCH_GRES="gpu:h100").words  # the environment wins
    assert [word for word in chosen if word.startswith("--gres")] == ["--gres=gpu:h100:2"]


def test_profile_of_this_machine_starts_here(launch):
    words = launch.plan("--dry-run", **named(launch, "local")).words
    assert words[2:4] == ["-m", "tools.job.local"]


def test_wrong_profile_is_refused_with_one_line_and_status_2(launch):
    lines = launch.plan(expect=2, **named(launch, "mien"), **FROM_PROFILE).stderr.splitlines()
    (line,) = [line for line in lines if "ENV0" in line]
    assert "ENV005 CLUSTER: " in line
    assert line.endswith("env.toml has no profile mien; did you mean mine?")
    assert not (launch.directory / "argv").exists()
