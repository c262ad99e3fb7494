"""Sizes and combinations of runs in several processes: found by the check, and refused by the arguments in the same words."""

import textwrap

import pytest

from forgather.errors import Severity
from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.project.world_size import processes_from_sizes
from tests.project.workbench import make_project

PIPELINE = "forgather.ml:PipelineTrainingArguments"
ACCEL = "forgather.ml:AccelTrainingArguments"
CUTS_3 = 'split_spec: {"transformer.layers.6": end, "transformer.layers.12": end, "transformer.layers.18": end}'
CUTS_2 = 'split_spec: {"layer.8": end, "layer.16": beginning}'
ZBV = "schedule_class: ScheduleZBVZeroBubble"


def config(constructor, *settings, processes="auto"):
    lines = "\n".join(f"  {line}" for line in ("output_dir: out", *settings))
    return f"meta: {{nproc_per_node: {processes}}}\nargs: &args !call:{constructor}\n{lines}\nmain: !partial:builtins:dict {{args: *args, more: 1}}\n"


@pytest.fixture
def project(tmp_path):
    def project(text):
        return Project("a.yaml", str(make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})))

    return project


@pytest.mark.parametrize(
    ("settings", "code", "line", "words"),
    [
        ([CUTS_3, "pipeline_parallel_size: 4", "stages_per_rank: 2", "schedule_class: ScheduleInterleaved1F1B"],
         "FG771", CUTS_3, "cuts the model into 4 stages, and 4 ranks (pipeline_parallel_size) with 2 on each"),
        ([CUTS_2, "pipeline_parallel_size: 4"], "FG771", CUTS_2, "into 3 stages, which 4 ranks"),
        ([CUTS_2, "stages_per_rank: 2", "schedule_class: ScheduleLoopedBFS"], "FG771", CUTS_2, "do not fill ranks of 2"),
        (["stages_per_rank: 2"], "FG772", "stages_per_rank: 2", "'ScheduleGPipe' runs one stage on each rank"),
        (["split_spec: 4", "pipeline_parallel_size: 2", "schedule_class: Schedule1F1B"],
         "FG772", "schedule_class: Schedule1F1B", "runs one stage on each rank, but there are 2"),
        ([ZBV, "split_spec: 4", "pipeline_parallel_size: 4"], "FG772", ZBV, "runs two stages on each rank"),
        (["per_device_train_batch_size: 2", "pipeline_chunks: 8"], "FG773", "pipeline_chunks: 8", "a step has 2 rows"),
        (["per_device_train_batch_size: 9", "pipeline_chunks: 2"], "FG773", "pipeline_chunks: 2", "9 rows"),
        (["split_spec: 4", "schedule_class: Schedule1F1B", "pipeline_chunks: 2"],
         "FG773", "pipeline_chunks: 2", "as many micro-batches as stages (4), and pipeline_chunks is 2"),
        (["split_spec: 4", "schedule_class: Schedule1F1B", "per_device_train_batch_size: 2"],
         "FG773", "schedule_class: Schedule1F1B", "as many micro-batches as stages (4), and a step has 2 rows"),
        (["pipeline_parallel_size: 4", "schedule_class: ScheduleInterleaved1F1B", "pipeline_chunks: 9",
          "per_device_train_batch_size: 9"], "FG773", "pipeline_chunks: 9", "on 4 ranks in 2 rounds"),
        (["fp16: true"], "FG770", "fp16: true", "fp16 with a pipeline"),
        (["tensor_parallel_size: 2", "torch_compile: true"],
         "FG770", "torch_compile: true", "torch_compile with tensor_parallel_size 2"),
        ([ZBV, "ddp_static_graph: true"], "FG770", "ddp_static_graph: true", "DDP with 'ScheduleZBVZeroBubble'"),
        (["ddp_bucket_cap_mb: 10"], "FG770", "ddp_bucket_cap_mb: 10", "DDP with 'ScheduleGPipe'"),
        ([ZBV, "fsdp: FULL_SHARD", "data_parallel_size: 2"], "FG770", "fsdp: FULL_SHARD", "resharded"),
        (["fsdp: true", "fsdp_config: {cpu_offload: true}"], "FG770", "fsdp_config: {cpu_offload: true}", "cpu_offload"),
        (["fsdp_config: {cpu_offload: true}"], "FG814", "fsdp_config: {cpu_offload: true}", "fsdp is None"),
        (["fsdp: true", "fsdp_config: {shard_size: 3}", "data_parallel_size: 4"],
         "FG774", "fsdp_config: {shard_size: 3}", "shard_size 3 do not divide 4 replicas"),
        (["fsdp: true", "fsdp_config: {cpu_ofload: true}"],
         "FG810", "fsdp_config: {cpu_ofload: true}", "fsdp_config has no setting 'cpu_ofload'"),
        (["fsdp: true", "fsdp_config: {fsdp_cpu_offload: 3}"],
         "FG813", "fsdp_config: {fsdp_cpu_offload: 3}", "fsdp_cpu_offload is 3"),
        (["tp_plan: auto"], "FG814", "tp_plan: auto", "nothing would be sliced"),
        (["fsdp: true", "fsdp_config: {mixed_precision: {param_dtype: 16}}"],
         "FG813", "fsdp_config: {mixed_precision: {param_dtype: 16}}", "param_dtype is 16"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_found_at_its_line_and_refused_in_the_same_words(project, settings, code, line, words):
    one = project(config(PIPELINE, *settings))
    found = [finding for finding in check_project(one).errors if finding.code == code]
    assert [code] == [finding.code for finding in found], found
    (finding,) = found
    assert words in finding.message
    assert f"  {line}" == one.rendered.text.split("\n")[finding.span.line - 1]
    assert finding.hint
    refusal = pytest.importorskip("forgather.ml.trainer.argument_checks").SettingError
    with pytest.raises(refusal) as refused:
        one("args")
    first = check_project(one).errors if len(check_project(one).errors) > 1 else found
    assert (refused.value.code, refused.value.message, refused.value.hint) in [
        (f.code, f.message, f.hint) for f in first
    ]


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (
            ["gradient_checkpointing: true", "gradient_checkpointing_kwargs: {use_reentrant: true}"],
            "FG770",
            "re-entrant",
        ),
        (["deepspeed: auto", "fsdp: true"], "FG814", "only one of them can train"),
        (["tensor_parallel_size: 2", "torch_compile: true"], "FG770", "torch_compile with tensor_parallel_size 2"),
        (
            ["tensor_parallel_size: 2", "fsdp: true", "torch_compile_mode: reduce-overhead"],
            "FG770",
            "fails to compile tensor parallel layers",
        ),
        (["split_spec: 4"], "FG810", "AccelTrainingArguments has no setting 'split_spec'"),
    ],
)
def test_what_accelerate_cannot_do_is_found(project, settings, code, words):
    (finding,) = check_project(project(config(ACCEL, *settings))).errors
    assert code == finding.code
    assert words in finding.message


@pytest.mark.parametrize(
    "settings",
    [
        ["split_spec: {layer.4: end, layer.5: beginning, layer.8: end}", "pipeline_parallel_size: 3"],
        [CUTS_3, "schedule_class: ScheduleInterleaved1F1B", "pipeline_parallel_size: 2", "pipeline_chunks: 4"],
        [ZBV, "fsdp: true", "data_parallel_size: 2", "pipeline_parallel_size: 2"],
        [ZBV, "fsdp: SHARD_GRAD_OP", "data_parallel_size: 2"],
        ["fsdp: FULL_SHARD", "data_parallel_size: 2", "fp16: false"],
        ["torch_compile: true", "tensor_parallel_size: 1"],
        ["split_spec: !var spec", "pipeline_parallel_size: 3"],
        ["split_spec: auto", "stages_per_rank: 1"],
    ],
    ids=str,
)
def test_what_fits_is_not_mentioned(project, settings):
    assert () == check_project(project(config(PIPELINE, *settings))).errors


@pytest.mark.parametrize(
    ("constructor", "settings", "processes", "found"),
    [
        (PIPELINE, ["data_parallel_size: 2", "pipeline_parallel_size: 2"], 3,
         [("error", "the sizes multiply to 4 processes, 2 for each of 2 replicas, and nproc_per_node is 3")]),
        (PIPELINE, ["data_parallel_size: 2", "pipeline_parallel_size: 2"], 4, []),
        (PIPELINE, ["data_parallel_size: 2", "pipeline_parallel_size: 2"], 2,
         [("warning", "the sizes ask for 2 machines of 2 processes")]),
        (PIPELINE, [CUTS_3], 4, []),
        (PIPELINE, [CUTS_3], 3, [("error", "the sizes multiply to 4 processes, 4 for each of 1 replicas, and nproc_per_node is 3")]),
        (PIPELINE, [CUTS_3], "gpu", []),
        (PIPELINE, ["split_spec: auto"], 3, []),
        (ACCEL, ["tensor_parallel_size: 2"], 4, []),
        (ACCEL, ["tensor_parallel_size: 2"], 3,
         [("error", "one replica asks for 2 processes, but nproc_per_node 3 is not a multiple of it")]),
        (ACCEL, [], 3, []),
        (PIPELINE, ["data_parallel_size: 3"], 4,
         [("error", "4 processes (nproc_per_node) do not make 3 replicas of one size")]),
        (PIPELINE, ["data_parallel_size: 2"], 4, []),
    ],
)  # fmt: skip
def test_sizes_are_compared_with_the_processes_of_a_machine(project, constructor, settings, processes, found):
    findings = check_project(project(config(constructor, *settings, processes=processes))).findings
    assert found == [(str(one.severity), one.message) for one in findings if one.code == "FG774"]


TRIANGLE = ["per_device_train_batch_size: 8", "gradient_accumulation_steps: 4"]


@pytest.mark.parametrize(
    ("constructor", "settings", "processes", "found"),
    [
        (ACCEL, ["global_batch_size: 64", *TRIANGLE], 2, None),
        (ACCEL, ["global_batch_size: 64", *TRIANGLE], "gpu", None),
        (ACCEL, ["global_batch_size: 64", *TRIANGLE], 4, "= 128"),
        (ACCEL, ["global_batch_size: 64", "per_device_train_batch_size: 8"], 3, "not a multiple of 8 rows"),
        (ACCEL, ["global_batch_size: 64", "gradient_accumulation_steps: ~", "data_parallel_size: 3"], "auto", "= 24"),
        (
            PIPELINE,
            ["global_batch_size: 64", *TRIANGLE, "split_spec: 2"],
            2,
            "micro-batches (gradient_accumulation_steps) = 32",
        ),
    ],
)
def test_the_rows_of_a_step_are_compared_with_the_processes(project, constructor, settings, processes, found):
    findings = check_project(project(config(constructor, *settings, processes=processes))).findings
    (one,) = [one for one in findings if one.severity is Severity.ERROR] or [None]
    if found is None:
        assert one is None
    else:
        assert (one.code, one.path) == ("FG949", "args.global_batch_size")
        assert found in one.message


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["accumulate_grad_batches: {5: 4}"], "FG889", "begins with epoch 5"),
        (["accumulate_grad_batches: {0: 8, 5: 4}", "global_batch_size: 64"], "FG888", "global_batch_size is 64"),
        (["accumulate_grad_batches: {0: 8, 5: 4}", "gradient_accumulation_steps: 2"], "FG888", "_steps is 2"),
        (
            ["accumulate_grad_batches: {0: 8, 3: 4}", "num_train_epochs: 3"],
            "FG457",
            "epoch 3, and the run ends after 3",
        ),
        (
            ["accumulate_grad_batches: {steps: {0: 8, 9: 4}}", "max_steps: 9"],
            "FG457",
            "step 9, and the run ends after 9",
        ),
        (["accumulate_grad_batches: {0: 8, 2: 4}", "num_train_epochs: 3"], None, ""),
        (["accumulate_grad_batches: {0: 8, 5: 4}", "max_steps: 9"], None, ""),
    ],
)
def test_a_schedule_of_accumulation_is_checked(project, settings, code, words):
    findings = check_project(project(config(ACCEL, *settings))).findings
    assert [code] * bool(code) == [one.code for one in findings if words in one.message and "accum" in one.message]


def test_a_run_is_compared_by_who_starts_it(project):
    one = project(config(PIPELINE, "pipeline_parallel_size: 2", "data_parallel_size: 2", processes=3))
    assert [] == [found for found in check_project(one, for_run=True).findings if found.severity is Severity.ERROR]


@pytest.mark.parametrize(
    ("constructor", "settings", "processes"),
    [
        (PIPELINE, [CUTS_3], 4),
        (PIPELINE, ["data_parallel_size: 2", "pipeline_parallel_size: 4"], 8),
        (PIPELINE, ["tensor_parallel_size: 2", "split_spec: 2"], 4),
        (PIPELINE, ["split_spec: auto"], None),
        (ACCEL, ["data_parallel_size: 4"], 4),
        (ACCEL, [], None),
        ("builtins:dict", [], None),
    ],
)
def test_the_sizes_ask_for_processes(project, constructor, settings, processes):
    assert processes == processes_from_sizes(
        project(config(constructor, *settings).replace("!partial:builtins:dict", "!call:builtins:dict")).graph
    )


def test_a_collator_that_flattens_is_found_next_to_a_pipeline(project):
    text = """\
    main: !call:forgather.ml:AccelTrainer
      model: !partial:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]
      train_dataset: [1]
      data_collator: !call:transformers:DataCollatorWithFlattening
      args: !call:forgather.ml:PipelineTrainingArguments {output_dir: out}
    """
    found = [one for one in check_project(project(textwrap.dedent(text))).errors if one.code == "FG770"]
    assert [
        (4, "a collator that flattens a batch to one row leaves no rows that a pipeline could split into micro-batches")
    ] == [(one.span.line, one.message) for one in found]


@pytest.mark.parametrize("arguments", ["TrainingArguments", "PipelineTrainingArguments"])
def test_arguments_of_another_trainer_are_found_and_refused(project, arguments):
    text = f"""\
    main: !call:forgather.ml:AccelTrainer
      model: !partial:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]
      train_dataset: [1]
      args: !call:forgather.ml:{arguments} {{output_dir: out}}
    """
    one = project(textwrap.dedent(text))
    (found,) = check_project(one).errors
    assert ("FG775", 4, "'AccelTrainer' is given the arguments of another trainer") == (
        found.code,
        found.span.line,
        found.message,
    )
    refusal = pytest.importorskip("forgather.ml.trainer.argument_checks").SettingError
    with pytest.raises(refusal) as refused:
        one("main")
    assert (found.code, found.message, found.hint) == (refused.value.code, refused.value.message, refused.value.hint)


@pytest.mark.parametrize(
    ("settings", "optimizer", "line", "words"),
    [
        ("fsdp: true, optim: adafactor", None, 4, "needs means over whole weights"),
        ("fsdp: true", "!partial:torch.optim:Adafactor", 5, "needs means over whole weights"),
        ("deepspeed: {zero_optimization: {stage: 2}}", "!partial:torch.optim:Muon", 5, "flat shards"),
        ("fsdp: true", "!partial:torch.optim:Muon", None, None),
        ("optim: adafactor", None, None, None),
        ("fsdp: true, optim: adafactor", "!partial:torch.optim:SGD", None, None),
    ],
)
def test_an_optimizer_that_needs_whole_weights_is_found(project, settings, optimizer, line, words):
    text = f"""\
    main: !call:forgather.ml:AccelTrainer
      model: !partial:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]
      train_dataset: [1]
      args: !call:forgather.ml:AccelTrainingArguments {{output_dir: out, {settings}}}
      optimizer_factory: {optimizer or "~"}
    """
    found = [one for one in check_project(project(textwrap.dedent(text))).errors if one.code == "FG770"]
    assert ([] if line is None else [line]) == [one.span.line for one in found]
    assert all(words in one.message for one in found)
