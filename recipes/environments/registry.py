"""Which verifier scores which rows: two tables and the routing of a row by its `agent_ref.name`.

To add a verifier: write its module (a frozen Task, `parse_task`, `score`), add one line to VERIFIERS and one to
AGENTS, and take its agents out of LATER_AGENTS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipes.environments.verdict import Verifier
from recipes.environments.verifiers import math_with_judge, mcqa, reasoning_gym, structured_outputs
from recipes.errors import suggestion

VERIFIERS: Mapping[str, Verifier] = {
    "math_with_judge": Verifier(
        module=math_with_judge,
        class_name="LibraryJudgeMathResourcesServer",
        rewards=(0.0, 1.0),
        settings=frozenset({"should_use_judge"}),
        imports=("math_verify",),
    ),
    "mcqa": Verifier(
        module=mcqa,
        class_name="MCQAResourcesServer",
        rewards=(0.0, 1.0),
        settings=frozenset({"grading_mode"}),
        is_cheap=mcqa.is_cheap,
    ),
    "reasoning_gym": Verifier(
        module=reasoning_gym,
        class_name="ReasoningGymResourcesServer",
        rewards=(0.0, 1.0),
        imports=("reasoning_gym",),
    ),
    "structured_outputs": Verifier(
        module=structured_outputs,
        class_name="StructuredOutputsResourcesServer",
        rewards=(0.0, 1.0),
        imports=("openapi_schema_validator", "yaml", "xmltodict"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """How rows of one agent name are run, and the server instance that scores them."""

    kind: str  # a key of agents.AGENT_KINDS
    server: str


AGENTS: Mapping[str, Agent] = {
    "math_with_judge_simple_agent": Agent(kind="single_turn", server="math_with_judge"),
    "mcqa_simple_agent": Agent(kind="single_turn", server="mcqa"),
    "reasoning_gym_simple_agent": Agent(kind="single_turn", server="reasoning_gym"),
    "structured_outputs_simple_agent": Agent(kind="single_turn", server="structured_outputs"),
    "structured_outputs_v3_simple_agent": Agent(kind="single_turn", server="structured_outputs"),
    "structured_outputs_v4_simple_agent": Agent(kind="single_turn", server="structured_outputs"),
}

LATER_AGENTS = frozenset(
    {
        "calendar_simple_agent",
        "code_gen_simple_agent",
        "equivalence_llm_judge_simple_agent",
        "genrm_simple_agent",
        "genrm_simple_agent_reasoning_off",
        "instruction_following_simple_agent",
        "inverse_if_simple_agent",
        "jailbreak_detection_simple_agent",
        "jailbreak_engagement_with_disclaimer",
        "jailbreak_hard_refusal_no_redirection",
        "jailbreak_hard_refusal_with_helplines",
        "jailbreak_refusal_with_explanation",
        "lc_judge_simple_agent",
        "math_formal_lean_refinement_agent",
        "multichallenge_simple_agent",
        "ns_tools_simple_agent",
        "over_refusal_detection_simple_agent",
        "search_pivot_single_step_tool_use_with_argument_comparison_agent",
        "search_pivot_tool_simulation_agent",
        "single_step_tool_use_with_argument_comparison_agent",
        "swe_agents_train",
        "swe_agents_val",
        "swe_pivot_single_step_tool_use_with_argument_comparison_agent",
        "swe_pivot_tool_simulation_agent",
        "swerl_gen_simple_agent",
        "toolcall_schema_single_step_tool_use_with_argument_comparison_agent",
        "toolcall_schema_tool_simulation_agent",
        "workplace_assistant_simple_agent",
        "xstest_eval_agent",
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
