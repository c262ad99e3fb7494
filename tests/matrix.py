"""Cases of which a run of the suite takes some, and one with `--all-cells` or `--full` all."""

import pytest


def thinned(cases, keep):
    """Returns the cases as parameters; those that `keep` refuses run with `--all-cells` or `--full`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if keep(*case) else pytest.mark.matrix) for case in cases]
