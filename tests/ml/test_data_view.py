"""Rows as the model gets them: the kind of every token is what one computes by hand, and what the loss counts."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, default_data_collator

from forgather.ml.data import CausalLMCollator, PaddingCollator, PreferenceCollator, pack_examples, tokenize_examples
from forgather.ml.data.collated_rows import RowError, RowReader
from forgather.ml.data.data_view import ViewOptions, view_data
from forgather.ml.data.row_statistics import histogram
from forgather.ml.data.shown_rows import value_text
from forgather.ml.data.token_kinds import Kind, token_batch
from forgather.ml.data.token_text import TokenText
from forgather.ml.losses import loss_rule
from forgather.ml.preference_losses import DPOLoss, ORPOLoss
from tests.ml.fixtures import tiny_llama
from tests.ml.packed_rows import VOCAB, packed, symbols

LETTERS = {"trained": "t", "masked": "m", "padding": "p", "input": "i"}


def view(dataset, collate=default_data_collator, **options):
    options = {"name": "rows", "is_causal": True, **options}
    return view_data(dataset, collate, options.pop("tokenizer", symbols()), ViewOptions(**options))


def kinds(row):
    return "".join(LETTERS[kind.word] for kind in row.kinds_T)


def texts(row):
    return "".join(symbols().convert_ids_to_tokens(row.ids_T)).replace("<eos>", "E")


def examples(tmp_path, questions, answers, length=12):
    source = Dataset.from_dict({"q": questions, "a": answers})
    return tokenize_examples(source, symbols(), length, prompt_column="q", completion_column="a", cache_dir=tmp_path)


def test_packed_rows_are_what_one_computes_by_hand():
    found = view(packed(["abc", "de", "fghij"], 6))
    assert [("abcEde", "mtttmt", [0, 4]), ("Efghij", "mmtttt", [0, 1])] == [
        (texts(row), kinds(row), row.starts) for row in found.rows
    ]
    seen = found.statistics
    assert (12, 8, 0, 4, 6) == (
        seen.tokens, seen.trained_tokens, seen.padding_tokens, seen.documents, seen.max_length
    )  # fmt: skip


def test_packed_examples_are_separate_documents_and_their_rows_nearly_full(tmp_path):
    rows = pack_examples(examples(tmp_path, ["ab", "c", "e"], ["xyz", "d", "f"]), 7, cache_dir=tmp_path)
    found = view(rows, CausalLMCollator(symbols()))
    assert [("abxyzE", "mmtttt", [0]), ("cdEefE", "mttmtt", [0, 3])] == [
        (texts(row), kinds(row), row.starts) for row in found.rows
    ]
    assert "3" == found.facts()["documents"]
    found = view(
        pack_examples([{"input_ids": [2] * size} for size in (4, 1, 3, 3)], 6, cache_dir=tmp_path),
        CausalLMCollator(symbols()),
    )
    assert "4; the rows are 91.7% full, compared with the longest" == found.facts()["documents"]
    assert ["mttmtt", "mtttmp"] == sorted(kinds(row) for row in found.rows)


def test_examples_are_padded_by_the_collator_and_not_by_the_id_of_a_token(tmp_path):
    found = view(examples(tmp_path, ["ab", "c"], ["xyz", "d"]), CausalLMCollator(symbols()))
    # This tokenizer pads with its end-of-text token: the first E of the second row is trained, the others are padding.
    assert [("abxyzE", "mmtttt"), ("cdEEEE", "mttppp")] == [(texts(row), kinds(row)) for row in found.rows]
    assert (9, 6, 3) == (
        found.statistics.tokens, found.statistics.trained_tokens, found.statistics.padding_tokens
    )  # fmt: skip
    assert 0.25 == found.statistics.padding_share


def test_rows_that_are_padded_at_the_start_or_without_a_mask_are_seen():
    ids, labels = np.array([[0, 0, 5, 6]]), np.array([[-100, -100, 5, 6]])
    masked = token_batch({"input_ids": ids, "labels": labels, "attention_mask": ids > 0}, is_causal=True)
    assert [0, 0, 2, 2] == masked.kinds_BT[0].tolist()
    rows = [{"input_ids": [5, 6]}]
    for batch_ids, expected in (([[0, 0, 5, 6]], [0, 0, 2, 2]), ([[5, 6, 0, 0]], [1, 2, 0, 0])):
        batch = {"input_ids": np.array(batch_ids), "labels": np.where(np.array(batch_ids) > 0, batch_ids, -100)}
        assert expected == token_batch(batch, is_causal=True, rows=rows).kinds_BT[0].tolist()
    packed_rows = [{"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}, {"input_ids": [8], "position_ids": [0]}]
    found = view(packed_rows, CausalLMCollator(symbols()))
    assert ["mtt", "mpp"] == [kinds(row) for row in found.rows]
    assert [[0, 2], [0]] == [row.starts for row in found.rows]  # padding is at position 0, and is no document


@pytest.mark.parametrize("make", ["packed", "examples", "unmasked"])
def test_as_many_tokens_are_trained_as_the_loss_is_divided_by(make, tmp_path):
    rows = {
        "packed": lambda: packed(["abcdefg", "hi", "jklmnop", "q"], 5),
        "examples": lambda: list(examples(tmp_path, ["ab", "cdef", "g"], ["xyz", "d", "hijk"])),
        "unmasked": lambda: [{"input_ids": [3, 4, 5]}, {"input_ids": [6]}, {"input_ids": [7, 8]}],
    }[make]()
    collate = CausalLMCollator(symbols())
    rule = loss_rule(tiny_llama(vocab_size=VOCAB))
    divisor = rule.count(rule.prepared(collate([dict(row) for row in rows])))
    assert int(divisor) == view(rows, collate).statistics.trained_tokens
    # The negative control: without the shift, the first label of a row counts too.
    unshifted = view(rows, collate, is_causal=False).statistics.trained_tokens
    assert (int(divisor) + 3 if make == "unmasked" else int(divisor)) == unshifted


def test_labels_of_rows_are_counted_by_class_and_tokens_are_inputs():
    rows = [{"input_ids": [2 + i, 3], "label": label} for i, label in enumerate((0, 1, 1, -100))]
    found = view(rows, PaddingCollator(symbols()), is_causal=False)
    assert {"ii"} == {kinds(row) for row in found.rows}
    assert [0, 1, 1, -100] == [int(row.columns["labels"]) for row in found.rows]
    seen = found.statistics
    assert ({0: 1, 1: 2}, 1, [3], None) == (seen.classes, seen.untrained_rows, seen.untrained, seen.trained_tokens)
    assert "3" in found.warnings[0] and "nothing" not in found.warnings[0]


def test_labels_of_a_decoder_are_a_sequence_of_their_own():
    rows = [{"input_ids": [2, 3, 4], "labels": [5, 6]}, {"input_ids": [7], "labels": [8]}]
    found = view(rows, PaddingCollator(symbols()), is_causal=False)
    assert ["iii", "ipp"] == [kinds(row) for row in found.rows]
    assert [[Kind.TRAINED] * 2, [Kind.TRAINED, Kind.PADDING]] == [row.target_kinds_U for row in found.rows]
    assert 3 == found.statistics.trained_tokens


def test_tokens_that_are_masked_for_prediction_have_the_label_that_they_had():
    torch.manual_seed(0)
    tokenizer = symbols().__class__(tokenizer_object=symbols().backend_tokenizer, mask_token="<unk>", pad_token="<eos>")
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    found = view([{"input_ids": list(range(10, 30))}], collate, is_causal=False, tokenizer=tokenizer)
    (row,) = found.rows
    assert found.label_is_token and 0 < row.count(Kind.TRAINED) < 20
    trained = [place for place, kind in enumerate(row.kinds_T) if kind is Kind.TRAINED]
    assert [10 + place for place in trained] == [row.labels_T[place] for place in trained]


def test_a_collator_that_joins_rows_shows_each_row_alone():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    found = view(rows, DataCollatorWithFlattening())
    assert found.joins_rows and ["mtt", "mt"] == [kinds(row) for row in found.rows]
    assert (5, 3, 2) == (found.statistics.tokens, found.statistics.trained_tokens, found.statistics.documents)


def test_a_collator_that_makes_two_rows_of_one_counts_the_row_once():
    def halves(rows):
        ids = torch.tensor([half for row in rows for half in (row["input_ids"][:2], row["input_ids"][2:])])
        return {"input_ids": ids, "labels": ids}

    found = view([{"input_ids": [2, 3, 4, 5]}, {"input_ids": [2, 3, 4, 6]}], halves)
    assert [0, 0, 1, 1] == [row.number for row in found.rows]
    assert (2, 0, 8) == (found.statistics.rows_read, found.statistics.duplicate_rows, found.statistics.tokens)


def test_statistics_are_those_of_a_count_in_plain_python():
    draw = random.Random(1)
    rows = []
    for number in range(157):
        ids = [draw.randrange(2, 6) for _ in range(draw.randrange(1, 9))]
        labels = [token if draw.random() < 0.6 else -100 for token in ids]
        rows.append({"input_ids": ids, "labels": labels, "index": number})
    seen = view(rows, CausalLMCollator(symbols()), batch_rows=7, shuffles=True).statistics
    lengths = sorted(len(row["input_ids"]) for row in rows)
    trained = [sum(label != -100 for label in row["labels"][1:]) for row in rows]
    first = {}
    pairs = [
        (number, first[key])
        for number, row in enumerate(rows)
        if first.setdefault(key := (*row["input_ids"], *row["labels"]), number) != number
    ]
    untrained = [number for number, count in enumerate(trained) if not count]
    assert (157, sum(lengths), sum(trained)) == (seen.rows_read, seen.tokens, seen.trained_tokens)
    assert (lengths[0], lengths[78], lengths[-1]) == (seen.min_length, seen.median_length, seen.max_length)
    assert (lengths.count(lengths[-1]), 157) == (seen.rows_at_max, sum(count for *_, count in seen.histogram))
    assert (len(untrained), untrained[:20]) == (seen.untrained_rows, seen.untrained)
    assert pairs and (len(pairs), pairs[:20]) == (seen.duplicate_rows, seen.duplicates)


def test_padding_is_counted_in_batches_of_the_training():
    rows = [{"input_ids": [2] * length} for length in (1, 1, 4, 4)]
    shares = [view(rows, CausalLMCollator(symbols()), batch_rows=size).statistics.padding_tokens for size in (2, 4)]
    assert [0, 6] == shares


def test_rows_of_the_greatest_length_may_be_cut(tmp_path):
    found = view(examples(tmp_path, ["a"] * 3, ["bcdefgh", "bcdefghijk", "b"], length=9), CausalLMCollator(symbols()))
    seen = found.statistics
    assert (9, 2, 1) == (seen.max_length, seen.rows_at_max, seen.rows_at_max_without_end)
    assert "1 without <eos> at the end, which may be cut" in found.facts()["longest"]


def test_tags_and_classes_have_their_names_and_rows_without_predicted_tokens_are_not_called_cut():
    tagged = [{"input_ids": [2, 3, 4], "labels": [2, -100, 1]}] * 2
    found = view(tagged, is_causal=False, class_names=["O", "B-PER", "B-LOC"])
    row = found.rows[0]
    # The first label is the id of its token, too.
    marks = [found.marked_label(*pair) for pair in zip(row.ids_T, row.labels_T, strict=True)]
    assert ["B-LOC", "", "B-PER"] == marks and ["O", "B-PER", "B-LOC"] == found.as_dict()["class_names"]
    assert "cut" not in found.facts().get("longest", "")

    found = view([{"input_ids": [2, 3], "label": number} for number in (0, 1, 1)], is_causal=False, class_names="ab")
    assert "a: 1 row, b: 2 rows" == found.facts()["labels"] and "1 (b)" == found.value_text("labels", 1)

    target = {"input_ids": [[2, 3]], "labels": [[4, 5, -100]], "attention_mask": [[1, 1]]}
    found = view([{"input_ids": [2, 3]}], lambda rows: {k: torch.tensor(v) for k, v in target.items()}, is_causal=False)
    assert "2, and 2 of targets, which are trained" == found.facts()["tokens"]


def test_what_the_loss_counts_though_it_is_padding_is_a_warning():
    rows = [{"input_ids": [2, 0], "labels": [2, 0], "attention_mask": [1, 0]}]
    found = view(rows)
    assert 1 == found.statistics.labelled_padding_tokens and "padding token" in found.warnings[-1]


def test_more_than_one_bin_covers_every_length_without_a_gap():
    lengths = np.array([3, 3, 17, 40])
    bins = histogram(lengths, bins=4)
    assert (3, 40, 4) == (bins[0][0], bins[-1][1], sum(count for *_, count in bins))
    assert all(high + 1 == low for (_, high, _), (low, _, _) in zip(bins, bins[1:], strict=False))


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter({"input_ids": [number % 50 + 2, 3]} for number in range(10**9))


def test_of_a_stream_only_the_first_rows_are_read():
    found = view(Endless(), CausalLMCollator(symbols()), most_rows=20, start=2, stop=4)
    assert (None, 20, [2, 3]) == (found.total, found.statistics.rows_read, [row.number for row in found.rows])
    assert found.is_partial and "not known" in found.facts()["rows"]


def test_a_stream_that_ends_has_a_number_of_rows_and_is_read_once():
    once = iter([{"input_ids": [2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [4, 5]}])
    found = view(once, CausalLMCollator(symbols()), stop=2)
    assert (3, 3, 1, 2) == (
        found.total, found.statistics.rows_read, found.statistics.duplicate_rows, len(found.rows)
    )  # fmt: skip


def test_columns_that_no_model_takes_are_left_out_and_named():
    rows = [{"text": "a", "words": [1] * size, "input_ids": [2] * size, "note": [1] * (size + 1)} for size in (1, 2)]
    found = view(rows, CausalLMCollator(symbols()))
    assert (("text", "words", "note"), ("input_ids", "labels", "attention_mask")) == (found.left_out, found.columns)
    with pytest.raises(RowError, match="'text'"):
        view(rows, CausalLMCollator(symbols()), removes_columns=False)


def test_plain_rows_are_columns_without_tokens():
    rows = [(torch.tensor([0.5, 1.5]), torch.tensor(1)), (torch.tensor([0.5, 1.5]), torch.tensor(1))]
    found = view(rows, torch.utils.data.default_collate, tokenizer=None)
    assert (("0", "1"), 1, None) == (found.columns, found.statistics.duplicate_rows, found.statistics.tokens)
    assert [[], []] == [row.ids_T for row in found.rows]


def test_without_a_tokenizer_ids_are_shown():
    assert "7" == TokenText(None)(7)
    text = TokenText(symbols())
    assert ("a", "<eos>", True, "<99>") == (text(2), text(0), text.is_special(0), text(99))


def test_the_text_of_a_token_has_its_space_and_parts_of_a_character_are_shown():
    decoder = SimpleNamespace(
        all_special_ids=[], convert_ids_to_tokens=["▁word", "âĢ", ""].__getitem__,
        decode=lambda ids, **_: ["word", "\ufffd", ""][ids[0]],
    )  # fmt: skip
    assert [" word", "âĢ", ""] == list(map(TokenText(decoder), range(3)))


@pytest.mark.parametrize(("start", "length", "message"), [(3, 3, "has 3 rows, and no row 3"), (0, 0, "has no rows")])
def test_a_row_beyond_the_end_is_an_error(start, length, message):
    for rows in ([{"input_ids": [2]}] * length, iter([{"input_ids": [2]}] * length)):
        with pytest.raises(RowError, match=message) as caught:
            view(rows, CausalLMCollator(symbols()), start=start, stop=start + 1)
        assert "FG481" == caught.value.code


def test_the_row_on_which_the_collator_fails_is_named():
    rows = [{"input_ids": [2, 3], "labels": [2, 3]} for _ in range(30)]
    rows[17] = {"input_ids": [2, 3], "labels": [2]}
    with pytest.raises(RowError, match="fails on row 17 of rows: .FG847.") as caught:
        view(rows, CausalLMCollator(symbols()), batch_rows=4)
    assert ("FG482", True) == (caught.value.code, caught.value.is_of_collator) and caught.value.hint

    def picky(rows):
        if len(rows) > 2:
            raise RuntimeError("too many")
        return default_data_collator(rows)

    with pytest.raises(RowError, match="rows 0 to 3 of rows, though on none of them alone: RuntimeError: too many, at"):
        view(rows[:4], picky, batch_rows=4)


class Failing(list):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("no column 'x'")
        return {"input_ids": [2, 3]}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_a_row_that_cannot_be_read_is_named():
    with pytest.raises(RowError, match=r"row 5 of rows cannot be read: KeyError: .*test_data_view.py:\d+"):
        view(Failing(range(9)), CausalLMCollator(symbols()))
    with pytest.raises(RowError, match="it returns an object of the class int"):
        view([{"input_ids": [2]}], lambda rows: 3)
    with pytest.raises(RowError, match="not a data set: it is an object of the class int") as caught:
        RowReader(3, None, name="rows")
    assert "FG480" == caught.value.code


def test_a_value_is_shown_in_a_line():
    assert "1 2.5" == value_text(np.array([1, 2.5]))
    assert "float32 (2, 2), from 0 to 3, mean 1.5" == value_text(np.arange(4, dtype=np.float32).reshape(2, 2))
    assert "(400 characters)" in value_text("x" * 398)


def test_rows_of_preferences_show_each_answer():
    ids = {"prompt_ids": [1, 2], "chosen_ids": [3, 0], "rejected_ids": [4, 5, 0]}
    found = view([{**ids, "margin": 0.5}] * 2, PreferenceCollator(symbols()), stop=1)
    assert [("chosen", "mmttp", 0), ("rejected", "mmttt", 0)] == [
        (str(row.columns["answer"]), kinds(row), row.number) for row in found.rows
    ]
    assert [0.5, 0.5] == [float(row.columns["margin"]) for row in found.rows]
    seen = found.statistics
    assert (2, 18, 10, 2, None) == (
        seen.rows_read, seen.tokens, seen.trained_tokens, seen.padding_tokens, seen.classes
    )  # fmt: skip
    assert "2 rows (50.0%) of 5 tokens" in found.facts()["longest"]
    assert not found.warnings
    # A reward model gives one score to the whole.
    scored = view([ids], PreferenceCollator(symbols()), is_causal=False)
    assert ["iiiip", "iiiii"] == [kinds(row) for row in scored.rows]
    assert not scored.warnings


LOSSES = {
    "DPO": (DPOLoss, {"sft_weight": 0.5}),
    "ORPO": (ORPOLoss, {}),
    "ORPO without the prompt": (ORPOLoss, {"includes_prompt": False}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_trained_tokens_of_pairs_are_those_whose_probability_the_loss_depends_on(name):
    kind, options = LOSSES[name]
    loss, model, collate = kind(**options), tiny_llama(vocab_size=VOCAB), PreferenceCollator(symbols())
    rows = [
        {"prompt_ids": [1, 2, 6], "chosen_ids": [3, 0], "rejected_ids": [4, 5, 7, 0]},
        {"prompt_ids": [7], "chosen_ids": [8, 9, 0], "rejected_ids": [3, 0]},
    ]
    kept, rule = [], loss_rule(model, loss)

    def call(**inputs):
        output = model(**inputs)
        output.logits.retain_grad()
        kept.append(output.logits)
        return output

    batch = rule.prepared(collate([{**row, "reference_logps": [-1.0, -2.0]} for row in rows]))
    rule.total(call, batch).backward()
    # The logits of a position predict the next token.
    is_trained_RT = torch.nn.functional.pad(kept[0].grad.abs().sum(-1)[:, :-1] > 0, (1, 0))
    found = view(rows, collate, trained_part=loss.trained_part if name.startswith("ORPO") else "answers")
    expected = ["".join("t" if one else "." for one in row) for row in is_trained_RT.tolist()]
    assert expected == [
        kinds(row).replace("m", ".").replace("p", ".").ljust(is_trained_RT.shape[1], ".") for row in found.rows
    ]
    assert int(is_trained_RT.sum()) == found.statistics.trained_tokens


def test_judged_answers_show_their_own_answer_and_the_counts_of_judgments():
    rows = [
        {"prompt_ids": [1], "completion_ids": [3, 0], "kl_ids": [4, 5, 6, 0], "label": label} for label in (1, 0, 1)
    ]
    found = view(rows, PreferenceCollator(symbols()), stop=1)
    assert [("mttpp", 1)] == [(kinds(row), int(row.columns["label"])) for row in found.rows]
    assert ({0: 1, 1: 2}, 6) == (found.statistics.classes, found.statistics.trained_tokens)
