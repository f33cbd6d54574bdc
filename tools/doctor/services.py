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

from recipes.errors import ConfigError, LaunchError
from recipes.sinks import import_wandb
from tools.draft.findings import Finding, as_finding, as_findings, found
from tools.draft.launch import HEADS_MODEL, ROOT, TEACHERS, TINY_MODEL, TOOLS_MODEL, WIDE_MODEL, Launch
from tools.draft.snapshot import SIDE_FILES, untracked
from tools.hub import MODEL, HubName, repository_directory

PROBE_SECONDS = 3.0
INSTANCES = "env.nemo_gym"
FETCH_ALL = "make side-files"
TINY_CONFIGS = (ROOT / "configs/tiny").resolve()
OFFLINE = ("offline", "disabled", "dryrun")


def check(launch: Launch) -> Iterator[Finding]:
    """Probe servers, look for models in the cache and for tokens in the environment."""
    if launch.config is None:
        return
    instances = launch.config.env.nemo_gym.instances
    urls = dict(probes(instances))
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        answers = list(pool.map(probe, urls.values()))
    for (where, url), problem in zip(urls.items(), answers, strict=True):
        if problem:
            wrong = f"{url} does not answer within {PROBE_SECONDS:g} s: {problem}"
            fix = "start the server, or correct the address; --force when only the nodes reach it"
            yield found("JDG001", where=where, wrong=wrong, fix=fix)
    yield from model_findings(instances, launch.environ)
    is_contained = not launch.contract.is_local and launch.contract["CONTAINER_RUNTIME"] != "none"
    is_on, has_key = launch.config.logger.wandb_enabled, has_wandb_key(launch.environ, reads_netrc=not is_contained)
    if is_on and not is_contained:
        try:
            import_wandb()
        except ConfigError as error:
            yield from as_findings("WAN001", error.problems)
    if is_on and is_contained and has_key:
        wrong = "logger.wandb_enabled is on, and from here nobody sees whether the image has wandb"
        yield found(
            "WAN003",
            where="CONTAINER",
            wrong=wrong,
            fix="build the image again if it is older than the lock with wandb, or set logger.wandb_enabled=false",
        )
    if not is_on and launch.environ.get("WANDB_PROJ") and has_key:
        wrong = "it is set and there is a key, but logger.wandb_enabled is false: nothing is sent"
        yield found("WAN002", where="WANDB_PROJ", wrong=wrong, fix="set WANDB=1 to send it")
    if is_on and not has_key:
        fix = "export WANDB_API_KEY=... (a container does not see what `wandb login` wrote), or set WANDB_MODE=offline"
        wrong = "logger.wandb_enabled is on, and there is no key"
        yield found("TOK001", where="WANDB_API_KEY", wrong=wrong, fix=fix)


def text_findings(launch: Launch) -> Iterator[Finding]:
    """Check that judges are asked in the published words, but for tiny runs, and that verifiers' files are there."""
    if launch.config is None or launch.contract["ENGINE"] != "native":
        return
    from recipes.environments.instances import OURS, judge_texts_of, named_files_of  # every verifier

    env = launch.config.env
    for file in named_files_of(env.nemo_gym.instances):
        where, is_copied = f"{INSTANCES}.{file.name}", not (launch.runs_in_checkout or Path(file.value).is_absolute())
        if file.problem is not None:
            yield as_finding("JDG005", file.problem)
        elif is_copied and file.sha256 and is_left_out(launch.root, Path(file.value)):
            wrong = f"git does not track {file.value}, and the job runs from a copy of the tracked files"
            yield found("JDG005", where=where, wrong=wrong, fix=f"git add it, or give its whole path, {file.path}")
    texts = judge_texts_of(env.nemo_gym.instances, env.judge_texts)
    missing = dict.fromkeys(text.problem for text in texts if text.problem is not None)  # two may ask in one text
    yield from as_findings("JDG004", missing)
    files = [Path(name).resolve() for name in launch.loaded.files] if launch.loaded else []
    is_tiny = any(file.is_relative_to(TINY_CONFIGS) for file in files)  # whatever SCALE says
    if not is_tiny and (names := [text.name for text in texts if text.source == OURS]):
        wrong = f"{', '.join(names)}: judges would be asked in this project's words, which train another reward"
        yield found("JDG003", where="env.judge_texts", wrong=wrong, fix=f"set it to published, after `{FETCH_ALL}`")


def is_left_out(root: Path, path: Path) -> bool:
    """Return whether a snapshot of the checkout would lack a file or directory, or a part of it."""
    if path.is_relative_to(SIDE_FILES):
        return False
    files = [root / path] if (root / path).is_file() else [file for file in (root / path).rglob("*") if file.is_file()]
    try:
        return bool(untracked(root, files))
    except LaunchError:  # no git: the check of the code says so
        return False


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
            yield f"{where}.base_url[{number}]", models_url(str(base))
    for where, settings in servers(instances, "resources_servers"):
        if url := settings.get("url"):
            yield f"{where}.url", str(url)


def models_url(base: str) -> str:
    """Return where an OpenAI-compatible server lists its models."""
    root = base.rstrip("/")
    return f"{root if root.endswith('/v1') else root + '/v1'}/models"


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


def _made_by(model: str) -> str:
    """Return what to do for a model directory that is missing; one of the tiny ones is made by a command."""
    commands = {TINY_MODEL: "make tiny", HEADS_MODEL: "make tiny", WIDE_MODEL: "make tiny BLEND=wide"}
    commands |= {TOOLS_MODEL: "make tiny BLEND=tools"}
    command = next((text for made, text in commands.items() if Path(made).name == Path(model).name), "")
    command = "make tiny BLEND=teachers" if Path(model).name.startswith(Path(TEACHERS).name) else command
    return f"run `{command}`, which makes it, or correct the path" if command else "correct the path, or make the model"


def model_findings(instances: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the model of every judge which the run starts itself is on disk: a run downloads nothing."""
    for where, settings in servers(instances, "responses_api_models"):
        model = settings.get("model")
        if settings.get("base_url") or not isinstance(model, str) or Path(model).is_dir():
            continue
        is_path = model.startswith(("/", "."))
        if is_path or not is_cached(model, environ):
            expected = "a model directory, or a hub name whose files are in the cache"
            fix = _made_by(model) if is_path else f"give a path, or fetch it: make fetch MODEL_PATH={model}"
            yield found("JDG002", where=f"{where}.model", got=model, expected=expected, fix=fix)
            if not is_path and not environ.get("HF_TOKEN"):
                wrong = f"not set, and {model} would have to be fetched"
                yield found("TOK002", where="HF_TOKEN", wrong=wrong, fix="export HF_TOKEN=..., if the model is gated")


def is_cached(model: str, environ: Mapping[str, str]) -> bool:
    """Whether the hub's cache has a snapshot of a model."""
    directory = repository_directory(HubName(repository=model), MODEL, environ)
    return any((directory / "snapshots").glob("*/config.json"))


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
