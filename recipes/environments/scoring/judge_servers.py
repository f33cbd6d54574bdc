"""Judges of the configuration: the model servers that resources servers name, and how each is asked.

A judge is given by its address (`base_url`). A judge without one is started by the run on nodes of its own: its
addresses and their key come once it is placed (`with_addresses`), and until then it cannot be asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recipes.config.keys.derive import MODELS, STARTED
from recipes.environments.contract.http import JsonClient
from recipes.environments.scoring.judge import JudgeClient

QUESTION_SECONDS = 600.0  # for one question with all its retries: a judge may think for many thousand tokens
DEFAULT_CONCURRENCY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeServer:
    """One judge as a resources server asks it."""

    name: str
    urls: tuple[str, ...]
    model: str
    api_key: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_concurrency: int = DEFAULT_CONCURRENCY

    def shared_by(self, count: int) -> JudgeServer:
        """Return this judge as one of `count` processes asks it, with its share of the questions at once."""
        return replace(self, max_concurrency=-(-self.max_concurrency // count))

    def client(self, http: JsonClient, *, seconds: float = QUESTION_SECONDS) -> JudgeClient:
        """Return a client of this judge over shared connections, with `seconds` for a question."""
        return JudgeClient(
            name=self.name,
            urls=self.urls,
            model=self.model,
            params=self.params,
            timeout_seconds=seconds,
            max_concurrency=self.max_concurrency,
            api_key=self.api_key,
            extra=self.extra,
            http=http,
        )


def judge_of(
    settings: Mapping[str, Any],
    models: Mapping[str, tuple[str, Mapping[str, Any]]],
    *,
    judge: str = "judge",
    concurrency: int = DEFAULT_CONCURRENCY,
) -> JudgeServer | None:
    """Return the judge that a resources server names in its settings, None when there is none that could be asked.

    A judge that the run starts has no address yet, unless `with_addresses` has given it one. `models` has type and
    settings of each model server by instance name, `judge` begins the names of the settings.
    """
    name = (settings.get(f"{judge}_model_server") or {}).get("name", "")
    kind, server = models.get(name) or ("", {})
    found = server_of(name, server)
    if not found.urls and kind not in STARTED:
        return None
    asked = {**(settings.get(f"{judge}_responses_create_params") or {}), **(server.get("sampling_overrides") or {})}
    return replace(
        found,
        params={key: value for key, value in asked.items() if key != "input"}
        | (server.get("sampling_overrides") or {}),
        max_concurrency=int(settings.get(f"{judge}_endpoint_max_concurrency") or concurrency),
    )


def server_of(name: str, settings: Mapping[str, Any]) -> JudgeServer:
    """Return a model server of the configuration, with nothing of who asks it."""
    base = settings.get("base_url")
    return JudgeServer(
        name=name,
        urls=(base,) if isinstance(base, str) else tuple(base or ()),
        model=str(settings.get("model", "")),
        api_key=str(settings.get("api_key", "")),
        extra=settings.get("extra_body") or {},
    )


def with_addresses(
    instances: Mapping[str, Any], addresses: Mapping[str, Sequence[str]], api_key: str
) -> dict[str, Any]:
    """Return the server instances with the addresses of judges that the run has started, by name, and their key."""
    found = dict(instances)
    for name, urls in addresses.items():
        [(kind, settings)] = instances[name][MODELS].items()
        served = {**settings, "base_url": list(urls), "api_key": api_key}
        found[name] = {**instances[name], MODELS: {kind: served}}
    return found
