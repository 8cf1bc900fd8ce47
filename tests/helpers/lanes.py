"""cases of a test → the few that ``make test`` runs; the others are left to ``make test-thorough``."""

import pytest


def few(kept, cases):
    """Cases for ``pytest.mark.parametrize``: those that are not among the kept ones get the marker ``thorough``."""
    assert all(case in cases for case in kept)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in kept else pytest.mark.thorough
        )
        for case in cases
    ]
