"""Records the public words of other tools: the parameters of their constructors and the keys of their files.

Words are read from the installed libraries, so that a release with a new word changes the record. Of DeepSpeed's
outermost level, the words are those that its config reads from a mapping that notes every access.

Usage:
    DS_ACCELERATOR=cpu PYTHONPATH=FOLDER python scripts/oracles/word_lists.py [TOOL ...]

Writes tests/words/recorded/words.json: for each tool its version, and the words of each place where they are written.
FOLDER has Lightning in it. Without names, the words of all tools are recorded.
"""

import dataclasses
import inspect
import json
import sys
from importlib.metadata import version
from pathlib import Path

RECORD = Path(__file__).parents[2] / "tests/words/recorded/words.json"
OF_CALLERS = {"self", "args", "kwargs"}


def parameters(constructor):
    found = inspect.signature(constructor.__init__ if isinstance(constructor, type) else constructor).parameters
    return [name for name in found if name not in OF_CALLERS]


def fields(of):
    return [field.name for field in dataclasses.fields(of)]


def transformers():
    from transformers import Trainer, TrainingArguments

    return {"TrainingArguments": fields(TrainingArguments), "Trainer": parameters(Trainer)}


def accelerate():
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import dataclasses as plugins

    named = """DataLoaderConfiguration GradientAccumulationPlugin FullyShardedDataParallelPlugin DeepSpeedPlugin
        TorchDynamoPlugin DistributedDataParallelKwargs InitProcessGroupKwargs GradScalerKwargs AutocastKwargs
        ProfileKwargs ProjectConfiguration TorchTensorParallelPlugin"""
    cluster = [name for name in fields(ClusterConfig) if not name.startswith("tpu_")]
    options = {action.dest for action in launch_command_parser()._actions}
    return {
        "Accelerator": parameters(Accelerator),
        **{name: fields(getattr(plugins, name)) for name in named.split()},
        "ParallelismConfig": fields(ParallelismConfig),
        "config file": cluster,
        # The keys of the sections of a config file are the options of the launcher.
        "config file, fsdp_config": sorted(name for name in options if name.startswith("fsdp_")),
        "config file, deepspeed_config": sorted(
            {"deepspeed_config_file", "zero_stage", "gradient_accumulation_steps", "gradient_clipping"}
            | {name for name in options if name.startswith(("offload_", "zero3_", "deepspeed_"))}
        ),
    }


class Noted(dict):
    """A mapping that notes the keys that are asked for."""

    asked: set[str]

    def __init__(self, values):
        super().__init__(values)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __deepcopy__(self, memo):
        return self


def deepspeed():
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.activation_checkpointing import config as activations
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.swap_tensor import constants as aio
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = Noted({"train_batch_size": 1})
    DeepSpeedConfig(config)
    zero = "zero_optimization"
    models = {
        zero: DeepSpeedZeroConfig,
        f"{zero}.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        f"{zero}.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
    }
    return {
        "config": sorted(config.asked),
        # A field that another name sets is written under that name.
        **{
            place: sorted(field.alias or name for name, field in model.model_fields.items())
            for place, model in models.items()
        },
        "activation_checkpointing": keys_of_constants(activations, "ACT_CHKPT_"),
        "aio": keys_of_constants(aio, "AIO_"),
    }


def keys_of_constants(module, prefix):
    found = {
        value
        for name, value in vars(module).items()
        if name.startswith(prefix)
        and isinstance(value, str)
        and not name.endswith("_DEFAULT")
        and value.isidentifier()
        and value.islower()
    }
    return sorted(found - {"activation_checkpointing", "aio", "auto"})


def lightning():
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks, strategies
    from torch.nn.parallel import DistributedDataParallel

    modules = {
        "Trainer": pl.Trainer,
        "Trainer.fit": pl.Trainer.fit,
        **{name: getattr(strategies, name) for name in ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy")},
        "ModelParallelStrategy": strategies.ModelParallelStrategy,
        **{
            name: getattr(callbacks, name)
            for name in ("ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "GradientAccumulationScheduler")
        },
        "seed_everything": pl.seed_everything,
    }
    found = {place: parameters(one) for place, one in modules.items()}
    # The strategy hands further arguments on.
    found["DDPStrategy"] += [name for name in parameters(DistributedDataParallel) if name not in found["DDPStrategy"]]
    return found


TOOLS = {"transformers": transformers, "accelerate": accelerate, "deepspeed": deepspeed, "lightning": lightning}


def main(*names):
    """Writes the words of the named tools, and keeps those of others."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in names or TOOLS:
        recorded[name] = {"version": version(name), "words": TOOLS[name]()}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
