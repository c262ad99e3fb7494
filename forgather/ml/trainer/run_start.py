"""How a run starts: by whom, in how many processes, and whether these are as many as its config asks for.

Takes what a config asked for while the trainer was made; gives a line for people, or an error. Keeps true: a run of
fewer processes than were asked for does not begin without a word.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from forgather import launcher_env
from forgather.errors import DistributedError
from forgather.ml.distributed.env import count_of, who_started
from forgather.ml.log import get_logger

_log = get_logger(__name__)


class RunStart:
    """What is known of a run's start when its trainer is made."""

    def __init__(self) -> None:
        self._wish = launcher_env.wish.get()

    def begin(self, world_size: int, device: torch.device, layout: Sequence[str] = ()) -> None:
        """Says how many processes train, on what, and who started them; once, however many there are.

        Args:
            world_size: how many.
            device: that of this process.
            layout: further lines: who holds what.

        Raises:
            DistributedError: FG776 where a config that asks for several processes was built in one, which nobody
                launched.
        """
        self._refuse_alone(world_size)
        on = device if world_size == 1 else device.type
        # A warning, since only these are seen where nobody has configured logging.
        _log.warning("processes  %d on %s, started by %s", world_size, on, who_started())
        for line in layout:
            _log.warning("%s", line)

    def _refuse_alone(self, world_size: int) -> None:
        wish = self._wish
        asked = count_of(wish.processes) if wish is not None else 1
        if wish is None or world_size > 1 or asked < 2:
            return
        name = wish.config.removesuffix(".yaml")
        at = f"-p {os.path.relpath(wish.project_dir)} " if wish.project_dir != os.getcwd() else ""
        raise DistributedError(
            f"this run is one process, and config {wish.config!r} asks for {asked} "
            f"(meta.nproc_per_node is {wish.processes}): a step would have fewer rows",
            code="FG776",
            hint=f"start it with `fgcli {at}-t {name} train`, or build it for one process: "
            f"Project({name!r}, ..., nproc_per_node=1)",
        )
