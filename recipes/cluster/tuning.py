"""Variables of a run's processes: Ray's settings, in which what the user has set wins, and what is kept back.

Ray's settings depend on the number of nodes of a job.
"""

from __future__ import annotations

import re

KEPT_BACK = (
    # Python: other modules, other files than those of this checkout, no assertions, a warning that ends an engine.
    *("PYTHONHOME", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONPLATLIBDIR", "PYTHONSAFEPATH", "PYTHONSTARTUP"),
    "PYTHONWARNINGS",
    # torch and CUDA: files that run code when they are read, sums in another precision.
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
    # The ranks of another job, of which a launch from its shell is no part.
    *("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    # vLLM: code and pickles from a request, paths that need no key, ports and ranks of another server.
    *("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_DP_MASTER_IP"),
    *("VLLM_DP_MASTER_PORT", "VLLM_DP_RANK", "VLLM_DP_SIZE", "VLLM_PLUGINS", "VLLM_PORT", "VLLM_RPC_BASE_PATH"),
    *("VLLM_SERVER_DEV_MODE",),
)
"""Variables of the shell that no process of a run gets. What the loader takes, as LD_PRELOAD, is the operator's."""
_RAY_TUNING = re.compile(
    r"RAY_[a-z]\w*"
)  # Ray names its settings so; in capitals are other clusters, keys and switches

_LARGE = 32  # from this many nodes on, the head node answers late because of its own work

NODE_DEATH_SECONDS = 30.0  # in a small cluster, a node that is silent for so long is declared dead
_CHECK_PERIOD_SECONDS, _CHECK_TIMEOUT_SECONDS = 2.0, 8.0


def is_kept_back(name: str) -> bool:
    """Return whether a variable of the shell would take from a run what the launch promises."""
    return name in KEPT_BACK or (name.startswith("RAY_") and not _RAY_TUNING.fullmatch(name))


def with_loopback(no_proxy: str) -> str:
    """Return the list of hosts that no proxy is asked for, with this machine in it."""
    return ",".join(filter(None, (no_proxy, "127.0.0.1", "localhost")))


def node_death_seconds(num_nodes: int) -> float:
    """Return how many seconds a node may be silent before Ray declares it dead and the calls of its actors fail.

    The head of a large cluster answers late, so there more checks must fail in a row.
    """
    return NODE_DEATH_SECONDS if num_nodes < _LARGE else 2 * NODE_DEATH_SECONDS


def worker_environment(num_nodes: int) -> dict[str, str]:
    """Return those variables that say when Ray starts its workers and how long it waits for them."""
    return {
        # Idle workers serve nobody here, since every actor starts a worker of its own. One per core and node, they
        # would all load Python from the shared file system at the same moment. And the driver would wait for them, for
        # ever when they are not there in time.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # A worker first imports its modules, on a busy machine or from a file system that all nodes read at once.
        "RAY_worker_register_timeout_seconds": str(max(120, 2 * num_nodes)),
        # Only a dashboard or Prometheus reads these figures, and neither runs.
        "RAY_enable_metrics_collection": "0",
        "RAY_task_events_report_interval_ms": "0",
    }


def ray_environment(num_nodes: int, num_cpus: int) -> dict[str, str]:
    """Return the environment variables of the Ray processes of every node."""
    failures = round(node_death_seconds(num_nodes) / (_CHECK_PERIOD_SECONDS + _CHECK_TIMEOUT_SECONDS))
    variables = {
        **worker_environment(num_nodes),
        # With Ray's defaults, a silent node is declared dead after about a minute, and callers wait as long.
        "RAY_health_check_initial_delay_ms": "5000",
        "RAY_health_check_period_ms": f"{_CHECK_PERIOD_SECONDS * 1000:.0f}",
        "RAY_health_check_timeout_ms": f"{_CHECK_TIMEOUT_SECONDS * 1000:.0f}",
        "RAY_health_check_failure_threshold": str(failures),
        # A node that has lost its head ends by itself, so that the next job finds free ports.
        "RAY_gcs_rpc_server_reconnect_timeout_s": f"{node_death_seconds(num_nodes):.0f}",
    }
    if num_nodes < _LARGE:
        return variables
    threads = str(max(1, min(num_cpus, 32)))
    return variables | {
        # All nodes register with the head and report to it; by default only a quarter of its cores answer them.
        "RAY_gcs_server_rpc_server_thread_num": threads,
        "RAY_gcs_server_rpc_client_thread_num": threads,
        # By default every node reports ten times per second, although actors are placed only once.
        "RAY_raylet_report_resources_period_milliseconds": "1000",
        # A node's request waits in the head's queue behind those of the other nodes; Ray's default is 60 s.
        "RAY_gcs_server_request_timeout_seconds": "120",
        "RAY_py_gcs_connect_timeout_s": "120",
    }
