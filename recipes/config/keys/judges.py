"""Judges that the run starts itself: which engines they need, read from the server instances of `env.nemo_gym`.

A model server of a type in STARTED is such a judge, unless it has an address (`base_url`). Its `vllm_serve_kwargs` are
the arguments of `vllm serve`; `data_parallel_size` says how many copies of the model there are, each of them an engine
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.config.keys.servers import MODELS, servers
from recipes.config.tree import Config

STARTED = ("genrm_model", "local_vllm_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedJudge:
    """One judge model and its engines."""

    name: str  # of its instance
    server: str  # type of its server
    model: str  # directory or hub name; requests ask for it by this name
    num_copies: int
    gpus_per_copy: int  # tensor parallel * pipeline parallel size
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)  # without the number of copies
    variables: Mapping[str, str] = field(default_factory=dict)  # of the engines' environment

    @property
    def key(self) -> str:
        """The key of the configuration that holds the judge."""
        return f"env.nemo_gym.{self.name}.{MODELS}.{self.server}"


def started_judges(config: Config) -> tuple[StartedJudge, ...]:
    """Return the judges that the run starts, by name."""
    found = []
    for name, server, settings in sorted(servers(config, MODELS), key=lambda entry: entry[0]):
        if server not in STARTED or settings.get("base_url"):
            continue
        arguments = dict(settings.get("vllm_serve_kwargs") or {})
        found.append(
            StartedJudge(
                name=name,
                server=server,
                model=str(settings.get("model", "")),
                num_copies=arguments.pop("data_parallel_size", 1),
                gpus_per_copy=arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1),
                engine_arguments=arguments,
                variables={key: str(value) for key, value in (settings.get("vllm_serve_env_vars") or {}).items()},
            )
        )
    return tuple(found)
