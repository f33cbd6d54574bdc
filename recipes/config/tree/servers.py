"""Servers of `env.nemo_gym` as NeMo Gym writes them: what agents, model servers and every resources server may have.

One field per key, in the form of the other classes of this folder. NOT_SET = a file need not set it. The settings of a
verifier stand in its own file (recipes/environments/verifiers). Defaults are those of the native engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from recipes.config.tree.marks import NOT_SET, Entry, Text, Unit

Reference = Annotated[Mapping[str, Any], Entry("server_reference")]
Sampling = Annotated[Mapping[str, Any], Entry("judge_sampling")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReference:
    """Another instance, by its name."""

    type: Literal["resources_servers", "responses_api_models", "responses_api_agents"] = NOT_SET
    """kind of that server"""
    name: Text
    """name of its instance"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSampling:
    """How a judge is asked."""

    input: tuple[Any, ...] = NOT_SET
    """messages before the question"""
    max_output_tokens: Annotated[int, Ge(1), Unit("tokens")] = NOT_SET
    """longest reply, in tokens"""
    temperature: Annotated[float, Ge(0), Unit("temperature")] = NOT_SET
    """sampling temperature; 0 = greedy"""
    top_p: Annotated[float, Gt(0), Le(1), Unit("probability")] = NOT_SET
    """nucleus sampling; 1 = off"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Arguments of `vllm serve`; others go to it as they are."""

    data_parallel_size: Annotated[int, Ge(1), Unit("copies")] = NOT_SET
    """copies of the model"""
    tensor_parallel_size: Annotated[int, Ge(1), Unit("GPUs")] = NOT_SET
    """GPUs that share each layer of one copy"""
    pipeline_parallel_size: Annotated[int, Ge(1), Unit("GPUs")] = NOT_SET
    """GPUs that hold successive layers of one copy"""
    max_model_len: Annotated[int, Ge(1), Unit("tokens")] = NOT_SET
    """longest context, in tokens"""
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1), Unit("share")] = NOT_SET
    """share of GPU memory an engine takes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyServer:
    """What every server may have; most of it is for NeMo Gym alone."""

    datasets: tuple[Mapping[str, Any], ...] | None = NOT_SET
    """data sets of NeMo Gym's catalogue; rows come from data.train.data_path instead"""
    description: str = NOT_SET
    """what the server is for, in words"""
    domain: str = NOT_SET
    """area of the environment, for NeMo Gym's catalogue"""
    entrypoint: str = NOT_SET
    """file that starts the server, in NeMo Gym's tree"""
    host: str = NOT_SET
    """address the server listens on, in NeMo Gym"""
    name: str = NOT_SET
    """name of the server in NeMo Gym's logs"""
    num_workers: Annotated[int, Ge(1), Unit("processes")] = NOT_SET
    """processes of the HTTP server"""
    port: Annotated[int, Ge(1), Unit("TCP port")] = NOT_SET
    """port the server listens on, in NeMo Gym"""
    value: str = NOT_SET
    """what it improves, for NeMo Gym's catalogue"""
    verified: bool = NOT_SET
    """whether NeMo Gym lists it as verified"""
    verified_url: str = NOT_SET
    """where NeMo Gym shows that"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesServer(AnyServer):
    """What every resources server may have."""

    timeout_seconds: Annotated[float, Gt(0), Unit("seconds")] = NOT_SET
    """no verdict after that long: the rollout has failed"""
    url: str = NOT_SET
    """address of a running server to ask, http://host:port; without it the verifier runs in process"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyModelServer(AnyServer):
    """A model server: the policy, or a judge."""

    api_key: str = NOT_SET
    """key for that server"""
    audio_root: str | None = NOT_SET
    """directory of audio files in requests"""
    base_url: str | tuple[Text, ...] = NOT_SET
    """address of a running server; without it one is started on the judges' nodes"""
    chat_template_kwargs: Mapping[str, Any] | None = NOT_SET
    """arguments of the chat template, e.g. enable_thinking"""
    debug: bool = NOT_SET
    """log every request"""
    default_headers: Mapping[str, Any] | None = NOT_SET
    """HTTP headers of every request"""
    extra_body: Mapping[str, Any] | None = NOT_SET
    """further fields of every request"""
    hf_home: str | None = NOT_SET
    """cache of downloaded models; null = NeMo Gym's own"""
    is_responses_native: bool = NOT_SET
    """the server speaks the Responses protocol itself"""
    model: Text = NOT_SET
    """model as the hub or a directory calls it"""
    preserve_reasoning_in_assistant_content: bool = NOT_SET
    """send past reasoning inside the message text"""
    ray_worker_py_executable: str = NOT_SET
    """Python of the server's Ray workers"""
    replace_developer_role_with_system: bool = NOT_SET
    """send developer messages as system messages"""
    request_prompt_and_generation_token_ids: bool = NOT_SET
    """ask the engine for token ids in the reply"""
    return_token_id_information: bool = NOT_SET
    """return token ids and log-probabilities; the policy needs them, a judge does not"""
    sampling_overrides: Mapping[str, Any] | None = NOT_SET
    """sampling parameters put on every request"""
    sequential_reasoning_allowed: bool = NOT_SET
    """call the model again after a turn that was all reasoning"""
    show_vllm_engine_stats: bool = NOT_SET
    """log the engine's statistics"""
    supports_principle_role: bool = NOT_SET
    """the chat template has a role for the principle"""
    uses_interleaved_reasoning: bool = NOT_SET
    """reasoning may stand between tool calls"""
    uses_reasoning_parser: bool = NOT_SET
    """the engine separates reasoning from the answer"""
    vllm_serve_env_vars: Mapping[str, Any] | None = NOT_SET
    """environment of the engine"""
    vllm_serve_kwargs: Annotated[Mapping[str, Any], Entry("engine_arguments")] = NOT_SET
    """engine arguments of vLLM"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleAgent(AnyServer):
    """Model calls and tool calls until there is an answer."""

    max_steps: Annotated[int | None, Ge(1), Unit("model calls")] = NOT_SET
    """model calls of one rollout at most; null = no limit"""
    model_server: Reference = NOT_SET
    """model server that it samples from"""
    resources_server: Reference = NOT_SET
    """resources server that scores its rollouts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSimulationAgent(AnyServer):
    """One model call; tools are not executed."""

    model_server: Reference = NOT_SET
    """model server that it samples from"""
    resources_server: Reference = NOT_SET
    """resources server that scores its rollouts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAgent(AnyServer):
    """An agent program at a URL; its model calls are captured and trained."""

    history: Literal["keep", "template"] = "keep"
    """keep = sampled ids stay in later prompts; template = a prompt that the template shows otherwise forks"""
    max_steps: Annotated[int, Ge(1), Unit("model calls")] = NOT_SET
    """model calls of one rollout at most"""
    model_server: Reference = NOT_SET
    """model server that it samples from"""
    resources_server: Reference = NOT_SET
    """resources server that scores its rollouts"""
    timeout_seconds: Annotated[float, Gt(0), Unit("seconds")] = 3600.0
    """a rollout that takes longer ends without a reward"""
    train: Literal["all", "main"] = "all"
    """all = every conversation of a rollout is trained; main = only the one with the most calls"""
    url: str = NOT_SET
    """address of the agent's server, http://host:port; each row is posted to /run"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRefinementAgent(AnyServer):
    """Attempts at a proof with the compiler's messages."""

    include_all_attempts: bool = NOT_SET
    """return every attempt beside the last"""
    max_correction_turns: Annotated[int, Ge(0), Unit("turns")] = 2
    """attempts at a failed proof after the first"""
    model_server: Reference = NOT_SET
    """model server that it samples from"""
    resources_server: Reference = NOT_SET
    """resources server that scores its rollouts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweAgents(AnyServer):
    """An agent that edits a repository in its container; hidden tests decide."""

    agent_config: str | None = NOT_SET
    """configuration file of the harness; null = its default"""
    agent_framework: Literal["openhands", "opencode", "mini-swe-agent", "openhands-ai"] = "openhands"
    """harness that drives the agent, or an agent program"""
    agent_framework_commit: Text = NOT_SET
    """commit of the harness"""
    agent_framework_repo: str | None = NOT_SET
    """repository of the harness; null = its own default"""
    agent_max_turns: Annotated[int, Ge(1), Unit("turns")] = 100
    """turns of one task at most"""
    agent_prompt_override_random: bool = False
    """draw the variant anew per rollout; false = the same for all rollouts of a task"""
    agent_prompt_overrides: tuple[Mapping[str, Any], ...] | None = NOT_SET
    """prompts, agent class and tool names of each harness variant; one is drawn per task"""
    agent_tools_file: str | None = NOT_SET
    """file with further tools; null = none"""
    apptainer_memory_limit_mb: Annotated[int, Unit("MiB")] = 32768
    """memory of one container, all its processes together; 0 or less = no limit"""
    command_exec_timeout: Annotated[int, Ge(1), Unit("seconds")] = 300
    """limit of one command of the agent"""
    concurrency: Annotated[int, Ge(1), Unit("tasks")] = 256
    """tasks at once"""
    container_folder_path: str | None = NOT_SET
    """where containers keep their files; null = the harness's default"""
    container_formatter: str | tuple[Text, ...] = NOT_SET
    """images of a task, tried in order; {instance_id} is the row's"""
    dataset_path: str | None = NOT_SET
    """rows that the harness looks tasks up in"""
    debug: bool = NOT_SET
    """keep everything that a task writes"""
    memory_watchdog_enabled: bool = NOT_SET
    """end containers that exceed it"""
    memory_watchdog_poll_interval_s: Annotated[float, Gt(0), Unit("seconds")] = NOT_SET
    """time between two looks at it"""
    model_server: Reference = NOT_SET
    """model server that it samples from"""
    openhands_should_log: bool = NOT_SET
    """keep the log of the harness"""
    swebench_agent_timeout: Annotated[int, Ge(1), Unit("seconds")] = 2700
    """limit of the agent in one task"""
    swebench_tests_timeout: Annotated[int, Ge(1), Unit("seconds")] = 1800
    """limit of the hidden tests of one task"""
    verify_golden_patch: bool = False
    """skip the agent and test the reference patch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenrmModel(AnyModelServer):
    """A generative reward model on nodes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalVllmModel(AnyModelServer):
    """A judge on nodes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModel(AnyModelServer):
    """A model server before engines that run already: the policy, or a judge given by address."""


AGENT_TYPES: Mapping[str, type] = {
    "simple_agent": SimpleAgent,
    "tool_simulation_agent": ToolSimulationAgent,
    "external_agent": ExternalAgent,
    "proof_refinement_agent": ProofRefinementAgent,
    "swe_agents": SweAgents,
}
MODEL_TYPES: Mapping[str, type] = {
    "genrm_model": GenrmModel,
    "local_vllm_model": LocalVllmModel,
    "vllm_model": VllmModel,
}
