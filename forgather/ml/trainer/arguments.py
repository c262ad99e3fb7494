"""`TrainingArguments`: every setting of a run, under transformers' names.

`TrainingArguments` takes keyword arguments and is a frozen dataclass whose values do not contradict one another.
Building an instance accesses no device and starts no process group. The class has the attributes and methods that
transformers' logging callbacks use (`to_dict`, `to_sanitized_dict`, `process_index`, ...). The defaults are those of
transformers.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType

from forgather.accumulation import Accumulation, read_accumulation
from forgather.batch_triangle import SOLVED
from forgather.ml.distributed.env import process_facts
from forgather.ml.run_dir import own_run_folder
from forgather.ml.trainer import argument_checks
from forgather.rule_conditions import UNKNOWN
from forgather.rules import Rules
from forgather.value_text import can_be_path


@dataclass(kw_only=True, frozen=True, init=False)
class TrainingArguments:
    """The settings of a training run. Unknown names, wrong types and contradicting settings are errors.

    Args:
        output_dir: the folder for the final model and the `checkpoint-<step>` folders.
        logging_dir: the folder to which callbacks write metrics; by default a new `<output_dir>/runs/<utc time>-<n>`
            for each run.
        run_name: the name of the run in trackers; that of the run's folder by default.
        per_device_train_batch_size: the number of rows of one micro-batch on one data-parallel rank; None takes what
            follows from `global_batch_size`, or 8. In a config, `auto` is the largest number that fits, which
            `fgcli train` finds.
        auto_find_batch_size: whether `fgcli train` tries the batch on the devices before the run: all processes
            together compute two steps of the longest rows, and try fewer rows until the memory of all devices suffices.
        per_device_eval_batch_size: the number of rows of one evaluation batch on one data-parallel rank; metrics do not
            depend on this number.
        gradient_accumulation_steps: the number of micro-batches of one optimizer step; None takes what follows from
            `global_batch_size`, or 1.
        global_batch_size: the number of rows of one optimizer step: `per_device_train_batch_size` x
            `gradient_accumulation_steps` x data-parallel ranks. If one of the first two is missing, it is computed.
        accumulate_grad_batches: the number of micro-batches of one optimizer step where it changes: a mapping from the
            number of an epoch, counted from 0, to the number that applies from then on, as {0: 8, 5: 4}; or, with steps
            in place of epochs, {"steps": {0: 8, 1000: 4}}. `gradient_accumulation_steps` is then the largest number.
        num_train_epochs: the number of passes over the training data; may be a fraction.
        max_steps: the number of optimizer steps; a positive value overrides `num_train_epochs`.
        learning_rate: the learning rate of the default optimizer, and of an `optimizer_factory` that does not set one.
        weight_decay: the weight decay of the default optimizer, and of an `optimizer_factory` that does not set one.
            The default optimizer does not decay biases and normalization weights.
        adam_beta1, adam_beta2, adam_epsilon: the AdamW arguments of the default optimizer, if that is an AdamW.
        optim: the name of the default optimizer, which is used if no `optimizer_factory` is given.
        loraplus_lr_ratio: the learning rate of the weights B of a LoRA, as a multiple of the learning rate (LoRA+);
            None for one learning rate.
        loraplus_lr_embedding: the learning rate of the adapters of embeddings under LoRA+.
        parameter_groups: a list of mappings that give some of the parameters another `learning_rate`, another
            `weight_decay` or both. `pattern` says which: a name or a part of one, such as "embed_tokens", "layers.0" or
            "layers.[0-3].*|lm_head". The first pattern that matches a name counts.
        layer_lr_decay: the factor between the learning rates of a block and of the one before it. The last block has
            the learning rate times this factor; what comes after the blocks has the learning rate itself.
        freeze: the parameters that are not trained: a list of patterns as in `parameter_groups`. A mapping of `pattern`
            and `until` freezes parameters for the first steps only (`until: 100`), or for the first epochs (`until:
            "2ep"`). Their gradients are not computed, and no weight decay changes them.
        ema_decay: the decay of an exponential moving average of the trained weights (EMA), which is the model at the
            end of the run; None for no average. Checkpoints hold both.
        ema_update_after_step: the number of steps after which the average starts, from a copy of the weights.
        ema_every: the number of steps between two updates of the average.
        ema_evaluate: whether evaluations during the run use the average; false for the weights that are trained.
        neftune_noise_alpha: the size of the uniform noise that is added to the embedded inputs in training, which is
            this number divided by the square root of the length times the width of the embedded rows (NEFTune).
        include_num_input_tokens_seen: whether log lines have the number of input tokens of all steps, over all
            processes: "all" or true; "non_padding" for those that the attention mask does not hide; "no" or false.
        lr_scheduler_type: the name of a learning rate schedule of transformers.
        lr_scheduler_kwargs: further arguments of the learning rate schedule.
        warmup_steps: the number of warm-up steps; a value below 1 is a fraction of all optimizer steps.
        max_grad_norm: the norm to which gradients are clipped; 0 turns clipping off.
        bad_step_policy: the reaction to a step whose loss or gradient norm is not finite, or whose gradient norm is a
            spike: "stop" ends the run before the optimizer step, "skip" skips the optimizer step, "rewind" returns to
            the last checkpoint and skips the rows of the step.
        spike_threshold: the number of standard deviations by which a spike exceeds the mean of recent gradient norms;
            None turns spike detection off.
        spike_window: the number of recent gradient norms from which the mean and standard deviation are computed, and
            the number of recent steps to which `max_bad_steps` applies.
        max_bad_steps: the number of skipped steps that are allowed within `spike_window`; one more ends the run.
        label_smoothing_factor: the label smoothing of the token loss of causal language models.
        z_loss_coefficient: the coefficient of the squared logarithm of the softmax's denominator, which is added to
            the token loss of causal language models in training.
        linear_cross_entropy: whether the token loss of causal language models is computed from hidden states and the
            head, a chunk of tokens at a time, instead of from all logits. "auto" does so for vocabularies from 8,192
            tokens on and batches of more than one chunk, if the first batch shows that the result is the same; true
            requires it, and "torch" and "liger" require it with the kernel of that library; false computes logits.
        linear_cross_entropy_chunk_size: the number of tokens in a chunk; by default 256 MiB of float32 logits.
        bf16: whether forward passes run under bfloat16 autocast (with FSDP2, weights are gathered in bfloat16 instead).
            The loss is computed in float32.
        fp8: the recipe of torchao by which linear layers in the blocks compute in float8: "tensorwise" (one scale for a
            tensor), "rowwise" or "rowwise_with_gw_hp". None computes in the precision of `bf16` or float32.
        fp8_exclude: parts of the names of layers that do not compute in float8.
        fp8_emulate: whether float8 is emulated, on hardware without it.
        tf32: whether float32 matrix products may use TensorFloat-32 on CUDA; None leaves torch's setting unchanged.
        use_liger_kernel: whether the model gets the kernels of the library Liger, which need a GPU.
        liger_kernel_config: which of them, by the keywords of Liger's function for the model, such as {"rope": False}.
        torch_compile: whether to compile the model with `torch.compile`, by blocks or whole (`torch_compile_regions`).
            Recompilations after the warm-up are counted, and each is reported ([FG713]).
        torch_compile_backend, torch_compile_mode: the arguments of `torch.compile`. Setting either one turns
            `torch_compile` on.
        torch_compile_regions: whether to compile the repeated blocks of the model (true, and also the default of a
            compiled model) or the whole model (false). Equal blocks are compiled once, and each block can be sharded
            separately. A model without repeated blocks is compiled as a whole. True turns `torch_compile` on.
        gradient_checkpointing: whether to recompute activations in the backward pass.
        gradient_checkpointing_kwargs: the arguments of `torch.utils.checkpoint.checkpoint`, such as `use_reentrant`;
            `mode` ("full", or "selective" to keep matrix products and attention), `every_n_layers` (the first of so
            many layers recomputes), and `offload` (what layers keep is in the memory of the host).
        activation_offloading: whether what a training step saves for the backward pass is in the memory of the host
            meanwhile. With `gradient_checkpointing`, that is little more than the inputs of layers.
        activation_memory_budget: which part of the activations that a compiled block would keep it may keep, from 0 (it
            recomputes all) to 1 (torch's default); torch chooses what is cheapest to recompute. None leaves torch's
            setting unchanged.
        logging_strategy, eval_strategy, save_strategy: when to log, to evaluate and to save: "no", "steps" or "epoch"
            (`save_strategy` also "best").
        logging_steps, eval_steps, save_steps: the interval in optimizer steps; a value below 1 is a fraction of all
            optimizer steps.
        logging_first_step: whether the first optimizer step is also logged.
        communication_share: whether log lines have the exposed communication of one step, as a share of it: true for
            each line, a number for one of so many lines. The measured step is slower, because a profiler records it.
        eval_delay: the number of epochs (with `eval_strategy: steps`, of optimizer steps) before the first evaluation.
        eval_on_start: whether to evaluate once before the first optimizer step.
        include_for_metrics: what `compute_metrics` gets in addition to predictions and labels: "inputs" (the main input
            of the model) and "loss" (for each row, the mean loss of its micro-batch).
        batch_eval_metrics: whether `compute_metrics` is called after each batch, so that memory does not grow. It is
            called with `compute_result=True` after the last one, and returns the metrics then.
        eval_full_logits: whether `compute_metrics` may get more than 1 GB of predictions.
        predict_with_generate: whether evaluations generate the answer to each prompt, with the most likely token each
            time. `compute_metrics` then gets the tokens of the answers in place of the logits.
        generation_max_new_tokens: the maximum number of tokens of an answer; 256 by default.
        generation_max_length: the maximum number of tokens of prompt and answer together; by default the number of
            positions of the model.
        generation_max_samples: the number of rows, from the beginning of each evaluation set, for which answers are
            generated; by default all rows.
        save_minutes: the number of minutes since the last checkpoint after which a further checkpoint is saved.
        save_on_best: whether a checkpoint is also saved when an evaluation is among the best `save_top_k`.
        save_total_limit: the number of checkpoints to keep; the best and the newest one are always kept.
        save_top_k: the number of best checkpoints to keep, ranked by `metric_for_best_model`. Without
            `save_total_limit`, only the best and the newest checkpoints are kept.
        keep_every_n_steps: an interval in optimizer steps. A checkpoint at a multiple of the interval is never removed,
            and `save_total_limit` does not count it.
        save_only_model: whether checkpoints omit the training state, without which a run cannot resume.
        async_save: whether checkpoints are written in the background. Training then waits only until weights and
            optimizer state are copied to host memory.
        load_best_model_at_end: whether the model at the end of the run is the best one by `metric_for_best_model`
            instead of the last one.
        metric_for_best_model: the name of the metric by which models are compared; the evaluation loss by default.
        greater_is_better: whether a larger metric is better; by default true unless the name of the metric ends in
            "loss".
        restore_callback_states_from_checkpoint: whether a resumed run restores the constructor arguments of its
            callbacks from the checkpoint. Attributes that change during a run (such as counters) are always restored.
        seed: the seed of the initial weights and of all other random numbers of the run.
        data_seed: the seed of the shuffling of rows; `seed` by default.
        initial_weights: how a new model gets its weights: "sequential", by which one process of each machine makes the
            whole model in torch's own order; or "counter", by which each process computes the elements of its slices,
            from the seed, the name of the parameter and the position. Each gives the same weights for any number of
            processes, and the two give different ones.
        skip_initial_weights_on_resume: whether a run that resumes from a checkpoint does not make the initial weights,
            because the checkpoint replaces them. Until then the weights are NaN. With false they are made first.
        use_cpu: whether to train on the CPU even if an accelerator is available.
        dataloader_drop_last: whether to omit the last rows of an epoch if they do not fill a batch.
        dataloader_num_workers: the number of processes that read and collate rows; with 0, the training process does.
            By default 2 on an accelerator, where rows and collator are known to draw no random numbers, otherwise 0.
        dataloader_pin_memory: whether batches are copied to page-locked host memory if the run trains on CUDA.
        dataloader_device_prefetch: whether the next step's batches are copied to an accelerator while it computes a
            step. It needs worker processes and a data set with a length; otherwise it has no effect.
        dataloader_persistent_workers: whether worker processes are kept from one epoch to the next.
        dataloader_prefetch_factor: the number of batches that each worker prepares in advance; None is torch's default.
        data_retries: how often a read of rows is repeated that failed with an error of the file system or the network,
            after pauses of 0.5, 1, 2, ... seconds. A stream goes on only if it can say its position.
        data_streams: the number of virtual streams by which streamed rows are read, of which each data-parallel rank
            reads its own. The order of the rows depends on it and not on the number of ranks, and a checkpoint stores
            it. None is 64, or another number that fits the shards and the ranks of the first start; with 0, every
            process reads all rows and keeps its own.
        bad_rows: what is done with a streamed row that cannot be read, tokenized or collated: "stop", "skip" (it is
            left out and counted), or the largest number of rows that may be left out in an epoch.
        remove_unused_columns: whether to drop columns of the data that are not arguments of the model's `forward`.
        train_sampling_strategy: the order of the training rows: "random", "sequential" or "group_by_length". The last
            one is a random order in which rows of similar length follow one another, so that batches need less padding.
            "transformers_random" is the order that transformers' `Trainer` makes of the same seed, for comparisons.
        shuffle_order: how the order of a shuffled epoch is found: "listed" (torch's random permutation of all row
            numbers, on every rank), "computed" (the row at each position is computed when it is read, which needs
            neither memory nor time), or "auto": computed above 1,048,576 rows. A resumed run keeps that of its
            checkpoint.
        resume_from_checkpoint: the checkpoint to resume from: true or "auto" for the newest verified checkpoint, or a
            folder, which may be a checkpoint of transformers' `Trainer`.
        allow_missing: the parts that may be missing from the checkpoint and are then initialized as at the start of a
            run: "optimizer", "schedule", "data", "rng", "meter", "progress". Any other missing part is an error.
        allow_changed: what may have changed since the checkpoint was written: "data" (rows), "tokenizer", "labels"
            (names of classes), "model" (settings that the weights depend on). Any other such change is an error.
            "learning_rate" lets the resumed run take the learning rate of its config, from the step of the checkpoint
            on; otherwise that of the checkpoint is kept, with a warning.
        control: whether the run takes requests of `fgcli control`, "on" or "off".
        report_to: the trackers to report to ("tensorboard", "wandb", "mlflow", "trackio", "aim", "comet_ml"), one name
            or a list; "all" for those that are installed.
        push_to_hub: whether the model is uploaded to the Hugging Face Hub. A failed upload does not end the run.
        hub_model_id: the repository, as owner/name; by default the name of the output folder, under the token's user.
        hub_strategy: what is uploaded: "end" for the final model; "every_save" for the model of each checkpoint, too;
            "checkpoint" for the newest checkpoint, too, as the folder `last-checkpoint`; "all_checkpoints" for all.
        hub_token: the token, as !env HF_TOKEN; by default the one that `hf auth login` keeps.
        hub_private_repo: whether a new repository is private; None for the default of its owner.
        hub_always_push: whether a save waits for an upload that is going on. If false, its checkpoint is not uploaded.
        hub_revision: the branch; by default the main one.
        profile: the steps that torch.profiler records, as {wait: 5, warmup: 1, active: 3}: the first `wait` steps run
            as usual, `warmup` steps are thrown away, `active` steps are recorded. A trace and a table of operators are
            written into the run folder, see `forgather.ml.callbacks:ProfileCallback`, whose other arguments may be
            given, too.
        project: the project of the run, in trackers that have projects.

    The allowed values, and the rules between settings, are stored in `forgather/ml/rules/trainer.json`.

    Raises:
        SettingError: FG810 to FG814 if a name or a value is not allowed, or if settings contradict one another.
    """

    RULES: ClassVar[Rules] = argument_checks.rules("trainer", "forgather.ml:TrainingArguments")
    """The rules about the settings. `fgcli check` reads the rules from the same file."""

    output_dir: str = "trainer_output"
    # Excluded from comparison: the default holds the time, and two runs with equal settings must compare equal.
    logging_dir: str | None = dataclasses.field(default=None, compare=False)
    run_name: str | None = None
    per_device_train_batch_size: int = 8
    auto_find_batch_size: bool = False
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    global_batch_size: int | None = None
    accumulate_grad_batches: Mapping[Any, Any] | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw_torch_fused"
    loraplus_lr_ratio: float | None = None
    loraplus_lr_embedding: float = 1e-6
    parameter_groups: Sequence[Mapping[str, Any]] | None = None
    layer_lr_decay: float | None = None
    freeze: Sequence[str | Mapping[str, Any]] | None = None
    ema_decay: float | None = None
    ema_update_after_step: int = 0
    ema_every: int = 1
    ema_evaluate: bool = True
    neftune_noise_alpha: float | None = None
    include_num_input_tokens_seen: str | bool = "no"
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    max_grad_norm: float = 1.0
    bad_step_policy: str = "stop"
    spike_threshold: float | None = None
    spike_window: int = 128
    max_bad_steps: int = 10
    label_smoothing_factor: float = 0.0
    z_loss_coefficient: float = 0.0
    linear_cross_entropy: str | bool = "auto"
    linear_cross_entropy_chunk_size: int | None = None
    bf16: bool = False
    fp8: str | None = None
    fp8_exclude: Sequence[str] | None = None
    fp8_emulate: bool = False
    tf32: bool | None = None
    use_liger_kernel: bool = False
    liger_kernel_config: Mapping[str, Any] | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    torch_compile_regions: bool | None = None
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    activation_offloading: bool = False
    activation_memory_budget: float | None = None
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    communication_share: int | bool = False
    control: str = "on"
    report_to: Any = "none"
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_token: str | None = dataclasses.field(default=None, repr=False)
    hub_private_repo: bool | None = None
    hub_always_push: bool = False
    hub_revision: str | None = None
    profile: Mapping[str, Any] | None = None
    project: str = "huggingface"
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    include_for_metrics: Sequence[str] | None = None
    batch_eval_metrics: bool = False
    eval_full_logits: bool = False
    predict_with_generate: bool = False
    generation_max_new_tokens: int | None = None
    generation_max_length: int | None = None
    generation_max_samples: int | None = None
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
    initial_weights: str = "sequential"
    skip_initial_weights_on_resume: bool = True
    use_cpu: bool = False
    dataloader_drop_last: bool = False
    dataloader_num_workers: int | None = None
    dataloader_pin_memory: bool = True
    dataloader_device_prefetch: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    data_retries: int = 0
    data_streams: int | None = None
    bad_rows: str | int = "stop"
    remove_unused_columns: bool = True
    train_sampling_strategy: str = "random"
    shuffle_order: str = "auto"
    resume_from_checkpoint: bool | str | None = None
    allow_missing: Sequence[str] | None = None
    allow_changed: Sequence[str] | None = None

    def __init__(self, output_dir: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        if output_dir is not None:
            is_path = can_be_path(output_dir)
            # Only a path is expanded: any other type must reach the rules, whose error names it.
            settings["output_dir"] = os.path.expanduser(os.fspath(output_dir)) if is_path else output_dir
        fields = dataclasses.fields(self)
        settings = argument_checks.current_names(self.RULES, settings)
        given = self._as_data({name: _as_plain(value) for name, value in settings.items()})
        argument_checks.raise_first_error(self.RULES.values(given))
        # After the check of single values, so that a subclass reads nested settings of a known type.
        given = self._with_nested_settings(given)
        whole = self.RULES.complete({**given, "world_size": self.world_size}, given)
        # Later code has to tell a setting that the user wrote from a default, and from a number that was solved.
        solved = {name for name in SOLVED if name in given and whole[name] != given[name]}
        object.__setattr__(self, "explicit", frozenset(settings) - solved)
        # Left open by parallel sizes that do not fit the number of processes, which the strategy reports.
        whole |= {name: self.RULES.defaults[name] for name in SOLVED if whole[name] is UNKNOWN}
        for field in fields:
            object.__setattr__(self, field.name, whole[field.name])
        self._derive()
        argument_checks.raise_first_error(self.RULES.broken(whole, given))

    explicit = frozenset[str]()
    """The names of the settings that the user gave; all other settings have their defaults."""

    def _as_data(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the given settings with words in place of objects of torch. Subclasses override it."""
        return given

    def _with_nested_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the given settings, extended by settings that are nested in other ones. Subclasses override it."""
        return given

    def _derive(self) -> None:
        if self.logging_dir is None:
            # The record is frozen; `object.__setattr__` is how a frozen dataclass sets a derived field.
            object.__setattr__(self, "logging_dir", str(own_run_folder(self.output_dir)))
        saves_best = self.save_strategy == "best" or self.save_on_best or self.save_top_k is not None
        needs_metric = self.load_best_model_at_end or saves_best or self.schedule_follows_metric
        if needs_metric and self.metric_for_best_model is None:
            object.__setattr__(self, "metric_for_best_model", "loss")
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            # transformers derives it from the name in the same way.
            object.__setattr__(self, "greater_is_better", not self.metric_for_best_model.endswith("loss"))
        if isinstance(self.include_num_input_tokens_seen, bool):
            word = "all" if self.include_num_input_tokens_seen else "no"
            object.__setattr__(self, "include_num_input_tokens_seen", word)
        if isinstance(self.control, bool):
            object.__setattr__(self, "control", "on" if self.control else "off")
        trackers = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        object.__setattr__(self, "report_to", [name for name in trackers if name != "none"])
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None or self.torch_compile_regions:
            object.__setattr__(self, "torch_compile", True)
        # YAML and transformers allow 500.0; a step count is used in `range` and in modulo, and must be an int.
        for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and value >= 1:
                object.__setattr__(self, name, int(value))

    @property
    def accumulation(self) -> Accumulation:
        """The number of micro-batches of each optimizer step."""
        if self.accumulate_grad_batches is None:
            return Accumulation.constant(self.gradient_accumulation_steps)
        return read_accumulation(self.accumulate_grad_batches)

    @property
    def schedule_follows_metric(self) -> bool:
        """True if the learning rate schedule is stepped after each evaluation, not after each optimizer step."""
        return self.lr_scheduler_type == "reduce_lr_on_plateau"

    @property
    def activation_checkpointing(self) -> bool:
        """The value of `gradient_checkpointing`, under the newer name that transformers uses."""
        return self.gradient_checkpointing

    @property
    def train_batch_size(self) -> int:
        """The number of rows of one micro-batch on one data-parallel rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """The number of rows of one evaluation batch on one data-parallel rank."""
        return self.per_device_eval_batch_size

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return process_facts().world_size

    @property
    def process_index(self) -> int:
        """The global rank of this process."""
        return process_facts().rank

    @property
    def local_process_index(self) -> int:
        """The local rank of this process, among the processes on the same machine."""
        return process_facts().local_rank

    @property
    def local_rank(self) -> int:
        """The local rank of this process; -1 if the run has a single process, as in transformers."""
        return process_facts().local_rank if self.world_size > 1 else -1

    @property
    def n_gpu(self) -> int:
        """The number of accelerators that one process uses, which is always 1."""
        return 1

    @property
    def should_log(self) -> bool:
        """True on the main process, which is the only one that logs."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """True on the main process, which transformers' callbacks let write files."""
        return self.process_index == 0

    def get_process_log_level(self) -> int:
        """Returns the numeric log level of this process."""
        return logging.getLogger().getEffectiveLevel()

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the number of warm-up steps of a run.

        Args:
            num_training_steps: the number of optimizer steps of the whole run.
        """
        if self.warmup_steps < 1:
            return math.ceil(num_training_steps * self.warmup_steps)
        return int(self.warmup_steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings by name, with mappings converted to `dict`; the token of the Hub is left out."""
        found = {
            field.name: dict(value) if isinstance(value := getattr(self, field.name), Mapping) else value
            for field in dataclasses.fields(self)
        }
        return found if self.hub_token is None else {**found, "hub_token": "<HUB_TOKEN>"}  # as transformers writes it

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns all settings by name, as numbers, strings and bools, the types that trackers accept."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        plain = bool | int | float | str
        return {
            name: value if isinstance(value, plain) else str(value) for name, value in (self.to_dict() | sizes).items()
        }

    def to_json_string(self) -> str:
        """Returns all settings as a JSON object."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def replace(self, **settings: Any) -> Self:
        """Returns a copy in which some settings have new values, and defaults are derived from the new values."""
        given = {name: getattr(self, name) for name in self.explicit}
        return type(self)(**{**given, **argument_checks.current_names(self.RULES, settings)})

    def __getattr__(self, name: str) -> Any:
        # Python calls this for missing names only. A callback of transformers may read a setting that this trainer
        # lacks; it gets transformers' default, which stands for "not used".
        if name in argument_checks.TRANSFORMERS_DEFAULTS:
            return argument_checks.TRANSFORMERS_DEFAULTS[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def _as_plain(value: Any) -> Any:
    return value.value if isinstance(value, HubStrategy | IntervalStrategy | SaveStrategy | SchedulerType) else value


# `__init__` takes `**settings`; without this, help() and editors would list no setting.
TrainingArguments.__signature__ = argument_checks.signature_of(TrainingArguments)  # type: ignore[attr-defined]
