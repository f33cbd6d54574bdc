"""What the native engine has, as plain data: the launcher and the rules ask without loading torch or a verifier.

recipes/environments reads the types of agent server from here; a test compares the types of resources server with its
registry.
"""

from __future__ import annotations

# Models that the policy builds, as `architectures` of config.json names them.
ARCHITECTURES = ("NemotronHForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
RESOURCES_TYPES = (  # resources servers
    "calendar",
    "code_gen",
    "equivalence_llm_judge",
    "genrm_compare",
    "instruction_following",
    "inverse_if",
    "jailbreak_detection",
    "math_formal_lean",
    "math_with_judge",
    "mcqa",
    "multichallenge",
    "ns_tools",
    "over_refusal_detection",
    "reasoning_gym",
    "single_step_tool_use_with_argument_comparison",
    "structured_outputs",
    "swerl_gen",
    "workplace_assistant",
)
EXTERNAL_AGENT = "external_agent"  # at a URL
# Agent servers, of recipes/environments/instances.py.
AGENT_TYPES = (EXTERNAL_AGENT, "proof_refinement_agent", "simple_agent", "swe_agents", "tool_simulation_agent")
