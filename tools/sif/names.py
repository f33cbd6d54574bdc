"""The instances that rows name, and the list of those whose images are good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

GOOD_INSTANCES = "good_instances.txt"  # in SIF_DIR: what `make sif-check` found to be good, one id per line


def instance_of(line: bytes) -> str | None:
    """Return the instance id of a row, None where there is none."""
    try:
        metadata: Any = orjson.loads(line)["responses_create_params"].get("metadata")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # the check of the data names it
    name = metadata.get("instance_id") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None
