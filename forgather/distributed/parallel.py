"""A model on several devices: layers in one process, and tensor and pipeline parallelism in several processes.

Each class takes a model and devices; it gives an engine for `DistributedTrainer`, and the text of the config that
splits the model in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from forgather.distributed.arguments import COUNT, TEXT, devices_of, refuse_wrong
from forgather.distributed.engine import MODEL_VARIABLE, Engine, read_engine, refuse_other_processes
from forgather.distributed.script_config import ScriptConfig, yaml_text
from forgather.errors import TrainingError
from forgather.value_text import are_equal, shown

_PLACEMENT = "forgather.ml.layer_placement"
_KERNELS = "forgather.ml.kernels"


class ModelParallel:
    """The layers of a model on several devices of this process, one after the other.

    It is called as the model is. One device computes at a time; `PipelineParallel` lets all of them compute.

    Args:
        model: the module.
        devices: the devices, as numbers of accelerators or names of torch.
        strategy: "layer", the only one.

    Raises:
        TrainingError: FG811 if a device does not exist, or for another strategy.
    """

    def __init__(self, model: Any, devices: Sequence[int | str], strategy: str = "layer") -> None:
        if not are_equal(strategy, "layer"):
            known = {"tensor": "TensorParallel", "pipeline": "PipelineParallel"}
            instead = known.get(strategy) if isinstance(strategy, str) else None
            raise TrainingError(
                f"strategy is {shown(strategy)}",
                code="FG811",
                hint=f"use {instead}" if instead else "write strategy='layer'",
            ).about("strategy")
        self.devices = devices_of(devices)
        _refuse_other_model(model)
        self.model = import_module(_PLACEMENT).place_layers(model, self.devices)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # `parameters()`, `train()`, `state_dict()`: a loop uses the object in place of the model.
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def as_engine(self) -> Engine:
        """Returns the model for a trainer.

        Raises:
            TrainingError: FG811 if the layers are on several devices.
        """
        if len(set(self.devices)) > 1:
            raise TrainingError(
                f"the layers are on {len(set(self.devices))} devices of one process; a trainer moves a model to one",
                code="FG811",
                hint="train it in a loop of your own, or use PipelineParallel, which lets all devices compute",
            ).about("engine")
        return Engine(model=self.model, text=self._text, variables={MODEL_VARIABLE: self.model})

    def to_config(self) -> str:
        """Returns the text of the config whose model is placed in the same way."""
        return _text(Engine(model=self.model, text=self._text))

    @property
    def _text(self) -> str:
        devices = yaml_text(self.devices, "devices")
        return "\n".join(
            [f"!singleton:{_PLACEMENT}:place_layers@model", f"model: !var {MODEL_VARIABLE}", f"devices: {devices}"]
        )


class _SplitModel:
    """A model that is split over the processes of a run."""

    def __init__(self, model: Any, devices: Sequence[int | str], engine: dict[str, Any]) -> None:
        devices = devices_of(devices)
        _refuse_chosen_devices(devices)
        refuse_other_processes(len(devices), f"{type(self).__name__} with {len(devices)} devices")
        whole = read_engine(model)
        if whole.settings:
            raise TrainingError(
                f"the model of a {type(self).__name__} is a {type(model).__name__}, which splits it in another way",
                code="FG811",
                hint="write tensor_parallel_size and pipeline_parallel_size in the config of a DistributedTrainer",
            ).about("model")
        self.model = whole.model
        self.devices = list(devices)
        self._engine = Engine(
            model=whole.model,
            text=whole.text,
            variables=whole.variables,
            words=whole.words,
            optimizer=whole.optimizer,
            **engine,
        )

    def as_engine(self) -> Engine:
        """Returns the split model for a trainer."""
        return self._engine

    def to_config(self) -> str:
        """Returns the text of the config whose model is split in the same way."""
        return _text(self._engine, len(self.devices))


class TensorParallel(_SplitModel):
    """A model whose layers are sliced over processes, one for each device.

    Args:
        model: the module, or a callable that makes it.
        devices: the devices, one for each process.
        strategy: "tensor", the only one.
        plan: which layers are sliced and how: "auto" for the plan of the model, or a mapping from module names to
            styles.

    Raises:
        DistributedError: FG776 or FG704 if there is another number of processes than devices.
        TrainingError: FG811 for another strategy, or devices that are not the first ones.
    """

    def __init__(self, model: Any, devices: Sequence[int | str], strategy: str = "tensor", plan: Any = "auto") -> None:
        devices = devices_of(devices)
        if not are_equal(strategy, "tensor"):
            raise TrainingError(
                f"strategy is {shown(strategy)}", code="FG811", hint="write strategy='tensor', or use ModelParallel"
            ).about("strategy")
        super().__init__(model, devices, {"settings": {"tensor_parallel_size": len(devices), "tp_plan": plan}})


class PipelineParallel(_SplitModel):
    """A model whose layers are stages on processes, one process for each device.

    Args:
        model: the module, or a callable that makes it.
        devices: the devices, one for each process.
        stages: the number of stages, a multiple of the number of devices; by default one on each.
        schedule: the name of a schedule of torch.distributed.pipelining; by default GPipe, or interleaved 1F1B if a
            process has several stages.

    Raises:
        DistributedError: FG776 or FG704 if there is another number of processes than devices.
        TrainingError: FG811 if the number of stages is no multiple of that of the devices.
    """

    def __init__(
        self, model: Any, devices: Sequence[int | str], stages: int | None = None, schedule: str | None = None
    ) -> None:
        devices = devices_of(devices)
        refuse_wrong(locals(), {"stages": COUNT, "schedule": TEXT})
        stages = len(devices) if stages is None else stages
        each, rest = divmod(stages, max(1, len(devices)))
        if rest or each < 1:
            raise TrainingError(
                f"stages is {stages}, and there are {len(devices)} devices",
                code="FG811",
                hint=f"write stages={len(devices)} or another multiple of it",
            ).about("stages")
        settings = {
            "pipeline_parallel_size": len(devices),
            "split_spec": stages,
            "stages_per_rank": each,
            "schedule_class": schedule or ("ScheduleGPipe" if each == 1 else "ScheduleInterleaved1F1B"),
        }
        super().__init__(model, devices, {"template": "pipeline_trainer", "settings": settings})


def register_custom_kernel(name: str, **words: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that registers a function as a kernel; see `forgather.ml.kernels:register_custom_kernel`.

    Args:
        name: the name of the operation.
        **words: `reference`, a function that computes the same with torch operations, which is needed; `device_types`
            and `tolerance`.

    Raises:
        TrainingError: FG788 if there is no reference, or the name is taken.
    """
    register: Callable[..., Callable[[Callable[..., Any]], Any]] = import_module(_KERNELS).register_custom_kernel
    return register(name, **words)


def _text(engine: Engine, processes: int = 1) -> str:
    return ScriptConfig(
        name="parallel",
        template=engine.template,
        processes=processes,
        settings=engine.settings,
        blocks={"model": engine.text, "train_dataset": "!var train_dataset"},
    ).text


def _refuse_other_model(model: Any) -> None:
    if not hasattr(type(model), "named_modules"):
        raise TrainingError(
            f"the model is a {type(model).__name__}", code="FG801", hint="give a torch.nn.Module"
        ).about("model")


def _refuse_chosen_devices(devices: Sequence[int | str]) -> None:
    """Raises FG811 for devices that a process does not take by its local rank."""
    numbers = [device for device in devices if isinstance(device, int)]
    if numbers and numbers != list(range(len(devices))):
        chosen = ",".join(map(str, numbers))
        raise TrainingError(
            f"devices is {shown(list(devices))}, and each process takes the accelerator of its local rank",
            code="FG811",
            hint=f"set CUDA_VISIBLE_DEVICES={chosen}, and write devices={list(range(len(devices)))}",
        ).about("devices")
