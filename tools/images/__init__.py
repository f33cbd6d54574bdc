"""The container images of a run: how they are built, and which one a launch uses."""
