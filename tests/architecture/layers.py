"""The layers of the package: which module may import which.

Each line is a layer. A module may import modules of the lines above it alone, function-level and type-only imports
included. The training tower may also import the foundation of the configuration tower, and nothing else of it; what
scripts of another tool import is above both of these. Names are relative to `forgather` in the first and third table,
and to `forgather.ml` in the second one.
"""

CONFIGURATION = """
foundation:
    available_memory bounded folder_lock json_text pipeline_schedules replaced_file secret_names source spelling trainer_hooks value_text
    rule_conditions
    accumulation
    whole_rows cache_file errors parallel_sizes ring_models rotary_types shown_secrets
    aliases batch_triangle compatibility launcher_env process_limits redaction run_status
    heartbeat interrupt parameter_settings requirements
    rules
    lightning.device_count lightning.durations lightning.strategies run_control translation
    lightning.option_rules lightning.module_settings
    lightning.strategy_words lightning.trainer_words
    lightning.callback_words lightning.logger_words
    lightning.meaning
    control_socket
    control_listener interventions trackers
    stored_model
    quantized
    planner planner.architectures planner.zero_settings
    planner.batch_size planner.efficiency planner.leaf planner.memory_plan
    planner.choices planner.hardware
    planner.fit planner.foreign_configs planner.model_shapes planner.stage_cuts planner.work
    planner.formulas
    planner.device_count planner.selection planner.step_time
    planner.benchmark planner.resources planner.run_time
    planner.benchmark_results
    planner.grid planner.pipeline_choices planner.ranking planner.storage planner.ways_out
graph:
    config config.builtin_names config.environment config.insight config.lint
    config.lint.file_suggestions
    config.path config.yaml config.yaml.events
    config.graph config.yaml.parser config.yaml.scalars
    config.calc config.rendered config.traverse
    config.anchor_names config.equality
rendering:
    config._jinja config._jinja.budget config._jinja.charged config._jinja.globals
    config._jinja.origins config._jinja.static_analysis config.split
    config._jinja.call_guard config._jinja.loader config._jinja.plain_yaml config._jinja.runtime_types config._jinja.seams
    config.syntax
    config._jinja.assignments config._jinja.filters config._jinja.parser
    config._jinja.environment
    config._jinja.unused_names
    config._jinja.template_errors config._jinja.template_lint
    config._jinja.compiler
    config._jinja.renderer
    config.render
loading:
    config.tags config.yaml.source_positions
    config.lint.anchor_reuse config.lint.indent_check config.lint.suspicious_scalars config.yaml.duplicate_keys
    config.yaml.yaml_errors
    config.yaml.merge config.yaml.scalar_text
    config.yaml.node_builders
    config.yaml.compose
    config.load
signatures:
    signatures.binding signatures.lazy_ast signatures.module_finder signatures.results
    signatures.symbols
    signatures.decorators signatures.modules
    signatures.name_resolution signatures.parameters
    signatures.annotations
    signatures.classes
    signatures.call_signatures
    signatures.engine
    signatures.reader
checks and views:
    config.insight.blame config.insight.change config.insight.path_lookup
    config.insight.show config.lint.argument_check config.lint.graph_check
    config.insight.diff config.lint.call_check config.override
    config.insight.line_annotations
code generation:
    codegen codegen.diagram codegen.emit_yaml codegen.page codegen.python codegen.python.ir codegen.python.names
    codegen.python.reachability
    codegen.dot codegen.mermaid codegen.page.source_lines codegen.python.builtin_calls codegen.python.imports
    codegen.python.parameters
    codegen.page.page codegen.python.context
    codegen.python.partial_lowering
    codegen.python.lowering
    codegen.emit_python
construction:
    config.callables config.partials config.resolve
    config.materialize config.remote
verification:
    verification verification.recording
    verification.prove
project:
    project.checks project.dependencies
    project.graph_secrets project.literal project.locations project.output_lock project.rendered_variable
    project.constructor_rules project.run_facts
    project.setting_precedence project.trainer_arguments project.versions project.workspace
    project.checks.setting_rules project.fact_cache project.data_targets project.fault_tolerance project.git_repository
    project.metadata project.path_display project.reference project.starters project.targets project.trust
    project.checks.root_settings project.git_state project.listing_cache
    project.template_environment project.untrusted project.world_size
    project.configs project.dynamic_args project.guard project.metadata_file project.reader project.scaffold
    project.defaults project.error_location project.metadata_cache project.seeding
    project.project
    project.checks.subject
    project.checks.adapted_modules project.checks.argument_rules project.checks.chosen_keywords
    project.checks.import_check
    project.checks.divided_rows project.checks.lightning_words project.checks.missing_packages project.checks.packed_rows project.checks.quantized_model
    project.checks.streamed_rows
    project.checks.initial_weights project.checks.stream_shards
    project.checks.run_requirements project.checks.template_notes project.checks.trainer_hooks
    project.checks.unused_blocks
    project.checks.cross_project project.comparison project.listing project.origin_labels
    project.run_writer
    project.checks.output_folders project.checks.trusted_calls project.golden
    project.run_reader
    project.check project.comparison_sides project.provenance
    project.eval_data project.rerun
runs:
    runs runs.config_values runs.growing_curve runs.metric_records runs.run_folders
    runs.growing_file runs.metric_columns runs.metrics_file
    runs.condition runs.labels
    runs.foreign_run
    runs.tensorboard_files runs.wandb_files
    runs.summary
    runs.fact_store runs.references
    runs.curve runs.metric_choice
    runs.curves
    runs.curve_cache
    runs.compared_run
    runs.differences
    runs.comparison
    runs.verdict
    runs.comparison_page
    runs.comparison_page.page
    runs.live_run runs.removal runs.run_table
    runs.data_frame runs.run_choice runs.watched_runs
    runs.watch_data
    runs.watch_server
launch:
    launch.in_process launch.process_request
    launch.recorded_graph launch.saved_weights
    launch.export launch.trained_model
    launch launch.dry_run launch.evaluation launch.layout_check launch.harness launch.multi_process launch.planning
    launch.bound_process launch.control_client launch.launch_job launch.restart
    launch.batch_scripts launch.benchmark_run launch.cluster_files launch.ray_driver
    launch.launch_files
    launch.plan_check launch.room
    launch.batch_trial
    launch.calibration launch.choice_project launch.time_planning
    launch.pipeline_search
    launch.auto_values launch.sequences launch.finding launch.ways_out
    launch.written_choice
sweeps:
    sweeps sweeps.space
    sweeps.spec
    sweeps.journal sweeps.progress sweeps.slots sweeps.stopping sweeps.trials
    sweeps.best_config sweeps.driver sweeps.plan sweeps.result sweeps.search sweeps.slurm
    sweeps.queue sweeps.request
scripts:
    distributed.arguments
    distributed.notebook distributed.script_config
    distributed.checkpoint distributed.data_loader distributed.engine distributed.optimizer distributed.words
    distributed.parallel distributed.script_parts
    distributed.trainer
doctor:
    doctor doctor.result
    doctor.config_needs doctor.devices doctor.folders doctor.libraries doctor.network doctor.system doctor.traffic
    doctor.variables
    doctor.meeting
    doctor.survey
cli:
    cli cli.commands cli.invocation cli.next_steps cli.palette cli.source_excerpt cli.traceback_trim
    cli.character_plot cli.output
    cli.slow_note
    cli.answer_output cli.checkpoint_output cli.data_output cli.diagnostic_output cli.diff_output cli.options cli.trusting
    cli.auto_start cli.browser cli.calibrating cli.comparison_output cli.data_preparation cli.doctor_output cli.dry_run_output cli.generation_options cli.harness_output cli.plan_find cli.plan_grid cli.plan_output cli.plan_start cli.plan_time_output cli.runs_import cli.runs_output cli.selection_output cli.sweep_output cli.watch_output
    cli.commands.benchmark cli.commands.export cli.commands.select
    cli.commands.blame cli.commands.chat cli.commands.check cli.commands.ckpt cli.commands.code cli.commands.compare cli.commands.construct cli.commands.control
    cli.commands.data cli.commands.diff cli.commands.eval cli.commands.explain cli.commands.generate
    cli.commands.golden cli.commands.graph cli.commands.ls
    cli.commands.new cli.commands.plan cli.commands.pp cli.commands.queue cli.commands.rerun cli.commands.runs cli.commands.serve cli.commands.sweep cli.commands.targets cli.commands.tlist
    cli.commands.doctor cli.commands.train cli.commands.trefs cli.commands.trust cli.commands.watch cli.parsing
    cli.completion
    cli.main
entry point:
    __main__ hardware_selector run_training_benchmark
"""

TRAINING = """
ml foundation:
    argument_values host_reads hub library_progress memory meta_loading metrics model_class number_format random_state run_dir train_mode types
    anomalies memory_note tracking
processes:
    distributed.group distributed.layout distributed.phase
    distributed.host_tree
    distributed.collectives distributed.env distributed.mesh distributed.probe distributed.root_cause distributed.stack_dump
    distributed.communication distributed.launcher distributed.watchdog log
    distributed.exposed_communication alert_command system_stats
    distributed.peer planned_model
data:
    data.cache data.data_errors data.progress_bar data.prompts data.row_epoch
    data.file_content data.row_guard data.shards
    data.line_parts data.read_log
    data.block_packer data.dataset_shards data.parquet_shards data.virtual_streams
    data.json_rows data.row_stream
    data.text_streams
    data.chat_rows data.chat_template data.mixture data.padding data.preference_collator data.sources data.train_eval_split
    data.usual_columns
    data.conversations data.file_rows data.tokenizer generation generation.prompt
    data.packing data.token_kinds data.token_text data.turn_tokens
    data.example_packing data.prepared_manifest
    data.prepared_rows
    data.shard_writer
    data.chat_tokens data.collated_rows data.examples data.images data.labelled data.preference_rows data.rollout_rows data.seq2seq
    data.tagged
    data.preference_chats
    data.answer_rows data.first_look data.preferences
    data.row_statistics data.shown_rows
    data.data_view
    generation.encoder_decoder
    generation.generator
    generation.batch
losses and models:
    activation_budget activation_offloading batch_sizes kernel_comparison varlen_attention vocabulary
    activation_checkpointing batch_dependence bitsandbytes_optim documents embedding_noise kernels label_kind loss_reduction low_bit_optim models name_patterns optim unsaved_buffers
    attention_inputs classifiers context_attention ring_attention loss_terms reward_function rewards vocabulary_slice
    model_inputs
    deferred_head linear_loss
    loss_kernels
    loss_path
    losses preference_metrics
    context_ring entity_metrics label_metrics preference_rules task text_metrics
    feedback_rule score_rule
    preference_losses
    distillation
events:
    callbacks.base
    callbacks.dispatch
checkpoints:
    checkpoint.files checkpoint.rng checkpoint.spilled checkpoint.storage
    checkpoint.manifest
    checkpoint.averaged_weights checkpoint.checkpoint_dir
    checkpoint.lineage checkpoint.model_folder checkpoint.pickled_tensors checkpoint.state
    checkpoint.export_folder checkpoint.hf_layout checkpoint.inspect checkpoint.reader checkpoint.save_plan
    checkpoint.export checkpoint.retention checkpoint.saved_model checkpoint.transformers_folder
adapters:
    adapter_base adapter_names gguf_layout gguf_tokenizer output_comparison
    adapters gguf_export float8 liger
    trained_adapter
report:
    report.html_text report.pictures report.run_data
    report.chart report.length_grid report.monitor_cards report.samples report.settings_tables
    report.page
    report.data_page report.time_cards
    report.plan_page
    report
callbacks:
    callbacks.effective_settings callbacks.output_target callbacks.run_record
    callbacks.anomaly callbacks.memory_profiler callbacks.metrics callbacks.monitor callbacks.profile callbacks.progress
    callbacks.rank_monitor callbacks.speed callbacks.tensorboard callbacks.text_sample
    callbacks.summary json_logger tb_logger
    callbacks.tracker
    callbacks.tracker_libraries
    callbacks.trackers
strategies:
    strategy.base strategy.ddp_buckets strategy.fake_caches strategy.initial_room strategy.deepspeed_settings strategy.deepspeed_values strategy.fsdp_objects strategy.fsdp_precision strategy.gradients strategy.input_sizes strategy.meta_model strategy.optimizer_step strategy.topology
    strategy.backward_update strategy.counter_draws strategy.unset_tensors
    strategy.fill_record
    strategy.pipeline strategy.pipeline.bubble_simulation strategy.pipeline.microbatch_split
    strategy.context_parallel strategy.pipeline.trace strategy.precision strategy.tensor_parallel
    strategy.deepspeed_config strategy.describe strategy.fsdp_config strategy.pipeline.blocks
    strategy.deepspeed_arguments strategy.fsdp_units strategy.pipeline.schedules strategy.registry strategy.state
    strategy.counter_weights strategy.stored_weights
    strategy.unset_weights strategy.seed_checkpoint strategy.shapes_only strategy.weight_source
    strategy.initial_weights strategy.pipeline.split
    strategy.model_strategy
    strategy.data_parallel strategy.deepspeed_state strategy.fsdp2 strategy.pipeline.local_stages
    strategy.pipeline.stage strategy.single
    strategy.deepspeed strategy.pipeline.inference
    strategy.pipeline.strategy
    strategy.pipeline.idle
trainers:
    trainer.row_fit
    trainer trainer.argument_checks trainer.checkpoint_parts trainer.deepspeed_schedules trainer.collation trainer.data_rng trainer.meter trainer.rate_change trainer.recompilation trainer.utilization
    trainer.freezing trainer.parameter_groups trainer.accelerate_words trainer.deepspeed_words trainer.step_clock
    trainer.rate_scale trainer.read_retries trainer.rewind trainer.save_function trainer.unknown_keywords
    trainer.device_copies trainer.length_groups trainer.row_order
    trainer.arguments trainer.bad_rows trainer.batch_sampler trainer.data_fingerprint trainer.resume_checks
    trainer.loader_options trainer.row_content trainer.shard_facts trainer.stream_windows
    trainer.synchronization
    trainer.data_changes trainer.rank_streams trainer.row_checks trainer.row_dispatch
    trainer.stream_batches trainer.stream_choice
    trainer.control trainer.data_loader trainer.hub_upload trainer.optimizers trainer.predictions trainer.save_clock trainer.weight_average
    trainer.metric_functions
    trainer.divergence trainer.model_setup trainer.model_source trainer.parallel_arguments trainer.reference trainer.step_guard
    trainer.transformers_hooks
    trainer.snapshot
    trainer.adapter_export trainer.model_export trainer.staging
    trainer.checkpoint_writer
    trainer.control_requests trainer.resume trainer.save_policy trainer.transformers_reader
    trainer.transformers_resume
    trainer.run trainer.run_start
    trainer.answers
    trainer.evaluation trainer.loop
    trainer.transformers_run
    trainer.hf trainer.rl trainer.trainer
    trainer.accel trainer.pipeline trainer.saved_evaluation
    layer_placement loader_facts loop_checkpoint rank_loader rebuilt_optimizer
text-to-image models:
    diffusion diffusion.denoising_loss diffusion.images diffusion.noising
    diffusion.rows
    diffusion.pipeline
    diffusion.image_sample diffusion.lora_file
generation:
    generation.loading
    generation.server
planner:
    planner planner.convolutions planner.devices_here planner.gpu_attention planner.gpu_operators planner.library_kernels planner.operators planner.packed_weights planner.pipeline_step planner.processors_here planner.stage_metadata
    planner.operations planner.remembered_fakes
    planner.allocations planner.calibration planner.real_integers
    planner.peaks
    planner.extrapolation planner.masked_rows planner.places planner.row_length planner.value_readings planner.window_shape
    planner.model_builders
    planner.engine_tensors planner.stage_parts planner.stored_state
    planner.fake_build planner.trace_facts planner.planned_batches
    planner.generation_trace planner.transformers_steps planner.untraceable
    planner.rank_recorder
    planner.masked_parts planner.stage_passes
    planner.pass_shape
    planner.host_activations planner.offload planner.trace_result
    planner.saving_rows
    planner.rank_trace planner.batch_trial
    planner.deep_trace
    planner.row_line
    planner.memory planner.row_limit planner.stage_costs
    planner.stage_variants
    planner.family_trace planner.schedule_replay
    planner.stage_family
    planner.batch_plans planner.pipeline_plans planner.sequence_plans planner.split_search
dry run:
    dry_run
benchmark:
    benchmark_cell
"""

SCRIPTS = """
Lightning:
    lightning.callbacks lightning.run_limits lightning.seeds
    lightning.checkpoint_names lightning.foreign lightning.hooks
    lightning.checkpoints lightning.hyperparameters lightning.loaders lightning.logged lightning.schedules
    lightning.module lightning.scene lightning.train_data lightning.words
    lightning.redirection lightning.stage_data
    lightning.evaluation
    lightning.steps
    lightning.fitting
    lightning.trainer_facts
    lightning.trainer
    lightning.module_run
"""

# Packages that look up the names in their `__all__` when they are asked for: they point upward by design, and import
# nothing when they are imported. No module of the package imports a name from one of them.
FACADES = {
    "forgather": "`from forgather import Project` without loading the stages",
    "forgather.project": "`forgather.project:from_project` in configs",
    "forgather.signatures": "`from forgather.signatures import Reader` without loading the engine",
    "forgather.lightning": "`import forgather.lightning as L` in scripts, and `fgcli check`, without torch",
    "forgather.distributed": "`from forgather.distributed import DistributedTrainer` without torch and the stages",
    "forgather.distributed.monitor": "`from forgather.distributed.monitor import TrainingMonitor` in scripts",
    "forgather.ml": "`forgather.ml:Trainer` in configs, without torch at import",
    "forgather.ml.callbacks": "`forgather.ml.callbacks:ProgressCallback` in configs; rich and tensorboard only when named",
    "forgather.ml.checkpoint": "`forgather.ml.checkpoint:Storage` in configs, and verification without torch",
    "forgather.ml.data": "`forgather.ml.data:tokenize` in configs, without what other sources need",
    "forgather.ml.diffusion": "`forgather.ml.diffusion:NoisedRows` in configs, without diffusers",
    "forgather.ml.distributed": "`forgather.ml.distributed:DistributedEnvironment` in configs",
    "forgather.ml.strategy": "the protocol without the strategies",
}
