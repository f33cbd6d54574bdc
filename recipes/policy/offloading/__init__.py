"""Optimizer state in the memory of the CPU: always, or for as long as log-probabilities are computed."""
