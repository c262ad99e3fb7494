"""`seed_everything`, with Lightning's arguments.

The seed is kept in the environment variables that Lightning uses, so that the seed of either tool is the seed of a run.
"""

from __future__ import annotations

import os
import random
import re

import numpy as np
import torch

from forgather.ml.trainer.argument_checks import SettingError
from forgather.value_text import shown

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
    is_text = isinstance(given, str) and re.fullmatch(r"[0-9]{1,10}", given)
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not (is_text or is_number) or not 0 <= int(given) <= _LARGEST:
        hint = f"expected a whole number from 0 to {_LARGEST}"
        raise SettingError(f"seed_everything: seed is {shown(given)}", code="FG813", hint=hint)
    if not isinstance(workers, bool | int):
        raise SettingError(f"seed_everything: workers is {shown(workers)}", code="FG813", hint="expected true or false")
    found = int(given)
    os.environ[SEED], os.environ[_WORKERS] = str(found), str(int(bool(workers)))
    random.seed(found)
    # Libraries draw from NumPy's global generator.
    np.random.seed(found)
    torch.manual_seed(found)
    return found


def given_seed() -> int | None:
    """Returns the seed that `seed_everything` has set, ours or Lightning's; None if it was not called."""
    found = os.environ.get(SEED)
    return int(found) if found is not None and re.fullmatch(r"[0-9]{1,10}", found) else None
