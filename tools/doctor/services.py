"""What the run reaches outside itself: judges and verifiers by URL, models by hub name, tokens of services."""

from __future__ import annotations

import netrc
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tools.planning.draft import Draft
from tools.planning.findings import Finding, found

PROBE_SECONDS = 3.0
INSTANCES = "env.nemo_gym"
OFFLINE = ("offline", "disabled", "dryrun")


def check(draft: Draft) -> Iterator[Finding]:
    """Probe servers, look for models in the cache and for tokens in the environment."""
    if draft.config is None:
        return
    instances = draft.config.env.nemo_gym.instances
    urls = dict(probes(instances))
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        answers = list(pool.map(probe, urls.values()))
    for (where, url), problem in zip(urls.items(), answers, strict=True):
        if problem:
            wrong = f"{url} does not answer within {PROBE_SECONDS:g} s: {problem}"
            fix = "start the server, or correct the address; --force when only the nodes reach it"
            yield found("JDG001", where=where, wrong=wrong, fix=fix)
    yield from model_findings(instances, draft.environ)
    is_contained = not draft.contract.is_local and draft.contract["CONTAINER_RUNTIME"] != "none"
    if draft.config.logger.wandb_enabled and not has_wandb_key(draft.environ, reads_netrc=not is_contained):
        fix = "export WANDB_API_KEY=... (a container does not see what `wandb login` wrote), or set WANDB_MODE=offline"
        wrong = "logger.wandb_enabled is on, and there is no key"
        yield found("TOK001", where="WANDB_API_KEY", wrong=wrong, fix=fix)


def servers(instances: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield dotted key and settings of every server of a kind."""
    for name, block in instances.items():
        for server, settings in ((block or {}).get(kind) or {}).items():
            yield f"{INSTANCES}.{name}.{kind}.{server}", settings or {}


def probes(instances: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, address to ask) of every server that is given by URL."""
    for where, settings in servers(instances, "responses_api_models"):
        bases = settings.get("base_url") or []
        for number, base in enumerate([bases] if isinstance(bases, str) else bases):
            root = str(base).rstrip("/")
            yield f"{where}.base_url[{number}]", f"{root if root.endswith('/v1') else root + '/v1'}/models"
    for where, settings in servers(instances, "resources_servers"):
        if url := settings.get("url"):
            yield f"{where}.url", str(url)


def probe(url: str) -> str:
    """Return why a server does not answer; empty when it does, be it with "not found"."""
    if not url.startswith(("http://", "https://")):
        return "no http address"
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"status {error.code}" if error.code >= 500 else ""
    except (OSError, ValueError) as error:  # URLError is an OSError
        return str(getattr(error, "reason", error)) or type(error).__name__


def model_findings(instances: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the model of every judge which the run starts itself is on disk: a run downloads nothing."""
    for where, settings in servers(instances, "responses_api_models"):
        model = settings.get("model")
        if settings.get("base_url") or not isinstance(model, str) or Path(model).is_dir():
            continue
        is_path = model.startswith(("/", "."))
        if is_path or not is_cached(model, environ):
            expected = "a model directory, or a hub name whose files are in the cache"
            fix = "correct the path, or make the model" if is_path else f"give a path, or fetch it: hf download {model}"
            yield found("JDG002", where=f"{where}.model", got=model, expected=expected, fix=fix)
            if not is_path and not environ.get("HF_TOKEN"):
                wrong = f"not set, and {model} would have to be fetched"
                yield found("TOK002", where="HF_TOKEN", wrong=wrong, fix="export HF_TOKEN=..., if the model is gated")


def is_cached(model: str, environ: Mapping[str, str]) -> bool:
    """Whether the hub's cache has a snapshot of a model."""
    home = environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    snapshots = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    return any(snapshots.glob("*/config.json"))


def has_wandb_key(environ: Mapping[str, str], *, reads_netrc: bool) -> bool:
    """Whether Weights & Biases is offline or has a key, in the environment or in a netrc file that the run can read."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE", "").lower() in OFFLINE:
        return True
    if not reads_netrc:
        return False
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        known = netrc.netrc(str(Path(environ.get("NETRC") or "~/.netrc").expanduser()))
    except (OSError, netrc.NetrcParseError):
        return False
    return host is not None and known.authenticators(host) is not None
