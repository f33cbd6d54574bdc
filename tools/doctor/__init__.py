"""Find everything that would end a planned launch, before anything is queued: one file per subject. No torch, no Ray.

A subject is a function from a `Draft` to findings. It looks at what it is given, and at nothing where that is
missing: `draft.py` and the contract name what is missing. A subject that fails itself is a finding, too.
"""
