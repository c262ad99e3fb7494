"""Lightning's words and modules, run by our trainers, under the names that scripts use.

`import forgather.lightning as L` takes the place of `import lightning as L`. Importing this package does not import
torch: each public name imports its module when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "Callback": "module",
    "DDPStrategy": "strategies",
    "DeepSpeedStrategy": "strategies",
    "EarlyStopping": "callbacks",
    "FSDPStrategy": "strategies",
    "GradientAccumulationScheduler": "callbacks",
    "LearningRateMonitor": "callbacks",
    "LightningDataModule": "module",
    "LightningModule": "module",
    "ModuleRun": "module_run",
    "ModelCheckpoint": "callbacks",
    "Timer": "callbacks",
    "Trainer": "trainer",
    "TrainerWords": "trainer_words",
    "load_from_checkpoint": "checkpoints",
    "read_words": "words",
    "seed_everything": "seeds",
}

__all__ = sorted(_LAZY)  # noqa: PLE0605


# PEP 562: `fgcli check` reads this package, and must not import torch.
def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        # An error of ours for a class of Lightning: `from ... import` would replace the message of an AttributeError.
        import_module(f"{__name__}.trainer_words").refuse_class(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
