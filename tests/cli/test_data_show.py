"""`fgcli data show`: the screen, the page and the JSON of rows, what is never built, and bad input."""

import io
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forgather.cli.data_output import DataScreen
from forgather.cli.main import main
from forgather.cli.palette import ROLES
from forgather.ml.data.data_view import DataView
from forgather.ml.data.shown_rows import ShownRow
from forgather.ml.data.token_kinds import Kind
from tests.golden import check_golden
from tests.ml.test_report import parsed
from tests.project.workbench import make_project

SCREENS = Path(__file__).with_name("cases") / "data_show"
CODES = re.compile(r"\x1b\[[0-9;]*m")

TOOLS = """\
import torch
from datasets import Dataset
from forgather.ml.data import tokenize, tokenize_examples
from tests.ml.packed_rows import symbols

def tokenizer():
    return symbols()

def packed(tokenizer, length):
    return tokenize(Dataset.from_dict({"text": ["abc", "de", "fghijklmnop" * 4]}), tokenizer, length)

def examples(tokenizer):
    rows = {"q": ["ab", "c" * 30, "ab"], "a": ["xyz", "d", "xyz"]}
    return tokenize_examples(Dataset.from_dict(rows), tokenizer, 40, prompt_column="q", completion_column="a")

def points():
    return {"a": [{"x": [0.5, 1.0 * i], "labels": i % 2, "text": "<script>alert(1)</script>"} for i in range(3)],
            "b": [{"x": [2.0, 2.0], "labels": 0}] * 2}

def pairs():
    return [{"prompt_ids": [2, 3, 4], "chosen_ids": [5, 0], "rejected_ids": [6, 7, 0]}] * 2

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter({"input_ids": [2, 3, 4]} for _ in range(10**9))

def bad_rows():
    return [{"input_ids": [2, 3], "labels": [2, 3]}, {"input_ids": [2, 3], "labels": [2]}]

def untrained():
    return [{"input_ids": [2, 3], "labels": [-100, 3 if i % 2 == 0 else -100]} for i in range(5)]

def long():
    return [{"input_ids": [2] * 1500}] * 2

def collate_with(model):
    return list

def explode(*args):
    raise RuntimeError("the model was built")
"""
BASE = """\
tokenizer: &tokenizer
-- block tokenizer
  !singleton:tools.py:tokenizer []
-- endblock tokenizer
train_dataset: &train_dataset
-- block train
  !singleton:tools.py:examples [*tokenizer]
-- endblock train
eval_dataset: &eval_dataset
-- block eval
  !singleton:tools.py:packed [*tokenizer, 6]
-- endblock eval
model: &model !singleton:transformers:AutoModelForCausalLM.from_config
  - !call:tools.py:explode []
data_collator: &data_collator
-- block collator
  !singleton:forgather.ml.data:CausalLMCollator {tokenizer: *tokenizer}
-- endblock collator
trainer_args: &trainer_args
  !singleton:forgather.ml:TrainingArguments {output_dir: out, per_device_train_batch_size: 2}
main: !singleton:forgather.ml:Trainer
  model: *model
  args: *trainer_args
  train_dataset: *train_dataset
  eval_dataset: *eval_dataset
  data_collator: *data_collator
  processing_class: *tokenizer
-- block loss
-- endblock loss
"""
CONFIGS = {
    "base": BASE,
    "plain": "-- extends 'base.yaml'\n[tokenizer]\n  ~\n[train]\n  !call:getitem [!call:tools.py:points [], a]\n"
    "[eval]\n  !call:tools.py:points []\n[collator]\n  ~\n",
    "stream": "-- extends 'base.yaml'\n[train]\n  !singleton:tools.py:Stream []\n[eval]\n  ~\n",
    "bad": "-- extends 'base.yaml'\n[train]\n  !call:tools.py:bad_rows []\n[eval]\n  !call:list []\n",
    "untrained": "-- extends 'base.yaml'\n[train]\n  !call:tools.py:untrained []\n",
    "long": "-- extends 'base.yaml'\n[train]\n  !call:tools.py:long []\n",
    "modelled": "-- extends 'base.yaml'\n[collator]\n  !call:tools.py:collate_with\n  model: *model\n",
    **{
        name: "-- extends 'base.yaml'\n[train]\n  !call:tools.py:pairs []\n[collator]\n"
        "  !singleton:forgather.ml.data:PreferenceCollator {tokenizer: *tokenizer}\n"
        f"[loss]\n  loss_fn: !singleton:forgather.ml.preference_losses:{name}Loss []\n"
        for name in ("DPO", "ORPO", "Reward")
    },
    "dataless": "numbers: [1, 2]\nmain: *x\n".replace("numbers: ", "numbers: &x "),
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def bench(tmp_path, monkeypatch):
    files = {
        f"templates/configs/{name}.yaml": text.replace("base.yaml", "configs/base.yaml")
        for name, text in CONFIGS.items()
    }
    monkeypatch.chdir(make_project(tmp_path / "bench", {"tools.py": TOOLS, **files}))
    return tmp_path / "bench"


@pytest.fixture
def shown(bench, capsys):
    """Returns a function that runs `fgcli data show` and returns its status, output and reports."""

    def run(config, *arguments):
        status = main(["-t", config, "data", "show", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def screen(bench, monkeypatch, capsys):
    """Returns a function that returns what the command prints on a terminal of 80 columns."""

    def run(config, *arguments, **variables):
        for name, value in {"COLUMNS": "80", "NO_COLOR": "1", **variables}.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", stream := Terminal())
            assert 0 == main(["-t", config, "data", "show", *arguments])
        capsys.readouterr()
        return stream.getvalue()

    return run


@pytest.mark.parametrize(
    ("name", "config", "arguments"),
    [
        ("examples", "base", []),
        ("packed", "base", ["--set", "eval", "--rows", "0:3"]),
        ("plain", "plain", ["--rows", "1:3"]),
        ("stream", "stream", ["--row", "1"]),
    ],
)
def test_a_screen_is_as_it_was_looked_at(name, config, arguments, screen):
    text = screen(config, *arguments)
    assert [] == [line for line in text.splitlines() if len(line) > 80]
    check_golden(SCREENS / f"{name}.txt", text)


def test_colors_and_marks_say_the_same(screen, monkeypatch):
    marked = screen("base")
    colored = screen("base", NO_COLOR="", FORCE_COLOR="1")
    lines = [line for line in colored.splitlines() if ROLES["trained"] in line and "loss" not in line]
    # The first row has four trained letters and the end of text, in two shades of green, and two masked letters.
    assert 3 == len(lines) and (2, 2) == tuple(lines[0].count(ROLES[role]) for role in ("trained", "trained_next"))
    assert (1, 1, 1) == tuple(lines[0].count(code) for code in (ROLES["masked"], ROLES["masked_next"], "\x1b[4m"))
    plain = CODES.sub("", colored)
    assert {line for line in plain.splitlines() if line.startswith("row")} == {
        line for line in marked.splitlines() if line.startswith("row")
    }
    assert "mmtttt----" in marked and "mmtttt" not in plain


def test_text_with_line_breaks_wide_and_control_characters_keeps_its_marks_below():
    texts = _Texts(["a\n  b", "日本", "\x1b[1m", "x" * 30])
    kinds = [Kind.TRAINED, Kind.MASKED, Kind.TRAINED, Kind.MASKED]
    row = ShownRow(number=0, ids_T=[0, 1, 2, 3], kinds_T=kinds, labels_T=[0, -100, 1, -100])
    options = SimpleNamespace(is_causal=True, class_names=None)
    view = SimpleNamespace(text=texts, label_is_token=True, rows=[row], options=options)
    view.label_text, view.marked_label = partial(DataView.label_text, view), partial(DataView.marked_label, view)
    lines = [line.text for line in DataScreen(view, "", width=22, has_color=False)._row(row)]
    # A token that is longer than a line begins on the line before it; the marks of a wide character take two columns.
    assert [
        "  a⏎", "  t-", "    b日本\\x1b[1m→日本x", "  ---m---t-----------m", f"  {'x' * 20}", f"  {'-' * 20}",
        f"  {'x' * 9}", f"  {'-' * 9}",
    ] == lines[1:]  # fmt: skip
    in_ascii = DataScreen(view, "", width=22, has_color=False, encoding="ascii")._row(row)
    assert ["  a\\n", "  t--"] == [line.text for line in in_ascii[1:3]]


class _Texts(list):
    tokenizer = True

    def __call__(self, token_id):
        return self[token_id]

    def is_special(self, token_id):
        return False


def test_a_long_row_is_cut_unless_it_is_the_only_one(shown):
    assert "... 476 tokens are not shown: '--row 1' shows all ..." in shown("long", "--rows", "0:2")[1]
    whole = shown("long", "--row", "1")[1]
    assert "not shown" not in whole and 1500 == sum(
        line.count("a") for line in whole.splitlines() if {*line} == {" ", "a"}
    )


def test_json_has_ids_labels_texts_and_kinds_of_each_token(shown):
    status, out, _ = shown("base", "--json")
    facts = json.loads(out)
    assert (0, "base.yaml", "train_dataset", 3) == (status, facts["config"], facts["data_set"], facts["total_rows"])
    assert ("CausalLMCollator", 2, True) == tuple(facts[name] for name in ("collator", "batch_rows", "is_causal"))
    row = facts["rows"][0]
    # Rows 0 and 1 are one batch, so row 0 is padded to the 32 tokens of row 1.
    assert ["masked"] * 2 + ["trained"] * 4 + ["padding"] * 26 == row["kinds"]
    assert ["a", "b", "x", "y", "z", "<eos>"] == row["tokens"][:6] and [-100, -100] == row["labels"][:2]
    assert (6, 4, 2, 26, [0]) == tuple(
        row[name] for name in ("length", "num_trained", "num_masked", "num_padding", "document_starts")
    )
    assert {32} == {len(row[name]) for name in ("input_ids", "labels", "tokens", "kinds")}
    seen = facts["statistics"]
    assert (3, 44, 10, 1, [[2, 0]]) == tuple(
        seen[name] for name in ("rows_read", "tokens", "trained_tokens", "duplicate_rows", "duplicates")
    )


def test_a_page_is_complete_escaped_and_says_what_json_says(shown, bench):
    status, out, err = shown("base", "--html", "page.html")
    assert (0, "", "wrote page.html\n") == (status, out, err)
    page = (bench / "page.html").read_text()
    assert "row 2: 6 tokens, 4 trained, 2 masked" in parsed(page).lower()
    facts = json.loads(shown("base", "--json")[1])
    for kind in ("trained", "masked", "padding"):
        tokens = sum(row["kinds"].count(kind) for row in facts["rows"])
        assert tokens == len(re.findall(rf'<i class="{kind}[ "]', page)), kind
    shown("plain", "--no-collator", "--html", "plain.html")
    plain = (bench / "plain.html").read_text()
    assert "&lt;script&gt;alert" in plain and "<script" not in plain and "alert(1)" in parsed(plain)


@pytest.mark.parametrize(
    ("loss", "trained", "fact"),
    [
        ("DPO", (10, ["mmmtt", "mmmttt"]), "DPOLoss: the answers are trained"),
        ("ORPO", (14, ["mtttt", "mmmttt"]), "ORPOLoss: the answers and the prompt of the chosen one are trained"),
        ("Reward", (None, ["iiiii", "iiiiii"]), "RewardLoss: each answer gets one score, and no token has a target"),
    ],
)
def test_the_trained_tokens_are_those_of_the_loss_of_the_config(loss, trained, fact, shown):
    status, out, err = shown(loss, "--row", "0", "--json")
    found = json.loads(out)
    kinds = ["".join(kind[0] for kind in row["kinds"]).rstrip("p") for row in found["rows"]]
    assert (0, "", f"{loss}Loss", trained) == (
        status,
        err,
        found["loss"],
        (found["statistics"]["trained_tokens"], kinds),
    )
    assert fact in shown(loss)[1]


def test_the_model_is_never_built_and_no_process_group_exists(shown):
    assert 0 == shown("base")[0]
    assert not torch.distributed.is_initialized()
    assert 1 == main(["-t", "base", "construct", "main"])  # the negative control


def test_rows_without_a_trained_token_are_a_warning_with_their_numbers(shown):
    status, out, err = shown("untrained")
    message = "warning[FG484]: 2 rows of train_dataset without anything to learn, no label but -100: 1, 3\n  --> "
    assert 0 == status and err.startswith(message) and "row 1: 2 tokens, 0 trained, 2 masked" in out
    assert "FG484" not in shown("base")[2]


@pytest.mark.parametrize(
    ("config", "arguments", "code", "message"),
    [
        ("base", ["--set", "test"], "FG480", "there is no data set 'test'"),
        ("base", ["--set", "tokenizer"], "FG480", "tokenizer is not a data set"),
        ("base", ["--set", "model"], "FG483", "model is the model, which"),
        ("base", ["--set", "main"], "FG483", "main needs the model, which"),
        ("base", ["--set", "train.a"], "FG480", "train_dataset is one data set, without a part 'a'"),
        ("plain", ["--set", "eval"], "FG480", "eval_dataset has 2 data sets"),
        ("plain", ["--set", "eval.c"], "FG480", "eval_dataset has no data set 'c'"),
        ("stream", ["--set", "eval"], "FG480", "the config has no eval_dataset"),
        ("dataless", [], "FG480", "the config has no train_dataset, and no other data set of a trainer"),
        ("base", ["--row", "3"], "FG481", "train_dataset has 3 rows, and no row 3"),
        ("bad", ["--set", "eval"], "FG481", "eval_dataset has no rows"),
        ("bad", [], "FG482", "the collator fails on row 1 of train_dataset: [FG847]"),
        ("modelled", [], "FG483", "the data collator needs the model"),
        ("base", ["--html", "nowhere/page.html"], "FG418", "'nowhere/page.html' cannot be written"),
        ("base", ["--html", "meta.yaml"], "FG418", "'meta.yaml' is a file of the project"),
    ],
)
def test_bad_input_is_one_located_sentence(config, arguments, code, message, shown):
    status, out, err = shown(config, *arguments)
    assert (1, "") == (status, out)
    assert err.startswith(f"error[{code}]: {message}") and "Traceback" not in err and 1 == err.count("error[")
    assert code == "FG418" or "\n  --> " in err, err
    assert "\n  help: " in err


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "3:1"], ["--rows", "x"], ["--rows", "2:"], ["--rows", "-1"], ["--row", "0:1"], ["--set", ""]],
)
def test_an_argument_that_cannot_be_meant_is_refused(arguments, shown):
    with pytest.raises(SystemExit) as ended:
        shown("base", *arguments)
    assert 2 == ended.value.code


def test_a_number_alone_is_no_range_as_it_could_mean_how_many(shown, capsys):
    with pytest.raises(SystemExit):
        shown("base", "--rows", "1")
    assert "--rows 0:1 shows the first row, and --row 1 shows row 1 (from 0)" in capsys.readouterr().err


def test_one_of_several_sets_other_targets_and_rows_without_the_collator_are_shown(shown):
    assert "eval_dataset.b" in shown("plain", "--set", "eval.b")[1]
    assert "modelled.yaml" in shown("modelled", "--no-collator")[1]
    bad = json.loads(shown("bad", "--no-collator", "--json")[1])
    assert [[2, 3], [2]] == [row["columns"]["labels"] for row in bad["rows"]]


def test_set_with_a_value_changes_the_graph(shown):
    facts = json.loads(shown("base", "--set", "trainer_args.per_device_train_batch_size=1", "--json")[1])
    assert (1, 0) == (facts["batch_rows"], facts["statistics"]["padding_tokens"])


def test_code_that_is_not_trusted_does_not_run(shown, monkeypatch):
    monkeypatch.setenv("FORGATHER_TRUST", "")
    status, _, err = shown("base")
    assert 1 == status and "FG440" in err
