"""The image of every SWE task: a SIF file under SIF_DIR for each row that an agent works on in a container."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from recipes.environments.contract.rows import shown
from recipes.environments.swe.hidden_tests import deciding_calls
from recipes.environments.swe.images import TEMPLATES, Listing, find_image
from recipes.environments.swe.task import facts_of
from tools.images.files import read_image
from tools.planning.draft import Draft
from tools.planning.findings import Finding, found
from tools.sif.names import GOOD_INSTANCES, instance_of

SWE_AGENTS = "swe_agents"
MAX_LISTED = 5
GET = "fetch the images of the rows, or remove those rows"


def check(draft: Draft) -> Iterator[Finding]:
    """Check that every row which needs an image has one."""
    if not needs_images(draft):
        return
    yield from believed_commands(draft)
    wanted = rows_by_instance(draft)
    directory = draft.path("SIF_DIR")
    if directory is None or not directory.is_dir():
        needed = f"each of the {len(wanted)} instances of the data" if wanted else "each instance of a repository"
        needed += " needs a task image"
        wrong = f"not set: {needed}" if directory is None else f"no directory {directory}: {needed}"
        yield found("SIF001", where="SIF_DIR", wrong=wrong, fix="export SIF_DIR=..., the directory of task images")
        return
    templates = templates_of(draft, directory)
    listing = Listing()
    images = {instance: find_image(instance, templates, listing) for instance in wanted}
    missing = [instance for instance, image in images.items() if image is None]
    if missing:
        rows = sum(wanted[instance] for instance in missing)
        names = ", ".join(missing[:MAX_LISTED]) + (", ..." if len(missing) > MAX_LISTED else "")
        wrong = f"no image of {len(missing)} of {len(wanted)} instances ({rows} rows): {names}"
        yield found("SIF002", where=f"SIF_DIR={directory}", wrong=wrong, fix=GET)
    yield from bad_files([image for image in images.values() if image is not None])
    yield from not_good(directory, wanted)


def needs_images(draft: Draft) -> bool:
    """Whether agents of this launch work in task images."""
    if draft.stage is not None and "sif" in draft.stage.requires:
        return True
    return bool(swe_agents(draft))


def rows_by_instance(draft: Draft) -> Counter[str]:
    """Count the rows of each instance in both files."""
    return Counter(name for line in _lines(draft) if (name := instance_of(line)))


def _lines(draft: Draft) -> Iterator[bytes]:
    for path in (draft.path("TRAIN_PATH"), draft.path("VAL_PATH")):
        if path is not None and path.is_file():
            with path.open("rb") as lines:
                yield from lines


def believed_commands(draft: Draft) -> Iterator[Finding]:
    """Name the commands of tests whose output or status is believed as it is."""
    commands = Counter(command for line in _lines(draft) if b"test_cmd" in line and (command := _believed(line)))
    if commands:
        wrong = f"the output or status of {len(commands)} commands ({commands.total()} rows) is believed as it is, "
        wrong += f"such as: {shown(commands.most_common(1)[0][0])}"
        fix = "make it one line of simple commands that ends with a call of pytest or unittest, or accept that a patch"
        fix += " which prints results, or ends the command early, may count as a solution"
        yield found("SIF005", where="test_cmd", wrong=wrong, fix=fix)


def _believed(line: bytes) -> str:
    try:
        facts = facts_of(orjson.loads(line))
        return "" if deciding_calls(facts) else str(facts.get("test_cmd") or "")
    except (ValueError, TypeError, AttributeError):
        return ""  # the check of the data names it


def templates_of(draft: Draft, directory: Path) -> list[str]:
    """Return the names of images: those of CONTAINER_FORMATTER, one or a JSON list, else of the agents, else all known.

    A relative one lies in the directory.
    """
    formatter = draft.contract["CONTAINER_FORMATTER"]
    texts: list[str] = json.loads(formatter) if formatter.startswith("[") else [formatter] if formatter else []
    for settings in () if texts else swe_agents(draft):
        chosen = settings.get("container_formatter") or []
        texts += [chosen] if isinstance(chosen, str) else chosen
    return [str(directory / text) for text in dict.fromkeys(texts or TEMPLATES)]


def swe_agents(draft: Draft) -> list[Mapping[str, Any]]:
    """Return the settings of the configured agents that work in task images."""
    instances = draft.config.env.nemo_gym.instances if draft.config else {}
    kinds = [block.get("responses_api_agents") or {} for block in instances.values() if isinstance(block, Mapping)]
    return [kind[SWE_AGENTS] or {} for kind in kinds if SWE_AGENTS in kind]


def not_good(directory: Path, wanted: Mapping[str, int]) -> Iterator[Finding]:
    """Name the rows whose instances a check of the images did not find good: their reward may say nothing."""
    path = directory / GOOD_INSTANCES
    good = set(path.read_text(encoding="utf-8").split("\n")) if path.is_file() else wanted.keys()
    if others := [instance for instance in wanted if instance not in good]:
        wrong = f"{len(others)} of {len(wanted)} instances ({sum(wanted[name] for name in others)} rows) are not in it"
        fix = "train on the rows that `make sif-check` writes (data/BLEND-good), or check the images of these rows, too"
        yield found("SIF004", where=str(path), wrong=wrong, fix=fix)


def bad_files(images: Sequence[Path]) -> Iterator[Finding]:
    """Name the images that are no SIF file, or cut."""
    bad = []
    for image in sorted(set(images)):
        if image.is_dir():  # a root file system; runtimes take these, too
            continue
        file = read_image(image)
        if file.kind != "SIF":
            bad.append((image, "this is not a SIF file"))
        elif file.is_cut:
            bad.append((image, f"the file is cut: {file.size} bytes of {file.declared}"))
    for image, wrong in bad[:MAX_LISTED]:
        yield found("SIF003", where=str(image), wrong=wrong, fix="remove it and fetch it again")
    if len(bad) > MAX_LISTED:
        where, wrong = str(bad[0][0].parent), f"{len(bad) - MAX_LISTED} more files are cut or not SIF files"
        yield found("SIF003", where=where, wrong=wrong, fix="remove them and fetch them again")
