"""`Trainer`: trains a model on one device, and is the base class of the multi-process trainers.

A trainer writes the trained model and checkpoints, and reports metrics to callbacks. The names of arguments and of
callback events are those of transformers. The module logs and does not print. Subclasses differ from `Trainer` only in
the strategy that they choose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.trainer_utils import PredictionOutput

from forgather.errors import CheckpointError, TrainingError
from forgather.interrupt import SAME_OF_SEVERAL_SECONDS, SAME_SECONDS, Interrupt, signal_handler
from forgather.ml.adapters import Adapter, as_adapter
from forgather.ml.batch_dependence import warn_of_micro_batches
from forgather.ml.callbacks.base import TrainerCallback, TrainerControl, TrainerState
from forgather.ml.callbacks.dispatch import CallbackDispatcher
from forgather.ml.callbacks.trackers import tracker_callbacks
from forgather.ml.checkpoint.manifest import verify
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.rng import seed_process
from forgather.ml.checkpoint.storage import LocalStorage, Storage
from forgather.ml.distributed import collectives, phase
from forgather.ml.distributed.env import DistributedEnvironment, accelerate_variables
from forgather.ml.embedding_noise import add_noise_to_embeddings, remove_noise_from_embeddings
from forgather.ml.log import get_logger
from forgather.ml.losses import RuleMaker
from forgather.ml.memory import is_out_of_memory
from forgather.ml.memory_note import note_largest_tensors
from forgather.ml.strategy.base import Recipe, Strategy, build_strategy
from forgather.ml.strategy.describe import layout_lines
from forgather.ml.strategy.single import single_strategy
from forgather.ml.strategy.state import on_host
from forgather.ml.task import task_of
from forgather.ml.text_metrics import TextMetrics
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.trainer import argument_checks, model_export, model_setup, model_source, resume, run_start
from forgather.ml.trainer.answers import AnsweredSet, AnswerGenerator
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.bad_rows import STOP
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.collation import default_collate, inputs_for_model
from forgather.ml.trainer.control import Session
from forgather.ml.trainer.data_fingerprint import refuse_other_data
from forgather.ml.trainer.data_loader import RankBatches, TrainBatches
from forgather.ml.trainer.evaluation import eval_batches, evaluate, metrics_of_answers, predict, refuse_large_logits
from forgather.ml.trainer.freezing import Freezing
from forgather.ml.trainer.hub_upload import HubUpload
from forgather.ml.trainer.loop import train_loop
from forgather.ml.trainer.metric_functions import MetricFunctions
from forgather.ml.trainer.model_setup import preparation
from forgather.ml.trainer.optimizers import make_optimizer, make_schedule, refuse_uncallable
from forgather.ml.trainer.parameter_groups import ParameterGroups
from forgather.ml.trainer.reference import reference_scores
from forgather.ml.trainer.row_checks import check_size
from forgather.ml.trainer.run import Run
from forgather.ml.trainer.run_start import RunStart, refuse_another_engine, refuse_combination
from forgather.ml.trainer.save_function import SaveFunction, check_storage
from forgather.ml.trainer.stream_choice import is_iterable
from forgather.ml.trainer.transformers_hooks import WithOwnLoss, refuse_unused_hooks
from forgather.ml.trainer.unknown_keywords import answers_unknown_keywords
from forgather.ml.trainer.weight_average import WeightAverage, average_of
from forgather.ml.types import TrainOutput
from forgather.rules import Rules

_log = get_logger(__name__)


class Trainer(WithOwnLoss):
    """Trains a model on one device.

    Args:
        model: the model to train. A callable without arguments is used in the same way as `model_init`.
        args: the training arguments; None uses the defaults.
        model_init: a callable that returns the model and is called after the seed was set.
        train_dataset: the training data: a `datasets.Dataset`, a torch data set, a list, or an iterable of rows.
        eval_dataset: the evaluation data, or a mapping from names to several evaluation sets.
        data_collator: the collator, a function from a list of rows to a batch. By default rows are padded with the
            tokenizer, or stacked if there is no tokenizer.
        processing_class: the tokenizer or processor, which is saved with the model.
        optimizer_factory: the optimizer factory, see `make_optimizer`. By default the training arguments determine the
            optimizer.
        lr_scheduler_factory: the factory of the learning rate schedule, see `make_schedule`. By default the training
            arguments determine the schedule.
        loss_fn: the loss function, which is called with (logits, labels), see `forgather.ml.losses`; or a loss object
            such as `forgather.ml.preference_losses:DPOLoss`.
        callbacks: the callbacks of transformers or of Forgather, as objects or classes.
        distributed_env: the distributed environment of this process, which is read from the environment variables by
            default.
        storage: the object through which checkpoints and models are written; the local file system by default.
        compute_metrics: the function that computes metrics from the predictions of an evaluation set. It is called with
            a `transformers.EvalPrediction`, and returns a mapping from names to numbers. With `predict_with_generate`
            it is `TextMetrics` with exact match by default.
        preprocess_logits_for_metrics: a function of (logits, labels) that is called with the output of each batch. What
            it returns is kept in place of the logits.
        adapter: the adapter that is put into the model and trained in place of its weights: what
            `forgather.ml.adapters:lora` returns, a mapping of its arguments, or a `peft.LoraConfig`.
        save_function: a function that is called with the model, the step and a path when a checkpoint is written. The
            file or folder that it creates at the path becomes part of the checkpoint.

    Attributes:
        metric_functions: the user's functions that compute metrics, and the settings that determine what they get.
        answer_generator: what answers the prompts of evaluation sets; None without `predict_with_generate`.

    Raises:
        SettingError: FG770, FG775, FG971 or FG972 if the training arguments cannot be combined with the trainer or with
            its other arguments.
        AdapterError: FG900 to FG905, FG908 or FG951 if the adapter cannot be put into the model.
        TrainingError: FG801 if there is no model; FG806 or FG807 if the loss cannot be used; FG815 if an object in
            `callbacks` is not a callback; FG819 if a factory is not callable; FG632 if `storage` lacks a method; FG860
            or FG861 if a subclass has hooks of transformers' trainer that would never be called.
        DistributedError: FG703 if several processes were started.
    """

    ARGUMENTS: ClassVar[type[TrainingArguments]] = TrainingArguments
    RULES: ClassVar[Rules] = argument_checks.rules("trainer", "forgather.ml:Trainer")
    _average: WeightAverage | None = None

    @answers_unknown_keywords
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        args: TrainingArguments | None = None,
        *,
        model_init: Callable[[], nn.Module] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        optimizer_factory: Callable[..., Optimizer] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | RuleMaker | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
        compute_metrics: Callable[..., Mapping[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        adapter: Any = None,
        distributed_env: DistributedEnvironment | None = None,
        storage: Storage | None = None,
        save_function: SaveFunction | None = None,
    ) -> None:
        refuse_unused_hooks(self)
        refuse_uncallable(
            optimizer_factory=optimizer_factory,
            lr_scheduler_factory=lr_scheduler_factory,
            save_function=save_function,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.args = self.ARGUMENTS() if args is None else args
        # Made in the constructor: the launcher's request is known only while the config is built.
        self._start = RunStart()
        optimizer_factory, lr_scheduler_factory = self.factories(optimizer_factory, lr_scheduler_factory)
        adapter = as_adapter(adapter)
        given = {"data_collator": data_collator, "optimizer_factory": optimizer_factory}
        refuse_combination(self.RULES, self.args, **given, adapter=adapter, model=model)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator, self.processing_class = data_collator or default_collate(processing_class), processing_class
        self.lr_scheduler: Any = None
        self.saved_to: Path | None = None
        self.storage: Storage = LocalStorage() if storage is None else storage
        check_storage(self.storage)
        self.save_function = save_function
        generates = self.args.predict_with_generate
        of_texts = TextMetrics(processing_class) if generates else None
        metrics = compute_metrics or getattr(loss_fn, "compute_metrics", None) or of_texts
        self.metric_functions = MetricFunctions.from_arguments(self.args, metrics, preprocess_logits_for_metrics)
        self._scheduler_factory, self._has_own_collator = lr_scheduler_factory, data_collator is not None
        # The registry parses `fsdp_config`: an error of it is one of the arguments, here as below.
        with argument_checks.errors_under_args(self.args):
            refuse_another_engine(self.args, accelerate_variables())
        recipe = self._recipe(model, model_init, adapter, loss_fn, optimizer_factory)
        # Strategies report a setting by its own name; the caller knows it as `args.<name>`.
        with argument_checks.errors_under_args(self.args):
            self.strategy: Strategy = self.choose_strategy(distributed_env or DistributedEnvironment())
            build_strategy.get()(self.strategy, recipe)
        self.answer_generator = AnswerGenerator(self.strategy, self.args, processing_class) if generates else None
        self._reference = reference_scores(self.strategy, self.args, self.data_collator, loss_fn)
        self._session = self._make_session(callbacks)
        self._session.send("on_init_end")

    def factories(self, optimizer_factory: Any, lr_scheduler_factory: Any) -> tuple[Any, Any]:
        """Returns the factories of the optimizer and of the schedule. Subclasses override this method.

        Args:
            optimizer_factory: the optimizer factory as it was given to the constructor.
            lr_scheduler_factory: the factory of the schedule as it was given to the constructor.
        """
        return optimizer_factory, lr_scheduler_factory

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns the strategy that does the optimizer steps. Subclasses override this method.

        Args:
            environment: the distributed environment of this process.
        """
        return single_strategy(environment, self.args)

    def _recipe(self, model: Any, model_init: Any, adapter: Adapter | None, loss_fn: Any, factory: Any) -> Recipe:
        args = self.args
        groups = ParameterGroups(args.parameter_groups, args.layer_lr_decay)
        self._freezing = Freezing(
            args.freeze, args.gradient_checkpointing_kwargs if args.gradient_checkpointing else None
        )

        def choose(made: nn.Module) -> None:
            """Freezes parameters of the model, and reads the names of the others."""
            self._freezing.freeze(made)
            groups.read(made)

        source = model_init if model is None else model
        request, output_dir = args.resume_from_checkpoint, Path(args.output_dir)
        # The frozen weights of an adapter's base model are in no checkpoint.
        waits = args.skip_initial_weights_on_resume and adapter is None and model_source.is_made_anew(source)
        return Recipe(
            make_model=model_setup.model_maker(model, model_init, args.seed, adapter, args, choose),
            make_rule=functools.partial(self.make_rule, loss_fn=loss_fn),
            make_optimizer=functools.partial(make_optimizer, args=args, factory=factory, groups=groups),
            prepare=preparation(args),
            autocast=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            model_is_made_anew=model_source.is_made_anew(source),
            stored_in=model_source.stored_in(source, adapter),
            initial_weights=model_source.initial_weights(args, source),
            model_key=functools.partial(model_source.model_key, source, args.seed, adapter),
            updates_in_backward=args.optimizer_in_backward,
            is_resumed=functools.partial(resume.is_expected, request, output_dir) if waits else None,
            offload_activations=args.activation_offloading,
        )

    @property
    def layout(self) -> list[str]:
        """A description of the parallel layout, as lines of text."""
        return layout_lines(self.strategy)

    def _make_session(self, callbacks: Sequence[TrainerCallback | type[TrainerCallback]]) -> Session:
        scene = {
            "model": self.strategy.view,
            "processing_class": self.processing_class,
            "task": task_of(self.model, self.strategy.rule),
            "optimizer": None,
            "lr_scheduler": None,
            "train_dataloader": None,
            "eval_dataloader": None,
        }
        trackers = tracker_callbacks(self.args.report_to, callbacks or ())
        uploads = [HubUpload(self.args)] if self.args.push_to_hub else []
        dispatcher = CallbackDispatcher([*trackers, *run_start.profilers(self.args), *uploads], scene)
        for position, callback in enumerate(callbacks or ()):
            try:
                dispatcher.add(callback)
            except TrainingError as error:
                raise error.about(f"callbacks.{position}") from None
        return Session(self.args, dispatcher)

    @property
    def model(self) -> nn.Module:
        """The model, on the device on which it is trained."""
        return self.strategy.model

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None before the first call of `train`."""
        return self.strategy.optimizer

    @property
    def state(self) -> TrainerState:
        """The trainer state, which records the progress of the run."""
        return self._session.state

    @property
    def control(self) -> TrainerControl:
        """The control flags, which callbacks can set."""
        return self._session.control

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """The callbacks, in the order in which they are called."""
        return list(self._session.dispatcher.callbacks)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Appends a callback. If a class is given, it is instantiated without arguments."""
        self._session.dispatcher.add(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback:
        """Removes a callback and returns it. If a class is given, the first callback of this class is removed."""
        return self._session.dispatcher.remove(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains to the end of the run, and saves the model unless `save_strategy` is "no".

        Collective: every process must call it.

        Args:
            resume_from_checkpoint: the checkpoint to resume from: true or "auto" for the newest intact one in
                `output_dir`, or a folder. By default it is the value in the training arguments.

        Returns:
            The step, the mean loss of the run, and the metrics of the whole run.

        Raises:
            TrainingError: FG802 to FG805 if the data cannot be trained on; FG817 if the output folder is not writable;
                FG818 if the loss is not finite; FG650 to FG652 if other bad steps end the run; FG824 if the arguments
                request evaluations and there is no evaluation data.
            CheckpointError: if the run cannot resume from the checkpoint, or if a checkpoint cannot be written.
            DistributedError: FG776 if there is a single process and the config requests several.
            KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGUSR1. A checkpoint is saved first if saving is on and a step
                was begun.
        """
        args, session, topology = self.args, self._session, self.strategy.topology
        self._start.begin(topology.world_size, topology.device, self.layout, self.model)
        accumulation = args.gradient_accumulation_steps
        run_start.warn_of_untried_batch(args)
        parts = self.strategy.parts
        warn_of_micro_batches(self.model, replicas=topology.dp_size, accumulation=accumulation, parts=parts)
        refuse_unused_hooks(self)
        run_start.refuse_gradient_readers(args, session.dispatcher.callbacks)
        request = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        folder = collectives.run_on_main(functools.partial(run_start.checkpoint_to_resume, args, self.storage, request))
        # The main process chose the folder alone; now all of them check that they see the same one.
        if folder is not None:
            resume.refuse_unreadable(folder)
        else:
            self.strategy.make_unset_weights()
        # Seeded again: numbers that were drawn since the model was built must not change the run.
        seed_process(args.seed, topology)
        same = SAME_OF_SEVERAL_SECONDS if topology.world_size > 1 else SAME_SECONDS
        with signal_handler(same_within=same, speaks=topology.rank == 0) as interrupt, session.receiving():
            run = self._make_run(interrupt)
            # Once more: modules that are imported there for the first time may draw numbers, as `rich` does.
            seed_process(args.seed, topology)
            _log.warning("%s", self.rows_line(run))
            self.score_with_reference(self.eval_dataset)
            if folder is not None:
                resume.announce(folder, self.state.max_steps)
                run.load(folder)
            # A second call of `train` would otherwise end at once by the flag of the first.
            session.control.should_training_stop = False
            run.saver.refuse_too_little_space(run.data.epoch_ends())
            return self._train(run)

    def rows_line(self, run: Run) -> str:
        """Returns the line about the rows of a run, which is logged at its beginning."""
        return run_start.rows_line(run.data, self.eval_dataset)

    def loop(self, run: Run) -> None:
        """Does the optimizer steps of a run. A subclass may do further things between them."""
        train_loop(run)

    def _train(self, run: Run) -> TrainOutput:
        ended: BaseException | None = None
        if (alpha := self.args.neftune_noise_alpha) is not None:
            add_noise_to_embeddings(self.model, alpha=alpha)  # again, in a second call of `train`
        try:
            self._session.send("on_train_begin")
            run.requests.listen()
            if self.args.eval_on_start:
                self.evaluate()
            run.meter.start()
            run.saver.begin()
            self.loop(run)
            return self._finish(run)
        except BaseException as error:
            ended = error
            self._abandon(run, error)
            raise
        finally:
            run.recompilations.close()
            run.communication.close()
            run.requests.close(ended)
            remove_noise_from_embeddings(self.model)

    def score_with_reference(self, sets: Any) -> str | None:
        """Scores rows with the reference for the last time: the model is about to lose its initial weights.

        Args:
            sets: the rows, a mapping from names to several sets of rows, or None.

        Returns:
            The digest of the reference; None if no rows were scored.
        """
        if self._reference is None:
            return None
        named = sets if isinstance(sets, Mapping) else {"": sets}
        for rows in named.values():
            if rows is not None:
                self._reference.attached(rows)
        self._reference.weights_change()
        return self._reference.digest

    def _make_run(self, interrupt: Interrupt) -> Run:
        if self._reference is not None:
            # Before the rows are read: an engine that shards weights itself cannot compute without its optimizer.
            self.strategy.build_optimizer()
        # The digest of the data is computed from rows, which the data set or a worker process may fail to read.
        phase.set_phase("reading data")
        data = self._train_batches()
        steps, epochs = run_start.num_steps_and_epochs(self.args, data)
        # Different steps or rows per process would end in a collective that waits for ever.
        collectives.require_equal_facts(
            {"the number of training rows": data.num_rows, "the seed": data.seed, "the number of steps": steps}
        )
        refuse_other_data("the training data", data.fingerprint)
        phase.set_phase("run")
        self._freezing.release(self.strategy)
        optimizer = self.strategy.optimizer if self._reference is not None else None
        optimizer = optimizer or self.strategy.build_optimizer()
        self._average = average_of(self.strategy, self.args)
        self.lr_scheduler = make_schedule(optimizer, self.args, steps, self._scheduler_factory)
        state = self._session.state = TrainerState(
            max_steps=steps,
            num_train_epochs=epochs,
            train_batch_size=self.args.per_device_train_batch_size,
            is_world_process_zero=self.strategy.topology.is_writer,
            is_local_process_zero=self.strategy.topology.local_rank == 0,
        )
        state.compute_steps(self.args, steps)  # type: ignore[no-untyped-call]
        self._session.dispatcher.scene |= {
            "optimizer": optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": data.loader,
            "eval_dataloader": None,
        }
        self._check_evaluation()
        evaluates = self.eval_dataset is not None
        return Run(
            self._session,
            self.strategy,
            data,
            self.lr_scheduler,
            evaluate=functools.partial(self._evaluate, self.eval_dataset, "eval") if evaluates else None,
            interrupt=interrupt,
            storage=self.storage,
            save_function=self.save_function,
            freezing=self._freezing,
            average=self._average,
        )

    def _check_evaluation(self) -> None:
        """Raises an error if the rows that the arguments want to evaluate are missing or cannot be used."""
        evaluates = self.eval_dataset is not None
        if (self.args.eval_strategy != "no" or self.args.eval_on_start) and not evaluates:
            setting = (
                "eval_on_start is true" if self.args.eval_on_start else f"eval_strategy is {self.args.eval_strategy!r}"
            )
            raise TrainingError(
                f"{setting}, and there is no eval_dataset",
                code="FG824",
                hint='give an eval_dataset, or set eval_strategy: "no"',
            )
        if evaluates:
            sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {"": self.eval_dataset}
            refuse_large_logits(self.strategy, map(self._eval_batches, sets.values()), self.metric_functions)
            if self.answer_generator is not None:
                # Rows without answers are reported now, and not at the first evaluation.
                for rows in sets.values():
                    self.answer_generator.rows(rows)

    def _train_batches(self) -> TrainBatches:
        if self.train_dataset is None:
            raise TrainingError(
                "there is no train_dataset", code="FG802", hint="give the trainer a train_dataset, or call evaluate()"
            )
        topology = self.strategy.topology
        if not is_iterable(self.train_dataset):
            check_size(len(self.train_dataset), RankShare.for_topology(topology, self.args.per_device_train_batch_size))
        dataset, collate = self._inputs(self.train_dataset)
        return TrainBatches(dataset, self.args, collate, topology=topology)

    def _inputs(self, dataset: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Returns the data set and the collator, changed so that they give the inputs that the model takes."""
        narrows = self.args.remove_unused_columns
        if self._reference is not None:
            dataset = self._reference.attached(dataset)
        return inputs_for_model(
            self.model, dataset, self.data_collator, narrows=narrows, own_collator=self._has_own_collator
        )

    def _finish(self, run: Run) -> TrainOutput:
        run.end_saves()
        # A stop request that came during the last save must not be lost: the caller expects KeyboardInterrupt.
        run.stop_if_asked(now=True)
        metrics = run.meter.summary() | run.tokens_seen() | run.recompilations.metrics()
        if self.args.data_retries:
            metrics["data_retries"] = int(collectives.all_sum(float(run.data.num_retries)))
        if self.args.bad_rows != STOP:
            metrics["bad_rows"] = run.sync.sum_of_rows(run.data.bad_rows.count)
        self._session.log(metrics)
        if self.args.load_best_model_at_end and run.saver.best_folder is not None:
            _log.info("loading the best model, of step %s", self.state.best_global_step)
            collectives.run_on_main(functools.partial(verify, run.saver.best_folder))
            with collectives.run_collectively(functools.partial(CheckpointReader, run.saver.best_folder)) as saved:
                self.strategy.restore(saved)
                if self._average is not None:
                    self._average.restore(saved, {})
        if self._average is not None:
            self._average.replace_weights()
            self._average = None
        # From here on an interrupt has no state left to save.
        run.complete = True
        if self.args.save_strategy != "no":
            self.save_model()
        run.stop_if_asked(now=True)
        self._session.send("on_train_end")
        return TrainOutput(self.state.global_step, metrics.get("train_loss", math.nan), metrics)

    def _abandon(self, run: Run, error: BaseException) -> None:
        """Saves a checkpoint of an interrupted run if possible, and sends `on_train_end` to the callbacks."""
        try:
            if isinstance(error, TrainingError):
                run.report_bad_step()
            elif is_out_of_memory(error):
                note_largest_tensors(error, self.model, self.optimizer)
            run.wait_for_background_save()
            if isinstance(error, KeyboardInterrupt) and self.args.save_strategy != "no":
                self._save_interrupted(run, error)
        except Exception as failure:  # noqa: BLE001 - callback border: the first error is the one to show
            error.add_note(f"saving failed too: {failure!r}")
        try:
            self._session.send("on_train_end", error=error)
        except Exception as failure:  # noqa: BLE001 - callback border: the first error is the one to show
            error.add_note(f"on_train_end failed too: {failure!r}")

    def _save_interrupted(self, run: Run, error: BaseException) -> None:
        # `fgcli` reports how the run ended; the notes are for a plain Python script.
        step = self.state.global_step
        if run.complete:
            error.add_note(f"all {step} steps are trained, and the model is saved")
            return
        # Gradients of the interrupted step are not part of the state.
        run.strategy.discard()
        if run.in_update or step == 0 or not run.may_save:
            error.add_note(f"nothing was saved at step {step}")
            return
        try:
            folder = run.save()
            run.saver.report_finished(wait=True)
            error.add_note(f"the state of step {step} is saved in {folder}")
        except CheckpointError as failure:
            _log.error("interrupted at step %d, and its state is lost: %s", step, failure)

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluates the model; returns the metrics and sends them to the callbacks.

        Collective: every process must call it.

        Args:
            eval_dataset: the evaluation data, or a mapping from names to several evaluation sets; by default the
                trainer's `eval_dataset`.
            metric_key_prefix: the prefix of the names of all metrics.

        Raises:
            TrainingError: FG824 if there is no evaluation data; FG803 if it has no rows.
        """
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if datasets is None:
            raise TrainingError("there is no eval_dataset", code="FG824", hint="give the trainer an eval_dataset")
        self.strategy.make_unset_weights()
        with self._session.receiving():
            metrics = self._evaluate(datasets, metric_key_prefix, None)
        assert metrics is not None, "nothing interrupts it"  # noqa: S101
        return metrics

    def _evaluate(self, datasets: Any, prefix: str, wants_end: Callable[[], bool] | None) -> dict[str, float] | None:
        named = datasets if isinstance(datasets, Mapping) else {"": datasets}
        sets = {name: self._eval_batches(rows) for name, rows in named.items()}
        is_averaged = self._average is not None and self.args.ema_evaluate
        with self._average.in_place_of_weights() if is_averaged else nullcontext():  # type: ignore[union-attr]
            return evaluate(
                self._session,
                self.strategy,
                sets,
                functions=self.metric_functions,
                generator=self.answer_generator,
                prefix=prefix,
                wants_end=wants_end,
            )

    def _eval_batches(self, rows: Any) -> RankBatches:
        dataset, collate = self._inputs(rows)
        return eval_batches(dataset, self.args, collate, self.strategy.topology)

    def predict(
        self, test_dataset: Any, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Returns the predictions for the rows of a data set, in their order, on every process.

        Collective: every process must call it.

        Args:
            test_dataset: the rows, with or without labels.
            ignore_keys: the entries of the model's output to leave out of the predictions; by default those in
                `keys_to_ignore_at_inference` of the model's configuration.
            metric_key_prefix: the prefix of the names of all metrics.

        Returns:
            `predictions` and `label_ids` (None without labels) as numpy arrays, and `metrics`: the times and, if the
            rows have labels, the loss and the metrics of `compute_metrics`. Arrays of batches of different lengths are
            padded in the second dimension with -100. With `predict_with_generate`, the predictions are the tokens of
            the generated answers, and the labels those of the expected ones.

        Raises:
            TrainingError: FG803 if there are no rows; FG871 or FG872 if metrics cannot be computed; FG964 if answers
                are generated and the rows are no prompts.
        """
        self.strategy.make_unset_weights()
        with self._session.receiving():
            if self.answer_generator is not None:
                answered = self.answered(test_dataset)
                metrics = metrics_of_answers(answered, self.metric_functions, metric_key_prefix)
                metrics = collectives.run_on_main(lambda: metrics)
                self._session.send("on_predict", metrics=metrics)
                arrays = answered.as_rows().as_arrays()
                return PredictionOutput(arrays.predictions, arrays.label_ids, metrics)
            rows, metrics = predict(
                self._session,
                self.strategy,
                self._eval_batches(test_dataset),
                functions=self.metric_functions,
                prefix=metric_key_prefix,
                ignore_keys=ignore_keys,
            )
            arrays = rows.as_arrays()
            return PredictionOutput(arrays.predictions, arrays.label_ids, metrics)

    def answered(self, dataset: Any) -> AnsweredSet:
        """Returns the prompts of a data set, the expected answers, and the answers that the model generates.

        Collective: every process must call it. It needs `predict_with_generate`.

        Args:
            dataset: the rows. A row without labels is a prompt.

        Raises:
            TrainingError: FG963 without `predict_with_generate`; FG964 if the rows are not prompts with answers.
        """
        if self.answer_generator is None:
            raise TrainingError(
                "the trainer generates no answers", code="FG963", hint="set predict_with_generate: true"
            ).about("args.predict_with_generate")
        self.strategy.make_unset_weights()
        with restored_train_modes(self.strategy.model):
            found = self.answer_generator.answer(dataset, after_batch=lambda: self._session.send("on_prediction_step"))
        assert found is not None, "nothing interrupts it"  # noqa: S101
        return found

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Writes the model in the layout that `from_pretrained` reads, and returns its folder.

        Collective: every process must call it.

        Args:
            output_dir: the folder of the model; by default the `output_dir` of the training arguments.

        Raises:
            TrainingError: FG817 if the folder cannot be written to.
        """
        phase.set_phase("saving the model", self.state.global_step)
        self.strategy.make_unset_weights()
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        # Every process takes part in gathering the weights; only the main process keeps them.
        place = model_export.spill_place(self.storage, folder) if self.strategy.topology.is_writer else None
        own = [*self.model.parameters(), *self.model.buffers()]
        weights = on_host(self.strategy.export(), keep=self.strategy.topology.is_writer, place=place, own=own)
        # Only the main process writes: all ranks would write the same files into one folder.
        write = functools.partial(
            model_export.export_model,
            self.storage,
            self.model,
            weights,
            folder,
            self.processing_class,
            reference=None if self._reference is None else self._reference.digest,
        )
        collectives.run_on_main(write)
        self.saved_to = folder
        return folder
