"""Every clone gives the figures that are kept in tests/golden/expectations.json."""

from __future__ import annotations

import json

from tests.expectations import FILE, differences, measured


def test_figures_are_what_they_were():
    known, found = json.loads(FILE.read_text(encoding="utf-8")), measured()
    assert not differences(known, found), "look at each; `python -m tests.expectations --update` keeps them"
    for kind, least in (("advantages", 16), ("loss", 15), ("verdict", 60)):
        assert sum(name.startswith(kind) for name in known) >= least
    paid = [value[0] for name, value in known.items() if name.startswith("verdict") and name.endswith("right")]
    assert len(set(paid)) == 1 and paid[0] == 1.0  # a right answer earns all, whichever the verifier


def test_a_difference_is_found():
    assert differences({"a": [1.0, "x"]}, {"a": [1.0, "y"]}) == ["a: was [1.0, 'x'], is [1.0, 'y']"]
    assert differences({"a": 1.0}, {"a": 1.001}) and not differences({"a": 1.0}, {"a": 1.00001})
    assert differences({"a": 1.0}, {}) == ["a: was 1.0, is None"]
