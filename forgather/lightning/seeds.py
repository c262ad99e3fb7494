"""`seed_everything`, with Lightning's arguments.

The seed is kept in the environment variables that Lightning uses, so that the seed of either tool is the seed of a run.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from forgather.ml.trainer.argument_checks import SettingError

SEED = "PL_GLOBAL_SEED"
"""The variable with the seed."""
_WORKERS = "PL_SEED_WORKERS"
_LARGEST = 2**32 - 1


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seeds the random numbers of Python, NumPy and torch, and the runs of this process; returns the seed.

    Args:
        seed: the seed; None takes that of the environment variable `PL_GLOBAL_SEED`, or 0.
        workers: whether data-loader workers are seeded. Those of our trainers always are.
        verbose: without effect; the seed is in the record of a run.

    Raises:
        SettingError: FG813 if the seed is not a whole number from 0 to 2**32 - 1.
    """
    given = os.environ.get(SEED, "0") if seed is None else seed
    if isinstance(given, bool) or not str(given).isdigit() or int(given) > _LARGEST:
        hint = f"expected a whole number from 0 to {_LARGEST}"
        raise SettingError(f"seed_everything: seed is {given!r}", code="FG813", hint=hint)
    found = int(given)
    os.environ[SEED], os.environ[_WORKERS] = str(found), str(int(workers))
    random.seed(found)
    # Libraries draw from NumPy's global generator.
    np.random.seed(found)
    torch.manual_seed(found)
    return found


def given_seed() -> int | None:
    """Returns the seed that `seed_everything` has set, ours or Lightning's; None if it was not called."""
    found = os.environ.get(SEED)
    return int(found) if found is not None and found.isdigit() else None
