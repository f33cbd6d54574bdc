"""Containers of tasks in repositories: see `runtime.py`."""
