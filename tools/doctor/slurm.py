"""The jobs of this run, its partition and its account, as Slurm describes them. Every question has a deadline."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from tools.draft.contract import REQUIRED_WITH_CONTAINERS
from tools.draft.findings import Finding, as_findings, found
from tools.draft.launch import Launch
from tools.draft.slurm import GPUS, UNLIMITED, NoAnswerError, ask, asked_gres, run_problems, slurm_seconds
from tools.images.lock import LOCK, digest_problems, read_image, read_lock

NOT_UP = ("down", "drain", "drng", "fail", "maint", "unk", "boot", "resv", "futr", "inval")  # as sinfo shortens them
_FIELD = re.compile(r"(\w+)=(\S*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

    count: int
    gpus: int  # of each
    is_up: bool


def check(launch: Launch) -> Iterator[Finding]:
    """Compare the job with its partition and its account."""
    contract = launch.contract
    if contract.is_local:
        return
    try:
        if launch.run_dir is not None:
            yield from as_findings("PTH003", _jobs_of_the_run(contract["EXP_NAME"], launch.run_dir))
        if not contract["SLURM_PARTITION"]:
            return
        fits: list[list[Finding]] = []
        for name in contract["SLURM_PARTITION"].split(","):
            partition = ask_partition(name)
            fits.append(list(partition_findings(launch, name, partition)))
        # Slurm takes the first of several partitions that suits.
        if all(any(finding.severity == "error" for finding in findings) for findings in fits):
            for findings in fits:
                yield from findings
        elif len(fits) == 1:
            yield from fits[0]
        if contract["SLURM_ACCOUNT"]:
            yield from account_findings(contract["SLURM_ACCOUNT"])
    except NoAnswerError as error:
        wrong = f"jobs, partition, nodes and account were not checked: {error}"
        yield found("SLM006", where="Slurm", wrong=wrong, fix="start the doctor on a login node to have them checked")


def _jobs_of_the_run(name: str, run_dir: Path) -> list[Problem]:
    try:
        return run_problems(name, run_dir)
    except LaunchError as error:  # a controller that did not answer this answers no other question either
        raise NoAnswerError(error.problems[0].what.splitlines()[-1]) from error


def ask_partition(name: str) -> Mapping[str, str] | None:
    """Return the fields of a partition, None when there is no such one."""
    result = ask("scontrol", "show", "partition", name, "--oneliner")
    if result.returncode == 0:
        return dict(_FIELD.findall(result.stdout))
    if "not found" in result.stdout + result.stderr:
        return None
    raise NoAnswerError((result.stderr.strip().splitlines() or ["scontrol failed"])[-1])


def ask_nodes(name: str) -> list[NodeGroup]:
    """Return the nodes of a partition in groups."""
    result = ask("sinfo", "--noheader", f"--partition={name}", "--format=%D|%G|%t")
    return [node_group(line) for line in result.stdout.splitlines() if line.count("|") == 2]


def node_group(line: str) -> NodeGroup:
    """Read `COUNT|GRES|STATE` as sinfo writes it."""
    count, gres, state = line.split("|")
    gpus = sum(int(number) for number in GPUS.findall(gres))
    is_up = not state.strip().endswith("*") and not state.startswith(NOT_UP)
    return NodeGroup(count=int(count), gpus=gpus, is_up=is_up)


def partition_findings(launch: Launch, name: str, partition: Mapping[str, str] | None) -> Iterator[Finding]:
    """Compare a job with one partition."""
    where = "SLURM_PARTITION"
    if partition is None:
        yield found(
            "SLM001", where=where, got=name, expected="a partition of this cluster", fix="choose one that `sinfo` lists"
        )
        return
    if partition.get("State", "UP") != "UP":
        got, fix = f"{name}, which is {partition['State']}", "choose another one, or wait"
        yield found("SLM001", where=where, got=got, expected="a partition that takes jobs", fix=fix)
    yield from _time_findings(launch, name, partition)
    yield from preemption_findings(name, partition, ask("scontrol", "show", "config").stdout)
    yield from _taken_account_findings(launch, name, partition)
    if launch.sizes is not None:
        needed = launch.contract.num_nodes(launch.sizes.num_nodes)
        # Of a cluster that counts no GPUs nobody knows how many a node has until the job starts there.
        gpus = launch.sizes.total_gpus // launch.sizes.num_nodes if asked_gres(launch.contract["SBATCH_GRES"]) else 0
        most = partition.get("MaxNodes", "UNLIMITED")
        if most.isdecimal() and int(most) < needed:
            got, fix = f"{needed} nodes", "choose another partition, or a smaller scale"
            yield found("SLM002", where=where, got=got, expected=f"at most MaxNodes = {most} of {name}", fix=fix)
        yield from node_findings(name, ask_nodes(name), needed, gpus)


def node_findings(name: str, groups: list[NodeGroup], needed: int, gpus: int) -> Iterator[Finding]:
    """Compare the nodes of a partition with `needed` nodes of `gpus` GPUs each."""
    where, fix = f"SLURM_PARTITION={name}", "choose another partition, or a smaller scale"
    total = sum(group.count for group in groups)
    enough = [group for group in groups if group.gpus >= gpus]
    fitting, up = sum(group.count for group in enough), sum(group.count for group in enough if group.is_up)
    if total < needed:
        yield found("SLM002", where=where, got=f"{total} nodes", expected=f"at least {needed}", fix=fix)
    elif fitting < needed:
        most = max((group.gpus for group in groups), default=0)
        got = f"{fitting} nodes with {gpus} GPUs (gres; the most is {most})"
        if not most:
            fix += '; if they have GPUs that Slurm does not count, set SBATCH_GRES= (in a profile: gres = "")'
        yield found("SLM003", where=where, got=got, expected=f"at least {needed}", fix=fix)
    elif up < needed:
        wrong = f"{up} of {fitting} nodes are up, and the run needs {needed}"
        yield found("SLM007", where=where, wrong=wrong, fix="start it all the same: the job waits until nodes return")


def preemption_findings(name: str, partition: Mapping[str, str], settings: str) -> Iterator[Finding]:
    """Note a partition that takes nodes back from a run which has not been asked to save; `settings` are Slurm's."""
    mode, grace = partition.get("PreemptMode", "OFF"), partition.get("GraceTime", "0")
    asks_first = re.search(r"^PreemptParameters\s*=.*send_user_signal", settings, re.MULTILINE) is not None
    if mode in ("CANCEL", "REQUEUE") and (grace == "0" or not asks_first):
        wrong = f"jobs of {name} can be preempted (PreemptMode={mode}), and a run then loses what it has not saved"
        fix = "lower checkpointing.save_period; or have the partition get a GraceTime, and PreemptParameters "
        fix += "send_user_signal: then a run is asked to save first"
        yield found("SLM009", where=f"SLURM_PARTITION={name}", wrong=wrong, fix=fix)


def _time_findings(launch: Launch, name: str, partition: Mapping[str, str]) -> Iterator[Finding]:
    most, asked = partition.get("MaxTime", "UNLIMITED"), launch.contract["SLURM_TIME_LIMIT"]
    limit = None if most.lower() in UNLIMITED else slurm_seconds(most)
    seconds = slurm_seconds(asked) if asked.lower() not in UNLIMITED else float("inf")
    if limit is not None and seconds is not None and seconds > limit:
        fix = "lower it: a run that reaches its limit saves and is resubmitted"
        yield found("SLM004", where="SLURM_TIME_LIMIT", got=asked, expected=f"at most {most} of {name}", fix=fix)


def _taken_account_findings(launch: Launch, name: str, partition: Mapping[str, str]) -> Iterator[Finding]:
    account = launch.contract["SLURM_ACCOUNT"]
    allowed, denied = partition.get("AllowAccounts", "ALL"), partition.get("DenyAccounts", "")
    if account and ((allowed != "ALL" and account not in allowed.split(",")) or account in denied.split(",")):
        expected = f"an account that {name} takes" + (f": {allowed}" if allowed != "ALL" else "")
        yield found("SLM005", where="SLURM_ACCOUNT", got=account, expected=expected, fix="choose one of them")


def account_findings(account: str) -> Iterator[Finding]:
    """Check that the user may charge an account, where Slurm keeps accounts and insists on them."""
    try:
        user = getpass.getuser()
        query = ("show", "associations", f"user={user}", f"account={account}", "format=account")
        result = ask("sacctmgr", "--noheader", "--parsable2", *query)
        if result.returncode or result.stdout.strip():
            return  # without accounting every account is taken
        settings = ask("scontrol", "show", "config").stdout
    except NoAnswerError:
        return
    enforced = re.search(r"^AccountingStorageEnforce\s*=\s*(\S+)", settings, re.MULTILINE)
    if enforced and "associations" in enforced[1]:
        expected = f"an account of user {user}"
        fix = f"choose one that `sacctmgr show associations user={user}` lists"
        yield found("SLM005", where="SLURM_ACCOUNT", got=account, expected=expected, fix=fix)


# Runtime -> kinds of image files that it runs, and the schemes of the names that it fetches ("" = none written).
TAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pyxis": (("squashfs",), ("", "docker", "dockerd", "podman")),
    "apptainer": (("SIF", "squashfs", "directory"), ("", "docker", "oras", "library")),
    "podman": ((), ("", "docker")),
}
SUFFIXES = (".sqsh", ".squashfs", ".sif")
MAKE = {
    "pyxis": "import it: enroot import --output IMAGE.sqsh docker://...",
    "apptainer": "build it: apptainer build IMAGE.sif docker://...",
    "podman": "load it into the registry or the local store, and give its name",
}
NAME = re.compile(
    r"(?:(?P<scheme>[a-z]+)://)?(?:[^@/#]+@)?"
    r"(?:(?P<host>[A-Za-z0-9.-]+(?::\d+)?)[#/])?"
    r"(?P<path>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@sha256:[0-9a-f]{64})?"
)


def check_containers(launch: Launch) -> Iterator[Finding]:
    """Check the images of a job on Slurm."""
    runtime = launch.contract["CONTAINER_RUNTIME"]
    if launch.contract.is_local or runtime not in TAKES:
        return
    for variable in REQUIRED_WITH_CONTAINERS:
        image = launch.contract[variable]
        if image and is_file_name(image):
            yield from file_findings(variable, image, runtime)
        elif image:
            yield from name_findings(variable, image, runtime)
    images = {variable: launch.contract[variable] for variable in REQUIRED_WITH_CONTAINERS if launch.contract[variable]}
    yield from as_findings("IMG005", digest_problems(images, read_lock(launch.root / LOCK)))


def is_file_name(image: str) -> bool:
    """Whether an image is meant as a file."""
    return image.startswith(("/", ".", "~")) or ("://" not in image and image.endswith(SUFFIXES))


def file_findings(variable: str, image: str, runtime: str) -> Iterator[Finding]:
    """Check an image file: there, of the right kind, whole."""
    path, kinds = Path(image).expanduser(), TAKES[runtime][0]
    if (
        "/" not in image and not path.exists()
    ):  # pyxis would look for it on Docker Hub, and fail there with "401 Unauthorized"
        fix = f"write {path.absolute()}"
        yield found(
            "IMG002", where=variable, got=image, expected="a path with a slash, or the name of an image", fix=fix
        )
        return
    if not path.exists():
        yield found("IMG001", where=variable, wrong=f"there is no file {image}", fix=MAKE[runtime])
        return
    file = read_image(path)
    if file.kind not in kinds:
        got = f"{image}: {'no image' if file.kind == 'none' else file.kind}"
        expected = f"{' or '.join(kinds) or 'the name of an image'} (CONTAINER_RUNTIME={runtime})"
        yield found("IMG002", where=variable, got=got, expected=expected, fix=MAKE[runtime])
    elif file.is_cut:
        got, expected = f"{image}: {file.size} bytes", f"{file.declared} bytes, as its header says"
        yield found("IMG003", where=variable, got=got, expected=expected, fix=f"remove the file and {MAKE[runtime]}")


def name_findings(variable: str, image: str, runtime: str) -> Iterator[Finding]:
    """Check the form of a name that the nodes are to fetch."""
    schemes = TAKES[runtime][1]
    match = NAME.fullmatch(image)
    scheme = image.partition("://")[0] if "://" in image else ""
    if scheme not in schemes:
        written = " or ".join(f"{name}://..." if name else "HOST/NAME:TAG" for name in schemes)
        yield found(
            "IMG004", where=variable, got=image, expected=f"{written} (CONTAINER_RUNTIME={runtime})", fix="correct it"
        )
    elif match is None:
        expected = "[USER@]HOST[#/]NAME[:TAG], the name in lower case"
        yield found("IMG004", where=variable, got=image, expected=expected, fix="correct it")
