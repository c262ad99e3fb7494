"""Dotted names that configs, past runs and the seeds use resolve, wherever their code is kept now."""

import importlib

from tests.each import each

FROZEN = """
forgather.ml:Trainer forgather.ml:TrainingArguments forgather.ml:AccelTrainer forgather.ml:AccelTrainingArguments
forgather.ml:PipelineTrainer forgather.ml:PipelineTrainingArguments forgather.ml.trainer.hf:HFTrainer
forgather.ml.trainer.trainer:Trainer forgather.ml.trainer.accel:AccelTrainer
forgather.ml.trainer.pipeline:PipelineTrainer
forgather.ml.callbacks:CallbackDispatcher forgather.ml.callbacks:JsonLogger forgather.ml.callbacks:ProgressCallback
forgather.ml.callbacks:RunSummaryCallback forgather.ml.callbacks:SpeedCallback forgather.ml.callbacks:TBLogger
forgather.ml.callbacks:TextSampleCallback forgather.ml.callbacks:TrainerCallback
forgather.ml.callbacks:TrainerControl forgather.ml.callbacks:TrainerState
forgather.ml.json_logger:JsonLogger forgather.ml.tb_logger:TBLogger
forgather.ml.checkpoint:LocalStorage forgather.ml.checkpoint:Retention forgather.ml.checkpoint:Storage
forgather.ml.checkpoint:capture_rng forgather.ml.checkpoint:checkpoint_folder
forgather.ml.checkpoint:list_checkpoints forgather.ml.checkpoint:newest_verified forgather.ml.checkpoint:prune
forgather.ml.checkpoint:read_state forgather.ml.checkpoint:restore_rng forgather.ml.checkpoint:verify
forgather.ml.checkpoint:write_checkpoint forgather.ml.checkpoint:write_state
forgather.ml.checkpoint.storage:LocalStorage
forgather.ml.data:CausalLMCollator forgather.ml.data:DataError forgather.ml.data:DataFileError
forgather.ml.data:PaddingCollator forgather.ml.data:beginnings forgather.ml.data:hub_dataset
forgather.ml.data:json_lines forgather.ml.data:load_tokenizer forgather.ml.data:pack forgather.ml.data:parquet
forgather.ml.data:python_sources forgather.ml.data:split forgather.ml.data:text_files forgather.ml.data:tokenize
forgather.ml.data:tokenize_examples forgather.ml.data:train_bpe
forgather.ml.data.examples:tokenize_examples forgather.ml.data.packing:tokenize forgather.ml.data.sources:json_lines
forgather.ml.data.sources:parquet forgather.ml.data.sources:python_sources forgather.ml.data.sources:text_files
forgather.ml.data.tokenizer:load_tokenizer forgather.ml.data.tokenizer:train_bpe
forgather.ml.distributed:DistributedEnvironment forgather.ml.distributed:ProcessFacts
forgather.ml.distributed:process_facts forgather.ml.distributed.launcher:launch
forgather.ml.dry_run:dry_run forgather.ml.models:from_config forgather.ml.models:from_pretrained
forgather.ml.optim:MuonWithAdamW forgather.ml.optim:adafactor forgather.ml.optim:adamw forgather.ml.optim:sgd
forgather.ml.strategy.pipeline.idle:simulate forgather.ml.report:write_report forgather.ml.strategy:Recipe forgather.ml.strategy:SingleDevice
forgather.ml.strategy:Strategy
forgather.hardware_selector:HardwareSelector forgather:ForgatherError forgather:Project forgather:from_project forgather.project:Project
forgather.project:from_project forgather.project.project:from_project
forgather.cli.main:main forgather.config.materialize:materialize forgather.config.resolve:Resolver
forgather.signatures:Annotation forgather.signatures:Callee forgather.signatures:Default forgather.signatures:Reader
forgather.signatures:UNKNOWN forgather.signatures:Unknown
""".split()


def test_a_name_that_others_have_written_down_resolves():
    def test(name):
        module, _, symbol = name.partition(":")
        assert hasattr(importlib.import_module(module), symbol)

    each(FROZEN, test)
