"""TensorBoard, W&B and Prometheus: copies of what is in metrics.jsonl. `RunLogger` has one thread that calls them."""

from __future__ import annotations

import importlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from recipes.cluster.ports import split_host_port
from recipes.errors import ConfigError, Problem
from recipes.files import write_atomically

if TYPE_CHECKING:
    from recipes.config.tree import WandbConfig

WANDB_ID_FILE = "wandb_id"  # in the run directory; names alone are not unique in a project


class ScalarSink(Protocol):
    """A place that takes the finite scalars of a step, called from the writer thread only."""

    name: str  # for messages

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink:
    """Event files under `directory`. TensorBoard then hides what an earlier start wrote for `first_step` and later."""

    name = "TensorBoard"

    def __init__(self, directory: Path, first_step: int) -> None:
        # Imported here because it is slow, and not needed when TensorBoard is off.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(directory), purge_step=first_step)  # type: ignore[no-untyped-call]

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, global_step=step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class WandbSink:
    """One W&B run per run directory, by an id that is stored there. A resume continues it where it lost no step.

    W&B takes no step twice. So where steps are trained again, a new W&B run takes the place of the old one, and
    `is_new` asks for all that was logged before.
    """

    name = "W&B"

    def __init__(self, run_dir: Path, cfg: WandbConfig, *, continues: bool) -> None:
        file = run_dir / WANDB_ID_FILE
        self.is_new = not (continues and file.is_file())
        run_id = uuid.uuid4().hex[:16] if self.is_new else file.read_text(encoding="utf-8").strip()
        self._run = import_wandb().init(project=cfg.project, name=cfg.name, id=run_id, dir=str(run_dir), resume="allow")
        write_atomically(file, f"{run_id}\n".encode())

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class PrometheusSink:
    """Serves the newest value of each number as a gauge at `address`, HOST:PORT, to whoever asks; it has no secrets.

    `train/reward` is `super_rl_train_reward`. Raises `ConfigError` where nobody can listen at the address.
    """

    name = "Prometheus"

    def __init__(self, address: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._latest: Mapping[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            host, port = split_host_port(address)
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, ValueError) as error:
            wrong = f"cannot listen at {address}: {error}"
            fix = "choose another port, and an address of this machine, or set it to null"
            raise ConfigError(Problem(where="logger.prometheus_address", wrong=wrong, fix=fix)) from error

    def collect(self) -> Iterator[Any]:
        """Yield the gauges; the server calls this for each request, in a thread of its own."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._latest.items():
            yield GaugeMetricFamily(name, "", value=value)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        named = {re.sub(r"[^a-zA-Z0-9_]", "_", f"super_rl_{key}"): value for key, value in scalars.items()}
        self._latest = {**self._latest, **named, "super_rl_step": float(step)}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def import_wandb() -> Any:
    """Return the package; raises `ConfigError` where it is not installed."""
    try:
        if not os.environ.get("WANDB_MODE"):
            os.environ.pop("WANDB_MODE", None)  # W&B refuses a mode that is there and empty
        return importlib.import_module("wandb")
    except ImportError as error:
        problem = Problem(
            where="logger.wandb_enabled",
            wrong=f"it is true, but wandb cannot be imported ({error})",
            fix="install what the lock pins (`make setup`), or set logger.wandb_enabled=false",
        )
        raise ConfigError(problem) from error
