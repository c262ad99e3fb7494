"""The loaders of each stage, which come from the call of the trainer, from the data module or from the module.

The input is what a user gave and the hooks of the owners of data; the output is the loaders of a stage, each asked for
once, with the sampler of this rank. A stage for which the module has no step has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forgather.errors import TrainingError
from forgather.lightning import loaders
from forgather.lightning.hooks import overridden, unsupported
from forgather.lightning.scene import Scene
from forgather.ml.types import Topology

LOADER_OF = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
"""The hook that gives the loaders of each stage."""
STEP_OF = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""The step of each stage."""


class StageData:
    """The loaders of the stages of one module.

    Args:
        scene: the scene, whose module and limits are read.
        given: the loaders that were given to the trainer, by stage.
        datamodule: the data module, or None.
        topology: a function that returns the position of this rank.
        replaces_samplers: whether several ranks get samplers of their own rows.
    """

    def __init__(
        self,
        scene: Scene,
        given: Mapping[str, Any],
        datamodule: Any,
        topology: Callable[[], Topology],
        *,
        replaces_samplers: bool = True,
    ) -> None:
        self._scene, self._given, self._topology = scene, dict(given), topology
        self._replaces_samplers = replaces_samplers
        self.datamodule = datamodule
        self._held: dict[str, list[Any]] = {}

    def give(self, stage: str, given: Any, datamodule: Any) -> None:
        """Takes what a further call of the trainer is given: loaders of a stage, or a data module."""
        self._held.pop(stage, None)
        self._given[stage] = given
        self.datamodule = datamodule

    def train_loader(self) -> Any:
        """Returns the loader of the training data.

        Raises:
            TrainingError: FG802 if there is none; FG865 if there are several.
        """
        found = loaders.several(self._asked("train"))
        if not found:
            raise TrainingError(
                "there is no training data", code="FG802", hint="give fit a loader, or define train_dataloader"
            )
        if len(found) > 1:
            raise unsupported(f"fit is given {len(found)} training loaders", "join the data sets in one loader")
        return self._distributed(found[0], "train")

    def loaders(self, stage: str) -> list[Any]:
        """Returns the loaders of a stage; none if the module has no step for it, or if its limit is 0.

        Args:
            stage: "validate", "test" or "predict".
        """
        limits = self._scene.limits
        has_step = stage == "predict" or overridden(self._scene.module, STEP_OF[stage])
        limit = {"validate": limits.limit_val_batches, "test": limits.limit_test_batches}.get(stage, 1)
        if not has_step or not limit:
            return []
        if stage not in self._held:
            found = loaders.several(self._asked(stage))
            self._held[stage] = [self._distributed(one, stage) for one in found]
        return self._held[stage]

    def _asked(self, stage: str) -> Any:
        if self._given.get(stage) is not None:
            return self._given[stage]
        for owner in (self.datamodule, self._scene.module):
            if owner is not None and overridden(owner, LOADER_OF[stage]):
                return getattr(owner, LOADER_OF[stage])()
        return None

    def _distributed(self, loader: Any, stage: str) -> Any:
        overfits = bool(self._scene.limits.overfit_batches) and stage in ("train", "validate")
        return loaders.prepared(loader, stage, self._topology(), replaces=self._replaces_samplers, overfits=overfits)
