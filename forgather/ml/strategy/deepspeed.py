"""The strategy that trains with DeepSpeed's ZeRO engine.

The engine shards the optimizer state, from stage 2 also the gradients, and at stage 3 also the weights. Losses and
updates equal those of one process. There is no fallback to another engine. The trainer, and not DeepSpeed, controls the
optimizer, the learning rate schedule, gradient accumulation and clipping. A captured state has the names and shapes of
the whole model, so that any other strategy can resume from it.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.optim import Optimizer

from forgather.errors import DistributedError, TrainingError, first_line, nearest
from forgather.ml.bitsandbytes_optim import refuse_shards
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.collectives import require_equal_weights
from forgather.ml.distributed.env import DistributedEnvironment, accelerator_for_deepspeed, export_local_rank
from forgather.ml.distributed.layout import Layout
from forgather.ml.log import get_logger
from forgather.ml.losses import LossRule
from forgather.ml.low_bit_optim import refuse_untested
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.deepspeed_config import zero_config
from forgather.ml.strategy.deepspeed_settings import ZeroConfig, optimizer_settings, refuse_differences
from forgather.ml.strategy.deepspeed_state import EngineState, fill_stage_3
from forgather.ml.strategy.gradients import sum_over_group
from forgather.ml.strategy.initial_weights import InitialWeights, build_whole, make_initial_weights
from forgather.ml.strategy.model_strategy import to_device
from forgather.ml.strategy.shapes_only import has_shapes_only
from forgather.ml.strategy.state import local_state, names_of, on_host
from forgather.ml.strategy.topology import topology_of
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.types import Evaluated, Update, Window
from forgather.redaction import hidden

_log = get_logger(__name__)

_WHOLE_TENSORS = ("adafactor", "muon", "lamb", "lars", "shampoo", "soap", "galore", "lbfgs", "sparseadam")
"""Optimizers that need whole weights: on the flat slices of ZeRO their updates would be different."""

_SAID_BY_DESIGN = ("Setting accelerator to CPU", "**** You are using ZeRO with an untested optimizer")


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Returns False for log lines in which DeepSpeed reports a choice of this module, and True for all others."""
    return not record.getMessage().startswith(_SAID_BY_DESIGN)


def import_deepspeed(device_type: str) -> Any:
    """Imports and returns the module `deepspeed`, set up for a type of device.

    Args:
        device_type: the type of the device that this rank computes on.

    Raises:
        DistributedError: FG740 if deepspeed is not installed.
    """
    logging.getLogger("DeepSpeed").addFilter(_is_unexpected)
    # DeepSpeed calls collectives that torch has deprecated, and a user cannot change that.
    warnings.filterwarnings("ignore", message=r".*torch.distributed.\w+_tensor. is deprecated", category=FutureWarning)
    try:
        with accelerator_for_deepspeed(device_type):
            module = import_module("deepspeed")
    except ImportError as error:
        if error.name not in (None, "deepspeed"):
            raise
        raise DistributedError(
            "the training arguments ask for deepspeed, and it is not installed",
            code="FG740",
            hint="pip install 'forgather[deepspeed]', or set strict: false, with which FSDP2 takes its place",
        ) from None
    # On a CPU DeepSpeed compiles a shared-memory operation at the first start, in every process at once. If that start
    # is killed, it leaves a lock that all later ones wait for forever. gloo does not need the operation.
    module.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for handler in module.utils.logger.handlers:
        # Its log goes to the standard output, which is for results.
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    return module


def deepspeed_strategy(environment: DistributedEnvironment, args: Any, **accelerator: Any) -> DeepSpeedZero:
    """Returns the strategy for training arguments with the setting `deepspeed`.

    Args:
        environment: the rank, the world size and the process group.
        args: the training arguments.
        **accelerator: the settings `scaling`, `sync_each_batch` and `ddp` of the other strategies, which are ignored.

    Raises:
        TrainingError: FG741 to FG744 if the DeepSpeed config cannot be used.
        DistributedError: FG740 if deepspeed is not installed.
    """
    layout = Layout.for_world(environment.world_size, data=args.data_parallel_size, tensor=args.tensor_parallel_size)
    if layout.pipeline_parallel_size * layout.tensor_parallel_size > 1:
        raise TrainingError(
            f"deepspeed shards weights over data-parallel ranks only, and the layout has pipeline_parallel_size "
            f"{layout.pipeline_parallel_size} and tensor_parallel_size {layout.tensor_parallel_size}",
            code="FG744",
            hint="set fsdp: full_shard instead of deepspeed, or both sizes to 1",
        )
    on_cpu = args.use_cpu or environment.device.type == "cpu"
    try:
        config = zero_config(args.deepspeed, args, processes=layout.data_parallel_size, on_cpu=on_cpu)
    except TrainingError as error:
        # An error in a file has a place already: the line of the file.
        raise error if error.span is not None else error.about("args.deepspeed") from None
    return DeepSpeedZero(environment, layout, config=config, use_cpu=args.use_cpu, record_in=args.logging_dir)


class DeepSpeedZero:
    """The strategy of DeepSpeed's ZeRO.

    Args:
        environment: the rank, the world size and the process group.
        layout: the sizes of the mesh axes. Only the data-parallel axis may be larger than 1.
        config: the DeepSpeed config, in which missing values were filled in from the training arguments.
        use_cpu: True to compute on the CPU even if there is an accelerator.
        record_in: the folder for a copy of the config that the engine gets. None to write no copy.

    Raises:
        DistributedError: FG740 if deepspeed is not installed.
    """

    title = "DeepSpeed"
    builds_on_meta = False  # below stage 3 the model is made with values
    parts = 1
    model: nn.Module
    view: nn.Module
    rule: LossRule
    optimizer: Optimizer | None = None
    skips_on_device = False  # the engine steps, and knows no flag

    def __init__(
        self,
        environment: DistributedEnvironment,
        layout: Layout,
        *,
        config: ZeroConfig,
        use_cpu: bool = False,
        record_in: str | Path | None = None,
    ) -> None:
        device_type = "cpu" if use_cpu else environment.device.type
        self._deepspeed = import_deepspeed(device_type)
        device = environment.start(use_cpu=use_cpu)
        self.topology = topology_of(environment, layout, device)
        self._facts = environment.facts_on(device)
        self.config = config
        # DeepSpeed splits weights at stage 3 without DTensors.
        self.slices_per_weight = self.topology.dp_size if config.stage == 3 else 1
        self.forward_is_collective = config.stage == 3
        self.layout = replace(layout, shard_size=layout.data_parallel_size)
        self._record_in = record_in
        self._engine: Any = None
        self._state: EngineState | None = None
        self._initial: InitialWeights | None = None

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule, and applies the recipe's `prepare` steps.

        At stage 3 the model is on the meta device, and its weights are filled when the engine starts.
        """
        # The engine copies the weights when it starts, before a checkpoint is read.
        recipe = self._recipe = replace(recipe, is_resumed=None)
        if self.config.stage == 3:
            self._initial = make_initial_weights(recipe, self.topology)
            self.model = self._initial.on_meta()
            if active_fake_mode() is not None:
                # Nothing else fills fake weights: the engine slices them when it starts.
                self._initial.fill(self.model)
            self._refuse_double()
        else:
            self.model = build_whole(recipe, replace(self.topology, device=torch.device("cpu")))
            require_equal_weights({name: weight.shape for name, weight in self.model.named_parameters()})
            self._refuse_double()
            self.model = self.model.to(self.topology.device)
        self.view = self.model
        self.rule = recipe.make_rule(self.model)
        for step in recipe.prepare:
            step(self.model)
        for note in self.config.notes:
            _log.warning("deepspeed: %s", note)

    def make_unset_weights(self) -> None:
        """Does nothing: the weights are always made."""

    def _refuse_double(self) -> None:
        double = next((name for name, weight in self.model.named_parameters() if weight.dtype == torch.float64), None)
        if double is not None:
            raise TrainingError(
                f"{double} is float64, and DeepSpeed keeps weights in float32",
                code="FG744",
                hint="make the model in float32, or leave deepspeed out",
            )

    def build_optimizer(self) -> Optimizer:
        """Returns the optimizer. The first call makes it and the engine; a later call resets the optimizer's state."""
        if self._engine is None:
            self._start_engine()
        elif self._state is not None:
            self._state.reset_optimizer()
        assert self.optimizer is not None  # noqa: S101 - the engine has one
        return self.optimizer

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Raises an error: the engine keeps its own copies of the weights.

        Raises:
            TrainingError: FG814, always.
        """
        raise TrainingError(
            "the weights of a DeepSpeed engine cannot be frozen or averaged during a run",
            code="FG814",
            hint="leave deepspeed out, or freeze without until and average no weights",
        )

    def trained_parameters_changed(self) -> None:
        """Does nothing: `trained_parameters` refuses all changes."""

    def _start_engine(self) -> None:
        ours = self._recipe.make_optimizer(self.model)
        _refuse_whole_tensor_optimizer(ours)
        refuse_untested(ours, "under DeepSpeed")
        refuse_differences(self.config, list(optimizer_settings(type(ours).__name__, ours.defaults)), "the trainer")
        self.config = self.config.filled_for_model(_hidden_size(self.model))
        # The engine gets the trainer's optimizer, and the trainer steps the schedule; DeepSpeed would make others.
        ours_alone = ("optimizer", "scheduler")
        settings = {name: value for name, value in self.config.config.items() if name not in ours_alone}
        self._check_schema(settings)
        self._record(settings)
        names = names_of(self.model)
        groups = [[names[id(weight)] for weight in group["params"]] for group in ours.param_groups if group["params"]]
        export_local_rank(self._facts)
        try:
            with accelerator_for_deepspeed(self.topology.device.type), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                if self._initial is not None:
                    fill_stage_3(self.model, self._initial, self._deepspeed, settings, self.topology.device)
                    self._initial = None
                self._engine, *_ = self._deepspeed.initialize(
                    model=self.model, optimizer=ours, config=settings, dist_init_required=False
                )
        except (AssertionError, ValueError, self._deepspeed.runtime.zero.utils.ZeRORuntimeException) as error:
            raise TrainingError(
                f"DeepSpeed refuses its config: {first_line(error)[:200]}",
                code="FG741",
                hint=f"check {self.config.source}, and the values filled in from the training arguments",
            ).about("args.deepspeed") from error
        zero = self._engine.optimizer
        self.optimizer = zero.optimizer
        self._state = EngineState(self._deepspeed, self.model, zero, stage=self.config.stage, groups=groups)

    def _check_schema(self, settings: Mapping[str, Any]) -> None:
        schema = import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
        try:
            schema(**settings["zero_optimization"])
        except ValueError as error:
            listed = getattr(error, "errors", None)
            problems = listed() if callable(listed) else []
            first = problems[0] if problems else {"loc": (), "msg": str(error), "type": ""}
            name = ".".join(map(str, first["loc"]))
            known = [field.alias or key for key, field in schema.model_fields.items()]
            unknown = first["type"] == "extra_forbidden"
            what = f"zero_optimization has no setting {name!r}"
            raise TrainingError(
                what if unknown else f"zero_optimization.{name} is {first.get('input')!r:.80}: {first['msg']}",
                code="FG741",
                span=self.config.line_of("zero_optimization", *map(str, first["loc"])),
                hint=nearest(name, known) if unknown else None,
            ).about("args.deepspeed") from None

    def _record(self, settings: Mapping[str, Any]) -> None:
        if self._record_in is None or not self.topology.is_writer or has_shapes_only():  # a plan leaves no file
            return
        file = Path(self._record_in) / "deepspeed.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(hidden(settings), indent=2) + "\n", encoding="utf-8")
        _log.info("ZeRO stage %d; DeepSpeed's config, as filled from the arguments: %s", self.config.stage, file)

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window, and returns the part of the loss from this rank's batches; see `Strategy`.

        Shapes:
            Returns a scalar tensor.
        """
        path = getattr(self.rule, "path", None)
        if path is not None and path.is_undecided:
            with restored_train_modes(self.model):
                path.examine(self.model, window.batches[0], self.predict)
        if not self.model.training:
            self._engine.train()
        total = torch.zeros((), device=self.topology.device)
        last = len(window.batches) - 1
        for position, batch in enumerate(window.batches):
            self._engine.set_gradient_accumulation_boundary(position == last)
            loss = self.rule.total(self._engine, to_device(batch, self.topology.device), denom=denom) / denom
            # The engine takes the mean over processes, which undoes this factor. Its own division by the accumulation
            # steps is off: `denom` counts the targets of all micro-batches.
            self._engine.backward(loss * self.topology.dp_size, scale_wrt_gas=False)
            total = total + loss.detach()
            if after_micro_batch is not None and position != last:
                after_micro_batch()
        return total

    def share_of_squares(self) -> Tensor | None:
        """Returns None: the engine measures the norm."""
        return None

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
        squares: Tensor | None = None,
    ) -> Update:
        """Clips, steps and zeroes by one call of the engine; see `Strategy.update` for the arguments.

        Shapes:
            The gradient norm is a scalar tensor.
        """
        assert self._state is not None, "build_optimizer comes first"  # noqa: S101
        norm = self._state.norm() if max_norm > 0 or want_norm else None
        # With a scaled loss an overflow is not an error: the engine skips the update and lowers the scale.
        overflows = norm is not None and self._engine.fp16_enabled() and not bool(torch.isfinite(norm))
        if before_step(None if overflows else norm):
            self.discard()
            return Update(grad_norm=norm, skipped=True)
        self._engine.optimizer.clip_grad = max_norm
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        if not skipped:
            after_step()
        return Update(grad_norm=None if overflows else norm, skipped=skipped)

    def discard(self) -> None:
        """Drops the gradients."""
        if self._state is not None:
            self._state.drop_gradients()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Evaluated:
        """Returns the loss sum, the number of valid targets and the model's output for this rank's batch."""
        self._start_evaluation()
        total, output = self.rule.total_and_output(self._engine, to_device(batch, self.topology.device))
        return Evaluated(total, self.rule.count(batch), output)

    def evaluate_loss(self, batch: Any) -> Evaluated:
        """Returns what `evaluate` does."""
        return self.evaluate(batch)

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for this rank's batch, which may have no labels.

        Shapes:
            Returns the model's output.
        """
        self._start_evaluation()
        return self.rule.output(self._engine, to_device(batch, self.topology.device))

    @contextmanager
    def generating(self) -> Iterator[nn.Module]:
        """Context manager in which the `generate` of its value, the model, may be called; see `Strategy`."""
        self._start_evaluation()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield self.model

    def _start_evaluation(self) -> None:
        self._started_state()
        if self.model.training:
            self._engine.eval()

    def reduce(self, value: Any) -> Any:
        """Returns the sum of a value over all ranks."""
        return sum_over_group(value, None, self.topology.device) if self.topology.dp_size > 1 else value

    def capture(self) -> LocalState:
        """Returns the whole state on the main process, and an empty state on all other ranks.

        Collective: every rank must call it. The weights are gathered one by one.
        """
        keep = self.topology.is_writer
        state = on_host(self._started_state().weights(stored_only=True), keep=keep)
        optimizer = None if self._state is None else self._state.capture(keep=keep)
        return local_state(state, optimizer if keep else None)

    def restore(self, saved: CheckpointReader) -> None:
        """Restores the weights of a checkpoint. Collective: every rank must call it, and each rank reads all weights.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the weights of another model.
        """
        self._started_state().restore_model(saved)

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Restores the optimizer state of a checkpoint. It must be called after `restore`.

        Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the state of another optimizer.
        """
        if self._state is not None and saved.optimizer is not None:
            self._state.restore_optimizer(saved)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) for each entry in the model's state, one at a time, with sharded weights gathered.

        Collective: every rank must iterate to the end.
        """
        yield from self._started_state().weights()

    def _started_state(self) -> EngineState:
        """Returns the state of the engine, after starting the engine if it has not started yet."""
        if self._state is None:
            self._start_engine()
        assert self._state is not None  # noqa: S101 - made by the line above
        return self._state


def _refuse_whole_tensor_optimizer(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if any(word in name.lower() for word in _WHOLE_TENSORS):
        raise TrainingError(
            f"{name} needs whole weights, and ZeRO gives it flat slices of them",
            code="FG744",
            hint="use an elementwise optimizer such as torch.optim:AdamW, or leave deepspeed out",
        )
    refuse_shards(optimizer)
    if not type(optimizer).__module__.startswith(("torch.optim", "deepspeed.", "forgather.ml.bitsandbytes_optim")):
        _log.warning(
            "ZeRO gives %s flat slices of the weights: its updates equal those of one process only if it updates "
            "each element independently",
            name,
        )


def _hidden_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    found = getattr(config, "hidden_size", None) or getattr(getattr(config, "text_config", None), "hidden_size", None)
    return found if isinstance(found, int) else None
