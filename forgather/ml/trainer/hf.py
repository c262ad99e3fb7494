"""`transformers.Trainer` driven by the same factories as our own trainer.

Takes what `forgather.ml:Trainer` takes; gives a `transformers.Trainer` whose optimizer and schedule come from
the config's factories. Keeps true: without factories it is `transformers.Trainer` to the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from forgather.ml.losses import causal_lm_loss
from forgather.ml.trainer.factories import build_lr_scheduler, build_optimizer
