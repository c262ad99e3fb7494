"""Records what Lightning makes of its own words, for the tests of `forgather.lightning` to compare with.

Usage:
    PYTHONPATH=build/oracles/lightning DS_ACCELERATOR=cpu python scripts/oracles/lightning_words.py

Writes tests/lightning/words.json: the version; the defaults of Lightning's Trainer; the names of its strategies; the
options of strategies and callbacks that `forgather.lightning.foreign` reads from Lightning's objects, with those that
were given; the DeepSpeed configs that Lightning makes; the names of checkpoints; the evaluation at which EarlyStopping
ends a run.
"""

import datetime
import functools
import inspect
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks, strategies
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

sys.path.insert(0, str(Path(__file__).parents[2]))
from forgather.lightning.foreign import given_of  # noqa: E402
from tests.lightning.word_cases import DEEPSPEED_OPTIONS, METRIC_COURSES, NAME_PATTERNS, STOPPING_OPTIONS  # noqa: E402

RECORD = Path(__file__).parents[2] / "tests/lightning/words.json"
OPTIONS = {
    "DDPStrategy": [
        {},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": True},
        {"bucket_cap_mb": 50, "broadcast_buffers": False},
        {"process_group_backend": "gloo", "timeout": datetime.timedelta(seconds=90), "start_method": "fork"},
        {"model_averaging_period": 2},
    ],
    "FSDPStrategy": [
        {},
        {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True, "state_dict_type": "sharded"},
        {"sharding_strategy": "NO_SHARD", "cpu_offload": CPUOffload(offload_params=True), "limit_all_gathers": False},
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4)},
        {"auto_wrap_policy": {nn.TransformerEncoderLayer}},
        {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})},
        {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=1000)},
        {"auto_wrap_policy": {nn.Linear}, "activation_checkpointing_policy": {nn.Linear}},
        {"activation_checkpointing": [nn.Linear]},
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ],
    "ModelCheckpoint": [
        {},
        {"dirpath": "/tmp/checkpoints", "filename": "model-{epoch:02d}", "save_last": True},
        {"monitor": "val_loss", "mode": "min", "save_top_k": 3, "save_weights_only": True},
        {"every_n_train_steps": 100, "save_top_k": -1, "save_on_train_epoch_end": True},
        {"every_n_epochs": 2, "enable_version_counter": False, "auto_insert_metric_name": False},
        {"train_time_interval": datetime.timedelta(minutes=30), "verbose": True, "save_on_exception": True},
    ],
    "EarlyStopping": [
        {"monitor": "val_loss"},
        {"monitor": "accuracy", "mode": "max", "min_delta": 0.01, "patience": 5, "strict": False},
        {"monitor": "val_loss", "stopping_threshold": 0.1, "divergence_threshold": 9.0, "check_finite": False},
    ],
    "LearningRateMonitor": [{}, {"logging_interval": "epoch", "log_momentum": True, "log_weight_decay": True}],
    "Timer": [{}, {"duration": "00:12:00:00", "interval": "epoch", "verbose": False}],
    "GradientAccumulationScheduler": [{"scheduling": {0: 8, 5: 4}}],
}


def plain(value):
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(one) for one in value]
        return sorted(items) if isinstance(value, set | frozenset) else items
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, datetime.timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, ModuleWrapPolicy):
        return plain(value._module_classes)
    if isinstance(value, functools.partial):
        return plain(value.keywords.get("transformer_layer_cls", value.keywords))
    if isinstance(value, MixedPrecision):
        types = {name: getattr(value, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
        return {name: str(one).removeprefix("torch.") for name, one in types.items() if one is not None}
    if isinstance(value, CPUOffload):
        return value.offload_params
    return value if isinstance(value, str | int | float | bool | type(None)) else repr(value)


def read_back(name):
    """Returns [(the options that were given, those that were read from the object)]."""
    kind = getattr(strategies, name, None) or getattr(callbacks, name)
    return [[plain(options), plain(given_of(kind(**options)).options)] for options in OPTIONS[name]]


def deepspeed_configs():
    return [[options, strategies.DeepSpeedStrategy(**options).config] for options in DEEPSPEED_OPTIONS]


def checkpoint_names():
    found = []
    for (pattern, values), inserts in itertools.product(NAME_PATTERNS, (True, False)):
        made = ModelCheckpoint(filename=pattern, auto_insert_metric_name=inserts)
        metrics = {name: torch.tensor(value) for name, value in values.items()}
        found.append([pattern, values, inserts, made.format_checkpoint_name(metrics)])
    return found


def stops():
    """Returns [(options, metrics, the number of the evaluation that ends the run)]."""
    found = []
    for options, course in itertools.product(STOPPING_OPTIONS, METRIC_COURSES):
        stopping = EarlyStopping("loss", **options)
        ended = None
        for number, value in enumerate(course):
            trainer = SimpleNamespace(
                callback_metrics={"loss": torch.tensor(value, dtype=torch.float64)},
                fast_dev_run=False,
                should_stop=False,
                current_epoch=number,
                strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
            )
            stopping._run_early_stopping_check(trainer)
            if trainer.should_stop:
                ended = number
                break
        found.append([options, [str(value) for value in course], ended])
    return found


def main() -> None:
    """Writes the record."""
    parameters = inspect.signature(pl.Trainer).parameters
    RECORD.write_text(
        json.dumps(
            {
                "version": pl.__version__,
                "defaults": {name: plain(one.default) for name, one in parameters.items()},
                "strategies": sorted(pl.strategies.StrategyRegistry.available_strategies()),
                "precisions": sorted({str(one) for one in PRECISIONS}),
                "callbacks": sorted(callbacks.__all__),
                "loggers": sorted(pl.loggers.__all__),
                "plugins": sorted(pl.plugins.__all__),
                "strategy_classes": sorted(strategies.__all__),
                "options": {name: read_back(name) for name in OPTIONS},
                "deepspeed": deepspeed_configs(),
                "names": checkpoint_names(),
                "stops": stops(),
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


def _precisions():
    from typing import get_args

    from lightning.fabric.connector import _PRECISION_INPUT

    def values(kind):
        inner = get_args(kind)
        return [one for part in inner for one in values(part)] if inner else [kind]

    return [one for one in values(_PRECISION_INPUT) if isinstance(one, str | int)]


PRECISIONS = _precisions()

if __name__ == "__main__":
    main()
