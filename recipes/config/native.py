"""Which models the policy builds, as `architectures` of config.json names them. No torch: the launcher asks, too."""

ARCHITECTURES = ("Qwen3ForCausalLM",)
