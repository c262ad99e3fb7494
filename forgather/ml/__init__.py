"""The trainers and their training arguments, under the names that configs use.

Importing this package does not import torch: torch is imported with the first access to one of the names. No module
under forgather/ml imports forgather.config.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.ml.strategy.pipeline.split import get_split_spec
    from forgather.ml.trainer.accel import AccelTrainer
    from forgather.ml.trainer.arguments import TrainingArguments
    from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments, PipelineTrainingArguments
    from forgather.ml.trainer.pipeline import PipelineTrainer
    from forgather.ml.trainer.trainer import Trainer

__all__ = [
    "AccelTrainer",
    "AccelTrainingArguments",
    "PipelineTrainer",
    "PipelineTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "get_split_spec",
]

_LAZY = {
    "AccelTrainer": "forgather.ml.trainer.accel",
    "AccelTrainingArguments": "forgather.ml.trainer.parallel_arguments",
    "PipelineTrainer": "forgather.ml.trainer.pipeline",
    "PipelineTrainingArguments": "forgather.ml.trainer.parallel_arguments",
    "Trainer": "forgather.ml.trainer.trainer",
    "TrainingArguments": "forgather.ml.trainer.arguments",
    "get_split_spec": "forgather.ml.strategy.pipeline.split",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
