"""Is asynchronous training worth it, and what does our rollout path cost over plain vLLM: measured in one run."""
