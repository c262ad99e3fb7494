"""Cases of which a run of the suite takes some, and `--all-cells` all."""

import pytest


def thinned(cases, keep):
    """Returns the cases as parameters; those that `keep` refuses belong to the whole matrix, and run with `--all-cells`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if keep(*case) else pytest.mark.matrix) for case in cases]
