"""What becomes of packed rows is found before a run: models that mix documents, collators that overwrite labels."""

import pytest

from forgather.errors import Severity
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, input_ids, labels):
        return None

class Apart(Net):
    def forward(self, input_ids, labels, position_ids=None):
        return None

class Anything(Net):
    def forward(self, **inputs):
        return None
"""
PACKED = "!singleton:forgather.ml.data:tokenize [*rows, *tokenizer]"
JOINED = "!singleton:forgather.ml.data:tokenize {dataset: *rows, tokenizer: *tokenizer, document_boundaries: false}"
EXAMPLES = "!singleton:forgather.ml.data:tokenize_examples [*rows, *tokenizer]"
WHOLE = "!singleton:forgather.ml.data:tokenize_examples {dataset: *rows, tokenizer: *tokenizer, packing: true}"
LLAMA = "!singleton:forgather.ml.models:from_config [!singleton:transformers:LlamaConfig ]"
LABELS = "!singleton:transformers:DataCollatorForLanguageModeling {tokenizer: *tokenizer, mlm: false}"
FLAT = "!singleton:transformers:DataCollatorWithFlattening"


def found(tmp_path, model=LLAMA, rows=PACKED, collator="~", trainer="forgather.ml:Trainer"):
    text = f"""\
.define: &rows !singleton:forgather.ml.data:python_sources
.tokenizer: &tokenizer !singleton:forgather.ml.data.tokenizer:load_tokenizer [gpt2]
main: !singleton:{trainer}
  model: {model}
  train_dataset: {rows}
  data_collator: {collator}
  args: !singleton:{trainer.replace("Trainer", "TrainingArguments")} {{output_dir: out}}
"""
    files = {"templates/configs/a.yaml": text, "net.py": OWN}
    findings = check_project(Project("a.yaml", str(make_project(tmp_path / "bench", files)))).findings
    return [one for one in findings if one.code in ("FG846", "FG848", "FG849", "FG858", "FG944")]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LLAMA, None),
        (LLAMA.replace("Llama", "Mamba"), "Mamba ignores position_ids"),
        ("!singleton:transformers:GPT2LMHeadModel [!singleton:transformers:GPT2Config ]", None),
        ("!singleton:transformers:OPTForCausalLM [!singleton:transformers:OPTConfig ]", "OPT ignores position_ids"),
        ("!singleton:net.py:Net", "the forward of Net has no parameter position_ids"),
        ("!partial:net.py:Net", "the forward of Net has no parameter position_ids"),
        ("!singleton:net.py:Apart", None),
        ("!singleton:net.py:Anything", None),
        ("!singleton:forgather.ml.models:from_pretrained [somewhere]", None),
    ],
)
def test_a_model_that_mixes_documents_is_warned_about(tmp_path, model, reason):
    warned = found(tmp_path, model)
    assert (reason is not None) == bool(warned)
    for one in warned:
        assert ("FG848", Severity.WARNING, 5) == (one.code, one.severity, one.span.line)
        assert reason in one.message
    assert [] == found(tmp_path, model, JOINED)


def test_rows_within_another_call_are_seen(tmp_path):
    rows = "!call:getitem [!singleton:forgather.ml.data:tokenize [*rows, *tokenizer], train]"
    assert ["FG848"] == [one.code for one in found(tmp_path, "!singleton:net.py:Net", rows)]


@pytest.mark.parametrize("rows", [WHOLE, f"!call:forgather.ml.data:pack_examples [{EXAMPLES}, 64]"])
def test_a_model_that_mixes_packed_examples_is_refused(tmp_path, rows):
    (error,) = found(tmp_path, "!singleton:net.py:Net", rows)
    assert ("FG944", Severity.ERROR, 5) == (error.code, error.severity, error.span.line)
    assert [] == found(tmp_path, LLAMA, rows)
    assert [] == found(tmp_path, "!singleton:net.py:Net", WHOLE.replace("true", "false"))


@pytest.mark.parametrize(
    ("collator", "rows", "code"),
    [
        (LABELS, EXAMPLES, "FG846"),
        (LABELS, PACKED, "FG846"),
        (LABELS, "!singleton:forgather.ml.data:python_sources", None),
        (FLAT, PACKED, "FG858"),
        (FLAT, EXAMPLES, None),
        (FLAT, WHOLE, "FG858"),
        ("!singleton:forgather.ml.data:CausalLMCollator [*tokenizer]", EXAMPLES, None),
    ],
)
@pytest.mark.parametrize("trainer", ["forgather.ml:Trainer", "transformers:Trainer"])
def test_a_collator_that_overwrites_what_rows_have_is_found(tmp_path, trainer, collator, rows, code):
    severity = Severity.ERROR if trainer == "forgather.ml:Trainer" else Severity.WARNING
    expected = [] if code is None else [(code, severity, 6)]
    seen = found(tmp_path, rows=rows, collator=collator, trainer=trainer)
    assert expected == [(one.code, one.severity, one.span.line) for one in seen]


@pytest.mark.parametrize(
    ("collator", "rows", "codes"),
    [
        ("!partial:transformers:default_data_collator", EXAMPLES, ["FG849"]),
        ("!singleton:transformers:DataCollatorWithPadding [*tokenizer]", EXAMPLES, ["FG849"]),
        ("!partial:transformers:default_data_collator", PACKED, []),
        ("!singleton:transformers:DataCollatorForSeq2Seq [*tokenizer]", EXAMPLES, []),
    ],
)
def test_examples_that_nothing_pads_are_warned_about_where_they_are_made(tmp_path, collator, rows, codes):
    seen = found(tmp_path, rows=rows, collator=collator)
    assert codes == [one.code for one in seen]
    assert all(one.severity is Severity.WARNING and one.span.line == 5 for one in seen)
