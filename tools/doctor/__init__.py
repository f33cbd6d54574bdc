"""Find everything that would end a planned launch, before anything is queued: one file per subject. No torch, no Ray.

A subject is a function from a `Launch` to findings. It checks what the launch has; `launch.py` and `contract.py` report
what is missing. A subject that fails itself becomes a finding, too.
"""
