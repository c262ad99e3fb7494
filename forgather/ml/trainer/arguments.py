"""`TrainingArguments`: every setting of a run, under transformers' names.

Takes keywords; gives a frozen record whose values fit together. Keeps true: building one reads no
device and starts no process group; what a logging callback of transformers reads from arguments
(`to_dict`, `to_sanitized_dict`, `process_index`, ...) is here. Defaults are those of transformers.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from forgather.ml.distributed.env import process_facts
from forgather.ml.run_dir import own_run_folder
from forgather.ml.trainer import argument_checks as door
from forgather.rules import Rules


@dataclass(kw_only=True, frozen=True, init=False)
class TrainingArguments:
    """Settings of a run. Unknown names, wrong types and settings that contradict one another are refused.

    Args:
        output_dir: where the model and `checkpoint-<step>` folders go.
        logging_dir: where callbacks write metrics; `<output_dir>/runs/<utc time>-<n>` by default, for this run alone.
        run_name: name of the run in trackers; the output folder by default.
        per_device_train_batch_size: rows of one micro-batch.
        per_device_eval_batch_size: rows of one evaluation batch; no result depends on it.
        gradient_accumulation_steps: micro-batches of one optimizer update.
        num_train_epochs: passes over the data; a fraction is allowed.
        max_steps: optimizer updates; where positive it overrides `num_train_epochs`.
        learning_rate: of the default optimizer, and of a factory that sets none itself.
        lr_scheduler_type: name of a schedule of transformers.
        lr_scheduler_kwargs: further arguments of the schedule.
        warmup_steps: optimizer updates of warm-up; below 1 a share of all steps.
        max_grad_norm: gradients are clipped to this norm; 0 turns clipping off.
        bad_step_policy: what becomes of a step whose loss or gradient norm is not finite, or spikes: "stop" ends the
            run before the update, "skip" leaves the update out, "rewind" goes back to the last checkpoint and leaves
            the rows of the step out.
        spike_threshold: a norm so many standard deviations above the mean of the last ones is a spike; None for no such
            thing.
        spike_window: how many norms a spike is told by, and how many steps `max_bad_steps` are counted among.
        max_bad_steps: how many steps are left out among `spike_window`; one more ends the run.
        label_smoothing_factor: of the token loss of causal language models.
        bf16: forward passes under bfloat16 autocast (FSDP2 gathers weights in bfloat16 instead); the loss is computed
            in float32.
        torch_compile_regions: compile the repeated blocks of the model and not the whole of it: equal blocks are
            compiled once, and each may be sharded by itself.
        gradient_checkpointing: recompute activations in the backward pass.
        logging_steps, eval_steps, save_steps: every so many updates; below 1 a share of all steps.
        save_minutes: a checkpoint also whenever so many minutes have passed since the last one.
        save_on_best: a checkpoint also where an evaluation is among the best `save_top_k`.
        save_total_limit: how many checkpoints stay; the best and the newest always do.
        save_top_k: how many of the best stay, by `metric_for_best_model`; alone, they and the newest.
        keep_every_n_steps: checkpoints of every so many steps stay for ever; `save_total_limit` does not count them.
        save_only_model: leave out what resuming needs.
        async_save: write checkpoints while the run goes on; it waits for a copy of weights and optimizer on the host.
        seed: of the model's weights and of everything random; `data_seed` of the shuffling alone.
        train_sampling_strategy: "random" or "sequential".
        resume_from_checkpoint: true or "auto" for the newest verified one, or a folder.
        allow_missing: parts of that checkpoint that may be missing, and begin anew then: "optimizer", "schedule",
            "data", "rng", "meter", "progress". Any other lack is an error.
        allow_changed: what may be another thing than when the checkpoint was written: "data" (rows), "tokenizer",
            "labels" (names of classes), "model" (settings that its weights depend on). Any other such change is an
            error.
        report_to: trackers of transformers ("tensorboard", "wandb", "mlflow", ...).

    Their values and what must hold among them are data: `forgather/ml/rules/trainer.json`.

    Raises:
        SettingError: FG810 to FG814.
    """

    RULES: ClassVar[Rules] = door.rules("trainer", "forgather.ml:TrainingArguments")
    """What holds for these settings; `fgcli check` reads the same file."""

    output_dir: str = "trainer_output"
    # Where records go changes nothing of a run: arguments that differ in it alone are equal.
    logging_dir: str | None = dataclasses.field(default=None, compare=False)
    run_name: str | None = None
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw_torch_fused"
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    max_grad_norm: float = 1.0
    bad_step_policy: str = "stop"
    spike_threshold: float | None = None
    spike_window: int = 128
    max_bad_steps: int = 10
    label_smoothing_factor: float = 0.0
    bf16: bool = False
    tf32: bool | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    torch_compile_regions: bool = False
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    report_to: Any = "none"
    project: str = "huggingface"
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_minutes: float | None = None
    save_on_best: bool = False
    save_total_limit: int | None = None
    save_top_k: int | None = None
    keep_every_n_steps: int | None = None
    save_only_model: bool = False
    async_save: bool = False
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    restore_callback_states_from_checkpoint: bool = False
    seed: int = 42
    data_seed: int | None = None
    use_cpu: bool = False
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    remove_unused_columns: bool = True
    train_sampling_strategy: str = "random"
    resume_from_checkpoint: bool | str | None = None
    allow_missing: Sequence[str] | None = None
    allow_changed: Sequence[str] | None = None

    def __init__(self, output_dir: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        if output_dir is not None:
            is_path = isinstance(output_dir, str | os.PathLike)
            settings["output_dir"] = os.path.expanduser(os.fspath(output_dir)) if is_path else output_dir
        fields = dataclasses.fields(self)
        settings = door.present_names(self.RULES, settings)
        object.__setattr__(self, "explicit", frozenset(settings))
        given = {name: _as_plain(value) for name, value in settings.items()}
        door.refuse(self.RULES.values(given))
        given = self._settled(given)
        whole = self.RULES.complete(given)
        for field in fields:
            object.__setattr__(self, field.name, whole[field.name])
        self._derive()
        door.refuse(self.RULES.broken(whole, given))

    explicit = frozenset[str]()
    """Names that the user gave."""

    def _settled(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings with those that stand inside of others."""
        return given

    def _derive(self) -> None:
        if self.logging_dir is None:
            object.__setattr__(self, "logging_dir", str(own_run_folder(self.output_dir)))
        saves_best = self.save_strategy == "best" or self.save_on_best or self.save_top_k is not None
        needs_metric = self.load_best_model_at_end or saves_best or self.schedule_follows_metric
        if needs_metric and self.metric_for_best_model is None:
            object.__setattr__(self, "metric_for_best_model", "loss")
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            object.__setattr__(self, "greater_is_better", not self.metric_for_best_model.endswith("loss"))
        trackers = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        object.__setattr__(self, "report_to", [name for name in trackers if name != "none"])
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None or self.torch_compile_regions:
            object.__setattr__(self, "torch_compile", True)
        for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and value >= 1:
                object.__setattr__(self, name, int(value))

    @property
    def schedule_follows_metric(self) -> bool:
        """True for a schedule that is stepped by evaluations and not by updates."""
        return self.lr_scheduler_type == "reduce_lr_on_plateau"

    @property
    def activation_checkpointing(self) -> bool:
        """transformers' newer name of `gradient_checkpointing`."""
        return self.gradient_checkpointing

    @property
    def train_batch_size(self) -> int:
        """Rows of one micro-batch."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Rows of one evaluation batch."""
        return self.per_device_eval_batch_size

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return process_facts().world_size

    @property
    def process_index(self) -> int:
        """Position among all processes."""
        return process_facts().rank

    @property
    def local_process_index(self) -> int:
        """Position among the processes of this machine."""
        return process_facts().local_rank

    @property
    def local_rank(self) -> int:
        """Position among the processes of this machine; -1 where there is one process, as in transformers."""
        return process_facts().local_rank if self.world_size > 1 else -1

    @property
    def n_gpu(self) -> int:
        """Number of accelerators that one process uses."""
        return 1

    @property
    def should_log(self) -> bool:
        """True on the process that logs."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """True on the process that writes files."""
        return self.process_index == 0

    def get_process_log_level(self) -> int:
        """Returns the numeric log level of this process."""
        return logging.getLogger().getEffectiveLevel()

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the number of warm-up updates of a run of `num_training_steps`."""
        if self.warmup_steps < 1:
            return math.ceil(num_training_steps * self.warmup_steps)
        return int(self.warmup_steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns every setting as plain data."""
        return {
            field.name: dict(value) if isinstance(value := getattr(self, field.name), Mapping) else value
            for field in dataclasses.fields(self)
        }

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns every setting as a number, a text, a yes or no: what trackers accept."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        plain = bool | int | float | str
        return {
            name: value if isinstance(value, plain) else str(value) for name, value in (self.to_dict() | sizes).items()
        }

    def to_json_string(self) -> str:
        """Returns every setting as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def replace(self, **settings: Any) -> Self:
        """Returns a copy with other values for some settings."""
        given = {name: getattr(self, name) for name in self.explicit}
        return type(self)(**{**given, **door.present_names(self.RULES, settings)})

    def __getattr__(self, name: str) -> Any:
        # Only missing names arrive here: a callback of transformers that asks for a setting which this trainer
        # does not have finds the value that stands for "not used".
        if name in door.TRANSFORMERS_DEFAULTS:
            return door.TRANSFORMERS_DEFAULTS[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _as_plain(value: Any) -> Any:
    return value.value if isinstance(value, IntervalStrategy | SaveStrategy | SchedulerType) else value


def signature_of(arguments: type[TrainingArguments]) -> inspect.Signature:
    """Returns the signature that tools show: every setting by name, and room for older spellings."""
    named = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if field.name == "output_dir" else inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in dataclasses.fields(arguments)
    ]
    return inspect.Signature([*named, inspect.Parameter("older_names", inspect.Parameter.VAR_KEYWORD)])


TrainingArguments.__signature__ = signature_of(TrainingArguments)  # type: ignore[attr-defined]
