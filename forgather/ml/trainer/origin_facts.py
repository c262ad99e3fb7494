"""What a manifest says of the run that wrote it: versions, layout of processes, and a digest of its settings.

Takes arguments and a strategy; gives plain data. Keeps true: two runs whose settings differ in places and names alone
have one digest, whatever machine and folder they ran in.
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import xxhash

from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.args import TrainingArguments
from forgather.ml.trainer.fingerprint import Fingerprint

# They say where and from where, and nothing of what is computed.
_PLACES = (
    "output_dir",
    "logging_dir",
    "run_name",
    "report_to",
    "project",
    "resume_from_checkpoint",
    "allow_missing",
    "allow_changed",
)


def origin_facts(strategy: Strategy, args: TrainingArguments, data: Fingerprint) -> dict[str, Any]:
    """Returns "versions", "layout", "config" and "data", see `Manifest`."""
    topology = strategy.topology
    return {
        "versions": {name: importlib.metadata.version(name) for name in ("forgather", "torch", "transformers")},
        "layout": {
            "world_size": topology.world_size,
            "dp_size": topology.dp_size,
            "strategy": type(strategy).__name__,
        },
        "config": _digest(strategy, args),
        "data": data.facts,
    }


def _digest(strategy: Strategy, args: TrainingArguments) -> str:
    settings = {name: value for name, value in args.to_dict().items() if name not in _PLACES}
    model = getattr(strategy.model, "stands_for", strategy.model)
    described: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    text = json.dumps({"arguments": settings, "model": described}, sort_keys=True, default=str)
    return xxhash.xxh3_128(text.encode()).hexdigest()
