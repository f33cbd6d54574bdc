"""From a row to its task: which instance of a data set it names, what the agent may see of it, and its image.

The fields stand in `responses_create_params.metadata`, in its `instance_dict` (JSON text), or at the top of the row;
the first of these places that has a field decides. What an agent may see is a list of names, so that a field that a
data set adds stays hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recipes.environments.contract.rows import optional_object, require_str, shown, without_nulls, wrong
from recipes.environments.swe.contract import SweTask
from recipes.environments.swe.hidden_tests import WORKSPACE, command_of, expected_tests, names_of_tests
from recipes.environments.swe.images import Listing, PartialNames, find_image
from recipes.exact_json import loads
from recipes.types import Row

VISIBLE = frozenset(
    (
        *("instance_id", "repo", "repo_name", "base_commit", "environment_setup_commit", "version"),
        *("problem_statement", "hints_text", "image_name", "image_assets", "workspace", "workspace_path"),
        *("language", "repo_language"),
    )
)
PATCH_FIELDS = ("golden_patch", "patch")  # of the solution
COMMIT = re.compile(r"[0-9a-f]{7,64}")
MAX_NAME = 200  # characters of an instance id: it becomes part of file names


class MissingImageError(Exception):
    """There is no image for an instance."""


def parse_task(row: Row) -> SweTask:
    """Return the task of a row, without its image; raises `ValueError` with the field, what was got and expected."""
    facts = facts_of(row)
    name = require_str(facts, "instance_id")
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or "/" in name:
        raise wrong("instance_id", name, f"1 to {MAX_NAME} characters without '/'")
    base = require_str(facts, "base_commit")
    if not COMMIT.fullmatch(base):
        raise wrong("base_commit", base, "the id of a commit, 7 to 64 hexadecimal digits")
    expected_tests(facts)
    command_of(facts)
    return SweTask(
        id=name,
        dataset=require_str(facts, "dataset_name"),
        repository=_text(facts, "repo") or name.replace("__", "/").rpartition("-")[0],
        base_commit=base,
        problem=require_str(facts, "problem_statement"),
        gold_patch=next((text for key in PATCH_FIELDS if (text := _text(facts, key))), ""),
        test_patch=_text(facts, "test_patch"),
        fail_to_pass=names_of_tests(facts, "FAIL_TO_PASS"),
        pass_to_pass=names_of_tests(facts, "PASS_TO_PASS"),
        image="",
        workspace=WORKSPACE,
        public={key: _written(facts[key]) for key in sorted(VISIBLE & facts.keys()) if facts[key] is not None},
        facts=facts,
    )


def facts_of(row: Row) -> dict[str, Any]:
    """Return all fields of a row's instance; raises `ValueError` for an `instance_dict` that is no JSON object."""
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping):
        raise wrong("responses_create_params", params, "an object")
    metadata = optional_object(params, "metadata")
    text = metadata.get("instance_dict")
    try:
        instance = loads(text) if isinstance(text, str) else text
    except ValueError:
        instance = text
    if instance is not None and not isinstance(instance, Mapping):
        raise wrong("instance_dict", text, "JSON text of an object")
    top = {key: value for key, value in row.items() if key not in ("responses_create_params", "agent_ref")}
    named = {key: value for key, value in metadata.items() if key != "instance_dict"}
    return {**top, **without_nulls(instance or {}), **without_nulls(named)}


def _text(facts: Mapping[str, Any], name: str) -> str:
    value = facts.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, value, "a string or null")
    return value or ""


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The files of a directory of images, by their templates (`container_formatter`)."""

    templates: tuple[str, ...]
    partial: PartialNames = PartialNames.WHOLE_ID
    listing: Listing = field(default_factory=Listing)

    def with_image(self, task: SweTask) -> SweTask:
        """Return a task with its image; raises `MissingImageError` with the names that were tried."""
        path = find_image(task.id, self.templates, self.listing, self.partial)
        if path is None:
            tried = ", ".join(template.replace("{instance_id}", task.id) for template in self.templates)
            raise MissingImageError(f"{task.id} has no image: looked for {tried}")
        return replace(task, image=str(path))


def images_of(formatter: object, partial: object = None) -> Images:
    """Return the images of `container_formatter`, one template or a list; raises `ValueError` for anything else."""
    templates = (formatter,) if isinstance(formatter, str) else formatter
    if not isinstance(templates, Sequence) or not templates or not all(isinstance(text, str) for text in templates):
        raise wrong("container_formatter", formatter, "a template with {instance_id}, or a list of them")
    if without := [text for text in templates if "{instance_id}" not in text]:
        raise wrong("container_formatter", without[0], "a template with {instance_id}")
    kinds = [str(kind) for kind in PartialNames]
    if partial is not None and partial not in kinds:
        raise ValueError(f"field 'partial_image_names': got {shown(partial)}, expected one of {', '.join(kinds)}")
    return Images(templates=tuple(templates), partial=PartialNames(partial) if partial else PartialNames.WHOLE_ID)
