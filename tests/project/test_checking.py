"""All that can be known of a config, together: templates, graph, constructors, settings, other projects."""

from pathlib import Path

import pytest

from forgather.errors import Severity
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import ROOT, make_project

pytestmark = pytest.mark.usefixtures("warm_cache")

CONFIGS = [(str(file.parents[2]), file.name) for file in sorted((ROOT / "projects").glob("*/templates/configs/*.yaml"))]
LIBRARY = ROOT / "templatelib"
QUANTIZED = (
    "[model]\n    -- include 'models/pretrained.yaml'\n    pretrained_model_name_or_path: some/model\n"
    "[adapter]\n    -- include 'adapters/lora.yaml'\n"
)
NEEDED = {
    "datasets/hub.yaml": "    name: some/data\n",
    "datasets/prepared.yaml": "    folder: some/tokens\n",
    "datasets/mixture.yaml": "    datasets: {a: !call:forgather.ml.data:chats [x]}\n",
    **dict.fromkeys(
        (
            "datasets/chat.yaml",
            "datasets/feedback.yaml",
            "datasets/images.yaml",
            "datasets/preferences.yaml",
            "datasets/prompts.yaml",
            "datasets/instructions.yaml",
            "datasets/json_lines.yaml",
            "datasets/labelled.yaml",
            "datasets/parquet.yaml",
            "datasets/source_target.yaml",
            "datasets/tagged.yaml",
            "datasets/text_files.yaml",
        ),
        "    paths: [x]\n",
    ),
    "models/pretrained.yaml": "    pretrained_model_name_or_path: some/model\n",
    "models/pretrained_classifier.yaml": "    pretrained_model_name_or_path: some/model\n",
    "models/pretrained_seq2seq.yaml": "    pretrained_model_name_or_path: some/model\n",
    **dict.fromkeys(("quantization/int8.yaml", "quantization/nf4.yaml", "quantization/torchao_int8.yaml"), QUANTIZED),
    "tokenizers/pretrained.yaml": "    pretrained_model_name_or_path: some/model\n",
    "trainers/lightning.yaml": "[module]\n    !singleton:torch.nn:Linear [1, 1]\n",
}
# Templates whose rows or labels only the other templates of a task fit.
OF_TRL = ("trainers/grpo.yaml", "trainers/rloo.yaml", "trainers/trl_trainer.yaml")
TASK_OF = {
    "datasets/images.yaml": "image_classification",
    "datasets/source_target.yaml": "seq2seq",
    "datasets/tagged.yaml": "token_classification",
    "models/bert.yaml": "token_classification",
    "models/classifier.yaml": "classification",
    "models/pretrained_classifier.yaml": "classification",
    "models/pretrained_seq2seq.yaml": "seq2seq",
    "models/seq2seq.yaml": "seq2seq",
    "models/t5.yaml": "seq2seq",
    "models/vit.yaml": "image_classification",
}
PATHS = "[raw_dataset]\n    == super()\n    paths: [x]\n"
ARGS = "main: !call:forgather.ml:TrainingArguments {{output_dir: out, {}}}\n"
TRAINER = """\
main: !call:forgather.ml:Trainer
  model: !call:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]
  train_dataset: [1]
  args: !call:forgather.ml:TrainingArguments
    output_dir: out
"""


@pytest.fixture
def checked(tmp_path):
    def checked(text, files=(), **settings):
        folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text, **dict(files)})
        return check_project(Project("a.yaml", str(folder)), **settings)

    return checked


@pytest.fixture
def told(checked):
    def told(text, files=(), **settings):
        found = checked(text, files, **settings).findings
        return [(one.code, str(one.severity), one.span.line if one.span else None) for one in found]

    return told


@pytest.mark.parametrize(("project", "config"), CONFIGS, ids=lambda value: value.rpartition("/")[2])
def test_a_shipped_config_has_no_errors(warm_settings, project, config):
    found = check_project(Project(config, project)).findings
    # make_data.py writes the data of `assistant`, `classify`, `large`, `seq2seq` and `tag`. Models of `preferences` and `assistant`
    # start from one that another config trains. tests/projects/test_recipes.py asserts what is found in the recipes.
    codes = {
        "preferences": {"FG456"} if config != "base.yaml" else set(),
        "classify": {"FG456"},
        "assistant": {"FG456"},
        "large": {"FG456"},
        "seq2seq": {"FG456"},
        "tag": {"FG456"},
        "recipes": {"FG456", "FG742", "FG825"},
    }
    # FG882: some configs need a package that the tests do without.
    expected = {"FG882"} | codes.get(Path(project).name, set())
    assert [] == [
        str(one) for one in found if one.severity in (Severity.ERROR, Severity.WARNING) and one.code not in expected
    ]


@pytest.mark.parametrize(
    "template",
    sorted(str(file.relative_to(LIBRARY)) for file in LIBRARY.rglob("*.yaml") if file.parts[-2] != "scaffold"),
)
def test_a_config_with_a_template_of_the_library_has_no_errors(template, checked):
    first = (LIBRARY / template).read_text().split("\n")[0]
    block = first.partition("[")[2].partition("]")[0]
    if template.startswith("trainers/") and template != "trainers/base.yaml":
        text = f"-- extends '{template}'\n{NEEDED.get(template, '')}"
    elif first.startswith("## For ["):
        base = f"tasks/{TASK_OF[template]}.yaml" if template in TASK_OF else "trainers/trainer.yaml"
        text = f"-- extends '{base}'\n[{block}]\n    -- include '{template}'\n{NEEDED.get(template, '')}"
        # The rows of a task need files, which its own template does not name.
        text += "" if base.startswith("trainers") or block == "raw_dataset" else PATHS
    else:
        text = "-- extends 'trainers/trainer.yaml'\n"
    # TRL and the libraries of quantized weights are not installed with the tests.
    expected = {"FG882"} if block == "quantization" or template in OF_TRL else set()
    assert [] == [error for error in checked(text).errors if error.code not in expected]


def test_problems_of_every_kind_are_reported_together_errors_first(told):
    text = """\
.unused: &unused 1
limit: !var limit
stop: !calc "limti + 1"
opt: !partial:torch.optim:AdamW {weigth_decay: 0.1}
args: !call:forgather.ml:TrainingArguments {output_dir: x, learning_rate: -1}
main: !call:nowhere.py:run
"""
    errors = [("FG204", "error", 4), ("FG813", "error", 5), ("FG322", "error", 6)]
    warnings = [("FG244", "warning", 2), ("FG232", "warning", 3)]
    assert [*errors, *warnings] == told(text)[:5]
    assert ("FG230", "lint", 1) in told(text)


def test_nothing_is_reported_twice(checked):
    found = checked("a: &a !call:nowhere.py:run\nmain: *a\n").findings
    assert len(found) == len(set(found)) == 1


def test_a_config_that_cannot_be_rendered_or_loaded_is_a_finding(told):
    assert [("FG111", "error", 2)] == told("a: 1\nmain: {{ nope }}\n")
    assert [("FG203", "error", 1)] == told("main: *nope\n")


def test_a_syntax_error_in_a_file_of_the_project_is_a_finding(checked):
    (found,) = checked("main: !call:mine.py:run\n", {"mine.py": "x = 1\ndef run(:\n"}).findings
    assert ("FG326", 2) == (found.code, found.span.line)
    assert found.span.file.endswith("mine.py")


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ("learing_rate: 1", "FG810", "TrainingArguments has no setting 'learing_rate'"),
        ("fp16: true", "FG811", "'fp16' is a setting of transformers.Trainer"),
        ("save_safetensors: false", "FG811", "save_safetensors: False is not available"),
        ("warmup_ratio: 0.1, warmup_steps: 3", "FG812", "'warmup_steps' is given twice"),
        ("lr_scheduler_type: cosin", "FG813", "lr_scheduler_type is 'cosin'"),
        ("per_device_train_batch_size: 0", "FG813", "per_device_train_batch_size is 0"),
        ("load_best_model_at_end: true", "FG814", "load_best_model_at_end with eval_strategy 'no'"),
        ("save_strategy: best", "FG814", "save_strategy 'best' needs evaluations"),
        ("save_minutes: 0", "FG814", "save_minutes is 0"),
        ("save_minutes: soon", "FG813", "save_minutes is 'soon'"),
        ("save_on_best: true", "FG814", "save_on_best needs evaluations"),
        ("save_top_k: 2", "FG814", "save_top_k 2 needs evaluations"),
        ("keep_every_n_steps: 0", "FG813", "keep_every_n_steps is 0"),
        ("bad_step_policy: skp", "FG813", "bad_step_policy is 'skp'"),
        ("spike_threshold: 0.5", "FG813", "spike_threshold is 0.5"),
        ("spike_window: 2", "FG813", "spike_window is 2"),
        ("max_bad_steps: -1", "FG813", "max_bad_steps is -1"),
        (
            "bad_step_policy: skip, max_bad_steps: 200",
            "FG814",
            "max_bad_steps 200 among the last spike_window 128 steps",
        ),
        (
            "bad_step_policy: rewind, save_only_model: true",
            "FG814",
            "there are no checkpoints that a run could go back to",
        ),
    ],
)
def test_settings_are_refused_as_the_trainer_refuses_them(checked, settings, code, message):
    (found,) = checked(ARGS.format(settings)).errors
    assert code == found.code
    assert message in found.message
    args = pytest.importorskip("forgather.ml.trainer.arguments")
    door = pytest.importorskip("forgather.ml.trainer.argument_checks")
    with pytest.raises(door.SettingError) as refused:
        Project("a.yaml", found.span.file.rpartition("/templates/")[0])()
    assert (found.code, found.message, found.hint) == (refused.value.code, refused.value.message, refused.value.hint)
    assert args.TrainingArguments.RULES.closed


def test_settings_that_are_known_only_in_the_run_are_not_judged(checked):
    result = checked(ARGS.format("save_strategy: !var save, eval_strategy: !env EVAL, fp16: !var half"))
    assert () == result.errors
    assert any("save_strategy" in one.reason for one in result.unchecked)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("spike_window: 8, spike_threshold: 6", []),
        ("spike_window: 8, bad_step_policy: skip, max_bad_steps: 2", []),
        ("spike_window: 8", ["FG457"]),
        ("max_bad_steps: 200", ["FG457"]),
    ],
)
def test_settings_of_bad_steps_are_judged_where_they_have_an_effect(checked, settings, expected):
    found = checked(ARGS.format(settings)).findings
    assert expected == [one.code for one in found if "spike_window" in one.message or "max_bad_steps" in one.message]


def test_older_names_are_warnings(told):
    assert [("FG825", "warning", 1)] == told(ARGS.format("warmup_ratio: 0.1, use_cache: true"))[:1]


def test_saving_without_a_folder_is_a_warning(told):
    assert [("FG826", "warning", 1)] == told("main: !call:forgather.ml:TrainingArguments {seed: 1}\n")


def test_a_trainer_that_evaluates_needs_data_for_it(checked, told):
    (found,) = checked(TRAINER + "    save_strategy: 'no'\n    eval_strategy: epoch\n").errors
    assert ("FG824", 7, "main.args.eval_strategy") == (found.code, found.span.line, found.path)
    assert [] == told(TRAINER + "    eval_strategy: epoch\n  eval_dataset: !call:list [[1]]\n")
    assert [] == told(TRAINER.replace("main", "spare") + "    eval_strategy: epoch\nmain: 1\n")


def test_a_trainer_needs_a_model_and_data(told):
    text = "main: !call:forgather.ml:Trainer {args: ~}\n"
    assert [("FG801", "error", 1), ("FG802", "error", 1)] == told(text)


def test_rules_about_the_arguments_of_transformers(checked):
    text = "main: !call:transformers:TrainingArguments {output_dir: x, eval_strategy: steps, eval_steps: 4, \
save_steps: 6, load_best_model_at_end: true, optim: adamx}\n"
    assert {"FG814": "error", "FG813": "warning"} == {found.code: found.severity for found in checked(text).findings}


def test_arguments_are_looked_into_from_the_trainer(checked):
    text = """\
main: !call:forgather.ml.trainer.hf:HFTrainer
  model: !var model
  args: !call:transformers:TrainingArguments
    output_dir: x
    per_device_train_batch_size: 0
"""
    found = {one.code: one for one in checked(text, for_run=True).errors}
    assert ("main.args.per_device_train_batch_size", 5) == (found["FG813"].path, found["FG813"].span.line)
    assert {"FG813", "FG802", "FG244"} == set(found)


def test_the_heads_of_a_model_share_its_width(told):
    assert [("FG827", "error", 1)] == told(
        "main: !call:transformers:LlamaConfig {hidden_size: 100, num_attention_heads: 3}\n"
    )


def test_a_variable_that_nothing_gives_is_an_error_in_a_run_only(told):
    text = "main: {a: !var seed, b: !var run_dir}\nother: !var spare\n"
    assert [("FG244", "warning", 1), ("FG244", "warning", 2)] == told(text)
    assert [("FG244", "error", 1), ("FG244", "warning", 2)] == told(text, for_run=True)
    assert [("FG244", "warning", 1)] == told("main: !meta:builtins:list [!var x]\n", for_run=True)


def test_options_that_the_command_line_has_are_refused(told):
    text = "dynamic_args:\n  - {names: --json}\nmain: 1\n"
    assert [("FG409", "error", 2)] == told(text, reserved=frozenset({"--json"}))[:1]
    assert "FG409" not in [code for code, _, _ in told(text)]


def test_a_wrong_value_is_not_part_of_a_contradiction(told):
    text = ARGS.format("load_best_model_at_end: true, eval_strategy: step, save_strategy: steps")
    assert [("FG813", "error", 1)] == told(text)


def test_label_smoothing_is_not_for_a_loss_of_ones_own(told):
    text = TRAINER + "    label_smoothing_factor: 0.1\n  loss_fn: !partial:torch.nn.functional:cross_entropy {}\n"
    assert [("FG807", "error", 6)] == told(text)
    assert [] == told(TRAINER + "    label_smoothing_factor: 0.1\n")


OTHER = {
    "../zoo/meta.yaml": "name: Zoo\n",
    "../zoo/templates/configs/tiny.yaml": "model: 1\nsize: {{ size | default(1) }}\n",
}
FROM = "main: !call:forgather:from_project {{{}}}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("project_dir: ../zoo, config_template: tiny.yaml, targets: modle", "FG245", "has no target 'modle'"),
        ("project_dir: ../zoo, config_template: tiny, targets: [model, size, sise]", "FG245", "has no target 'sise'"),
        (
            "project_dir: ../zoo, config_template: tinny, targets: model",
            "FG245",
            "config 'tinny' of project '../zoo' cannot be used",
        ),
        (
            "project_dir: ../zo, config_template: tiny, targets: model",
            "FG245",
            "config 'tiny' of project '../zo' cannot be used",
        ),
    ],
)
def test_names_of_another_project_are_looked_up(checked, arguments, code, message):
    (found,) = checked(FROM.format(arguments), OTHER).errors
    assert (code, 1) == (found.code, found.span.line)
    assert message in found.message
    assert found.hint


@pytest.mark.parametrize(
    "arguments",
    [
        "project_dir: ../zoo, config_template: tiny.yaml, targets: model",
        "project_dir: ../zoo, config_template: ~, targets: [model, size], pp_kwargs: {size: 3}",
        "args: [../zoo, tiny, model]",
        "project_dir: !var zoo, config_template: tiny, targets: nope",
    ],
)
def test_names_of_another_project_that_are_there_or_not_known(checked, arguments):
    assert () == checked(FROM.format(arguments), OTHER).errors


def test_what_is_given_only_when_built_is_not_looked_up(checked):
    text = FROM.format("project_dir: !var zoo, config_template: tiny, targets: nope")
    assert "its project_dir is known only when it is built" in [one.reason for one in checked(text).unchecked]


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        ("forgather.ml:TrainingArguments {output_dir: o, eval_strategy: no, report_to: none}", 0),
        ("transformers:TrainingArguments {output_dir: o, eval_strategy: no, report_to: none}", 0),
        ("forgather.ml:TrainingArguments {output_dir: o, run_name: none}", 1),
        ("parts.py:f {word: on, name: 10k, maybe: x}", 0),
        ("parts.py:f {plain: 10k, size: 10k, maybe: none}", 3),
        ("parts.py:f {word: on, plain: [off]}", 1),
    ],
)
def test_a_text_that_is_asked_for_looks_like_nothing_else(checked, call, lines):
    code = "def f(*, word='off', name: str = '', maybe: str | None = None, size: int | str = '1M', plain=None): ...\n"
    text = f"args: &args !call:{call}\nmain: *args\n"
    assert lines == sum(found.code == "FG222" for found in checked(text, {"parts.py": code}.items()).findings)


VALUE = "main: !call:toy.py:make\n    size: {}\n"
TOY = "def make(size: int = 1):\n    return size\n"


@pytest.mark.parametrize(
    ("printed", "sets", "place"),
    [
        ("{{ size | default(1) }}", "-- set size = 'x'\n", ("a.yaml", 1)),
        ("{{ ns.size }}", "-- set ns = namespace(size=2)\n-- set ns.size = 'x'\n", ("a.yaml", 2)),
        ("{{ 'x' if size else 2 }}", "-- set size = 1\n", ("a.yaml", 1)),
        ("{{ size ~ other }}", "-- set size = 'x'\n-- set other = 'y'\n", ("base.yaml", 2)),
        ("x", "-- set size = 1\n", ("base.yaml", 2)),
    ],
)
def test_a_finding_about_a_value_is_where_the_project_wrote_it(printed, sets, place, checked):
    child = f"{sets}-- extends 'base.yaml'\n"
    found = checked(
        child,
        {
            "../other/base.yaml": VALUE.format(printed),
            "meta.yaml": "name: Bench\nsearchdir: [templates, ../other]\n",
            "toy.py": TOY,
        },
    ).findings
    [one] = [one for one in found if one.code == "FG242"]
    assert place == (one.span.file.rpartition("/")[2], one.span.line)
    assert (place[0] == "a.yaml") == any(part.startswith("printed at ") for part in one.context)


def test_a_finding_about_an_option_is_at_the_option(tmp_path):
    folder = make_project(
        tmp_path / "bench",
        {
            "templates/configs/a.yaml": "-- extends 'base.yaml'\n",
            "../other/base.yaml": "dynamic_args: [{names: --size}]\n" + VALUE.format("{{ size | default(1) }}"),
            "meta.yaml": "name: Bench\nsearchdir: [templates, ../other]\n",
            "toy.py": TOY,
        },
    )
    [one] = [one for one in check_project(Project("a", str(folder), size="x")).findings if one.code == "FG242"]
    assert "<option --size>" == one.span.file


@pytest.mark.parametrize(
    "key", ["nproc_per_node: four", "nproc_per_node: 0", "output_dir: 3", "fault_tolerance: {restart: 3}"]
)
@pytest.mark.parametrize("template", ["trainer", "accel_trainer"])
def test_a_wrong_target_meta_hides_no_other_finding(tmp_path, template, key):
    text = f"-- extends 'trainers/{template}.yaml'\n[meta]\n    == super()\n    {key}\n"
    text += "[trainer_args]\n    == super()\n    learnign_rate: 1\n" + "    deepspeed: auto\n" * (template != "trainer")
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})
    lines = {one.span.line for one in check_project(Project("a", str(folder))).findings if one.severity == "error"}
    assert {4, 7} <= lines
