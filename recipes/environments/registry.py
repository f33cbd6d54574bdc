"""All verifiers, and the routing of a row to one of them by its `agent_ref.name`.

To add a verifier: write its module in `verifiers/` (`contract/verifier.py` says what it declares), add its line to
VERIFIERS, or to GROUP_VERIFIERS when it scores all answers of a group together, and take its agents out of
LATER_AGENTS.
"""

from __future__ import annotations

from collections.abc import Mapping

from recipes.environments.contract.group import GroupVerifier
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.environments.verifiers import (
    calendar,
    code_gen,
    equivalence_llm_judge,
    genrm_compare,
    instruction_following,
    inverse_if,
    jailbreak_detection,
    math_formal_lean,
    math_with_judge,
    mcqa,
    multichallenge,
    ns_tools,
    over_refusal_detection,
    reasoning_gym,
    single_step_tool_use_with_argument_comparison,
    structured_outputs,
    swerl_gen,
    workplace_assistant,
)
from recipes.errors import suggestion

VERIFIERS: Mapping[str, Verifier] = {
    "calendar": calendar.VERIFIER,
    "code_gen": code_gen.VERIFIER,
    "equivalence_llm_judge": equivalence_llm_judge.VERIFIER,
    "instruction_following": instruction_following.VERIFIER,
    "inverse_if": inverse_if.VERIFIER,
    "jailbreak_detection": jailbreak_detection.VERIFIER,
    "math_formal_lean": math_formal_lean.VERIFIER,
    "math_with_judge": math_with_judge.VERIFIER,
    "mcqa": mcqa.VERIFIER,
    "multichallenge": multichallenge.VERIFIER,
    "ns_tools": ns_tools.VERIFIER,
    "over_refusal_detection": over_refusal_detection.VERIFIER,
    "reasoning_gym": reasoning_gym.VERIFIER,
    "single_step_tool_use_with_argument_comparison": single_step_tool_use_with_argument_comparison.VERIFIER,
    "structured_outputs": structured_outputs.VERIFIER,
    "swerl_gen": swerl_gen.VERIFIER,
    "workplace_assistant": workplace_assistant.VERIFIER,
}

GROUP_VERIFIERS: Mapping[str, GroupVerifier] = {"genrm_compare": genrm_compare.VERIFIER}

ALL_VERIFIERS: Mapping[str, Verifier | GroupVerifier] = {**VERIFIERS, **GROUP_VERIFIERS}

CODING = "coding"  # the kind of agents on repositories: hidden tests score them, no server does
CODING_AGENTS = ("swe_agents_train", "swe_agents_val")

AGENTS: Mapping[str, Agent] = {
    **{name: agent for verifier in ALL_VERIFIERS.values() for name, agent in verifier.agents.items()},
    **{name: Agent(kind=CODING, server="") for name in CODING_AGENTS},
}

LATER_AGENTS = frozenset(
    {
        "lc_judge_simple_agent",
        "search_pivot_tool_simulation_agent",
        "swe_pivot_tool_simulation_agent",
        "toolcall_schema_tool_simulation_agent",
    }
)


def find_agent(name: str, configured: Mapping[str, Agent]) -> Agent:
    """Return the agent of a name, configured ones first; raises `ValueError` saying why there is none."""
    agent = configured.get(name) or AGENTS.get(name)
    if agent is not None:
        return agent
    if name in LATER_AGENTS:
        raise ValueError(f"agent '{name}' comes with a later release; remove its rows from the blend")
    raise ValueError(f"unknown agent '{name}'; {suggestion(name, {*AGENTS, *configured})}")
