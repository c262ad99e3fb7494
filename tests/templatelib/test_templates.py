"""Every template of the library renders, loads, and fits the block that it says it is for."""

import re
from pathlib import Path

import pytest

from forgather.codegen.emit_python import emit_python
from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.environment import ConfigEnvironment
from forgather.config.equality import same_graph
from forgather.config.load import load
from forgather.config.render import render_text
from forgather.verification.prove import prove

LIBRARY = Path(__file__).parents[2] / "templatelib"
FRAGMENTS = sorted(file for file in LIBRARY.rglob("*.yaml") if re.match(r"## For \[\w+\]", file.read_text()))
ENVIRONMENT = ConfigEnvironment(searchpath=(str(LIBRARY),))


def name(file):
    return str(file.relative_to(LIBRARY))


def graph_of(text):
    rendered = render_text(ENVIRONMENT, text)
    graph = load(rendered)
    findings = (*rendered.diagnostics, *graph.diagnostics)
    # A text may say what a template of the library says already (FG233).
    assert [] == [str(finding) for finding in findings if finding.code != "FG233"]
    return graph


@pytest.mark.parametrize("trainer", ["trainers/trainer.yaml", "trainers/hf_trainer.yaml"])
def test_a_trainer_template_is_a_whole_run(trainer):
    graph = graph_of(f"-- extends '{trainer}'\n")
    assert {"main", "model", "tokenizer", "train_dataset", "trainer_args", "optimizer", "meta"} <= set(graph.targets)


@pytest.mark.parametrize("trainer", ["trainers/trainer.yaml", "trainers/hf_trainer.yaml"])
def test_an_included_trainer_template_is_the_trainer_alone(trainer):
    own = "".join(
        f"{key}: &{key} 1\n" for key in ("model", "tokenizer", "train_dataset", "eval_dataset", "sample_prompts")
    )
    graph = graph_of(f"-- set ns = namespace()\n{own}-- include '{trainer}'\n")
    assert {"main", "trainer", "trainer_args"} <= set(graph.targets)
    assert "meta" not in graph.targets
    assert 1 == graph.targets["model"].value.value


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=name)
def test_a_fragment_fits_its_block(fragment):
    block = re.match(r"## For \[(\w+)\]", fragment.read_text())[1]
    graph = graph_of(f"-- extends 'trainers/trainer.yaml'\n[{block}]\n    -- include '{name(fragment)}'\n")
    node = graph.targets[block].value
    assert f"lib:{name(fragment)}" == f"lib:{Path(node.span.file).relative_to(LIBRARY)}"


def assert_means_the_same_as_text(graph):
    """Asserts that a graph reads back from YAML, and that its Python makes its calls."""
    assert same_graph(graph, load(render_text(ConfigEnvironment(), emit_yaml(graph))))
    for targets in (["main"], list(graph.targets)):
        code = emit_python(graph, targets)
        assert prove(graph, code.text, targets, code.parameters) > 5


@pytest.mark.parametrize("trainer", ["trainers/trainer.yaml", "trainers/hf_trainer.yaml"])
def test_a_trainer_template_as_yaml_and_as_python_means_the_same(trainer):
    assert_means_the_same_as_text(graph_of(f"-- extends '{trainer}'\n"))


@pytest.mark.parametrize("trainer", ["trainers/trainer.yaml", "trainers/hf_trainer.yaml"])
@pytest.mark.parametrize("fragment", FRAGMENTS, ids=name)
def test_a_fragment_as_yaml_and_as_python_means_the_same(fragment, trainer):
    block = re.match(r"## For \[(\w+)\]", fragment.read_text())[1]
    assert_means_the_same_as_text(graph_of(f"-- extends '{trainer}'\n[{block}]\n    -- include '{name(fragment)}'\n"))


def test_every_template_is_a_trainer_a_default_or_a_fragment():
    known = {name(file) for file in FRAGMENTS}
    others = {name(file) for file in LIBRARY.rglob("*.yaml")} - known
    kinds = ("trainers/", "defaults/", "rows/", "scaffold/", "tasks/")
    assert set() == {other for other in others if not other.startswith(kinds)}


def test_a_project_replaces_a_default_by_a_template_of_the_same_name(tmp_path):
    (tmp_path / "defaults").mkdir()
    (tmp_path / "defaults" / "model_config.yaml").write_text("    !singleton:transformers:GPT2Config\n    n_layer: 7\n")
    environment = ConfigEnvironment(searchpath=(str(tmp_path), str(LIBRARY)))
    graph = load(render_text(environment, "-- extends 'trainers/hf_trainer.yaml'\n"))
    assert "transformers:GPT2Config" == graph.targets["model_config"].value.constructor


def test_a_base_model_and_its_chat_template_are_named_once():
    graph = graph_of(
        "-- extends 'trainers/trainer.yaml'\n[config_metadata]\n    -- set ns.base_model = 'base'\n"
        "    -- set ns.chat_template = 'chatml'\n"
        "[raw_dataset]\n    -- include 'datasets/instructions.yaml'\n    paths: rows.jsonl\n"
    )
    nodes = (graph.targets[target].value for target in ("model", "tokenizer", "train_dataset"))
    model, tokenizer, rows = ({entry.key: entry.value for entry in node.kwargs} for node in nodes)
    assert {"base"} == {given["pretrained_model_name_or_path"].value for given in (model, tokenizer)}
    assert ("chatml", "completion") == (tokenizer["chat_template"].value, rows["train_on"].value)
    assert "forgather.ml.data:CausalLMCollator" == graph.targets["data_collator"].value.constructor


# Snippets of the documents this project came from: block texts that must work as they stand.
SNIPPETS = {
    "trainer_args": """
-- block trainer_args
    == super()

    # Output and logging
    output_dir: "./output_models/pipeline_model"
    logging_steps: 10
    save_steps: 500
-- endblock trainer_args
""",
    "distributed_env": """
-- block distributed_env
    !singleton:forgather.ml.distributed:DistributedEnvironment@distributed_env
-- endblock distributed_env
""",
    "loss_fn": """
-- block loss_fn
    !singleton:torch.nn:CrossEntropyLoss@loss_fn
-- endblock loss_fn
""",
    "trainer_callbacks": """
-- block trainer_callbacks
    !list:@trainer_callbacks
    - !singleton:forgather.ml.tb_logger:TBLogger
        args: [*summary_writer]

    - !singleton:forgather.ml.json_logger:JsonLogger
        name: "Distributed Training"
        rank_filter: 0           # Only log from main process
-- endblock trainer_callbacks
""",
}


@pytest.mark.parametrize("block", SNIPPETS)
def test_a_known_snippet_works_as_it_stands(block):
    graph = graph_of("-- extends 'trainers/trainer.yaml'\n" + SNIPPETS[block])
    assert graph.targets[block].value is not None
