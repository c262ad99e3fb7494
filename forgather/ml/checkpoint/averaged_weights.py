"""Says that a checkpoint has averaged weights next to the trained ones, where its model is used.

Takes the folder of a verified checkpoint; logs one line if the run that wrote it had `ema_decay`. The model of a
checkpoint is that of the trained weights: the averaged ones are in the optimizer's part, and a run goes on with both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from forgather.ml.checkpoint.files import TRAINING_STATE
from forgather.ml.checkpoint.manifest import malformed_file, read_small_file
from forgather.ml.log import get_logger

_log = get_logger(__name__)


def warn_of_average(folder: Path) -> None:
    """Logs that a checkpoint also has averaged weights, if it has, which are not those of its model.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: FG611 if the state of the run cannot be read.
    """
    file = folder / f"{TRAINING_STATE}.json"
    try:
        state = json.loads(read_small_file(file)) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise malformed_file(file, f"{type(error).__name__}: {error!s:.80}") from None
    if isinstance(state, Mapping) and "average" in state:
        _log.warning(
            "%s also has averaged weights (ema_decay), and these are the trained ones; a run that is resumed to its "
            "end saves the averaged ones",
            folder,
        )
