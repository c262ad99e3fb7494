"""Mixtures of data sets: shares by weight, limits, the same rows for the same seed, and no row in both parts of a split."""

import json
import logging
from collections import Counter

import pytest
from datasets import Dataset, DatasetDict

from forgather.ml.data import DataError, as_chats, chats, mix, split
from forgather.project.project import Project
from tests.matrix import thinned
from tests.project.workbench import make_project

SIZES = {"news": 300, "code": 100, "sums": 40}


def sets():
    return {name: Dataset.from_dict({"text": [f"{name} {row}" for row in range(size)]}) for name, size in SIZES.items()}


def counted(rows):
    return Counter(text.split()[0] for text in rows["text"])


def test_without_weights_every_row_is_in_the_mixture_once(caplog):
    caplog.set_level(logging.INFO)
    mixed = mix(sets())
    assert sorted(mixed["text"]) == sorted(text for rows in sets().values() for text in rows["text"])
    assert SIZES == counted(mixed)
    # Every set is spread over the mixture.
    assert all(count > 5 for count in counted(mixed.select(range(220))).values())
    assert "mixture of 440 rows: 300 of 300 rows of news (68.2%), 100 of 100 rows of code (22.7%), 40 of" in caplog.text


@pytest.mark.parametrize(
    ("weights", "stopping", "expected"),
    [
        ({"news": 1, "code": 1, "sums": 2}, "first_exhausted", {"news": 20, "code": 20, "sums": 40}),
        ({"news": 0.5, "code": 0.3, "sums": 0.2}, "first_exhausted", {"news": 100, "code": 60, "sums": 40}),
        ({"news": 1, "code": 1, "sums": 2}, "all_exhausted", {"news": 300, "code": 300, "sums": 600}),
        ({"news": 0.9, "code": 0.05, "sums": 0.05}, "all_exhausted", {"news": 1800, "code": 100, "sums": 100}),
    ],
)
def test_shares_are_those_of_the_weights(weights, stopping, expected):
    mixed = mix(sets(), weights=weights, stopping_strategy=stopping)
    assert expected == counted(mixed)
    for name, size in SIZES.items():
        times = Counter(text for text in mixed["text"] if text.startswith(name)).values()
        # Rows are repeated evenly, and not at all where a mixture ends with the first set without rows.
        assert max(times) - min(times) <= 1 and max(times) == -(-expected[name] // size)
        assert (stopping == "first_exhausted") <= (max(times) == 1)


def test_max_samples_limits_each_set_before_the_weights():
    assert {"news": 50, "code": 50, "sums": 40} == counted(mix(sets(), max_samples=50))
    assert {"news": 70, "code": 100, "sums": 40} == counted(mix(sets(), max_samples={"news": 70}))
    limited = mix(sets(), max_samples={"sums": 10}, weights={"news": 1, "code": 1, "sums": 1})
    assert {"news": 10, "code": 10, "sums": 10} == counted(limited)
    # A sample, and not the first rows, which are often of one kind.
    assert {f"news {row}" for row in range(50)} != set(mix({"news": sets()["news"]}, max_samples=50)["text"])


def test_the_same_settings_give_the_same_rows_and_others_other_ones():
    weights = {"news": 1, "code": 1, "sums": 2}
    made = [
        mix(sets()),
        mix(sets(), seed=1),
        mix(sets(), max_samples=39),
        mix(sets(), weights=weights),
        mix(sets(), weights=weights, stopping_strategy="all_exhausted"),
        mix(sets(), weights={**weights, "sums": 3}),
        mix({**sets(), "code": sets()["code"].map(lambda row: {"text": row["text"] + "!"})}),
    ]
    assert len(made) == len({rows._fingerprint for rows in made}) == len({tuple(rows["text"]) for rows in made})
    again = mix(sets(), weights=weights)
    assert (made[3]._fingerprint, made[3]["text"][:]) == (again._fingerprint, again["text"][:])
    parts, others = split(made[3], 0.2), split(again, 0.2)
    assert parts["train"]._fingerprint == others["train"]._fingerprint
    assert parts["eval"]["text"][:] == others["eval"]["text"][:]


def test_a_repeated_row_is_in_one_part_of_a_split(caplog):
    caplog.set_level(logging.INFO)
    mixed = mix(sets(), weights={"news": 1, "code": 1, "sums": 2}, stopping_strategy="all_exhausted")
    parts = split(mixed, 0.1)
    train, held = parts["train"]["text"][:], parts["eval"]["text"][:]
    assert not {*train} & {*held}
    assert len(held) == len({*held}) == 44
    assert Counter(train) == Counter(text for text in mixed["text"] if text not in held)
    assert f"split: {len(train)} rows for training, 44 for evaluation" in caplog.text
    assert held == split(mixed, 0.1)["eval"]["text"][:] != split(mixed, 0.1, seed=1)["eval"]["text"][:]
    # The negative control: a split by places has copies on both sides.
    plain = mixed.train_test_split(0.1, seed=42)
    assert {*plain["train"]["text"]} & {*plain["test"]["text"]}


def test_conversations_of_repeated_rows_are_refused():
    rows = {
        name: Dataset.from_dict({"question": [f"{name} {n}?" for n in range(6)], "answer": ["2"] * 6}) for name in "ab"
    }
    assert 12 == len(as_chats(mix(rows)))
    with pytest.raises(DataError, match="repeats rows") as caught:
        as_chats(mix(rows, weights={"a": 1, "b": 3}, stopping_strategy="all_exhausted"))
    assert "FG945" == caught.value.code


def test_parts_for_evaluation_are_joined_and_kept(tmp_path):
    for name in ("a", "b", "held"):
        turns = [{"role": "user", "content": name}, {"role": "assistant", "content": "yes"}]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    given = chats(tmp_path / "a.jsonl", eval_paths=tmp_path / "held.jsonl", system="Be brief.")
    assert all("Be brief." in row for part in given.values() for row in part["conversation"])
    assert given is split(given)
    mixed = mix({"a": given, "b": chats(tmp_path / "b.jsonl")})
    assert {"train": 8, "eval": 4} == mixed.num_rows
    with pytest.raises(DataError, match="b is divided into test, and has no part train") as error:
        mix({"a": given, "b": DatasetDict(test=given["eval"])})
    assert ("FG945", "datasets") == (error.value.code, error.value.argument)
    with pytest.raises(DataError, match="divided into train, test") as error:
        split(DatasetDict(train=given["train"], test=given["eval"]))
    assert "FG835" == error.value.code


def test_a_file_for_training_and_evaluation_is_reported(tmp_path, caplog):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    chats(tmp_path, eval_paths=tmp_path / "a.jsonl")
    assert "a.jsonl is read for training and for evaluation" in caplog.text


@pytest.mark.parametrize(
    ("options", "argument", "message"),
    [
        ({"weights": {"news": 1, "code": 1, "sum": 1}}, "weights", "names 'sum', which is no data set"),
        ({"weights": {"news": 1, "code": 1}}, "weights", "sums has no weight"),
        ({"weights": {"news": 1, "code": 0, "sums": 1}}, "weights.code", "weights.code is 0"),
        ({"weights": {"news": 1, "code": "2", "sums": 1}}, "weights.code", "weights.code is '2'"),
        ({"weights": {"news": 1e9, "code": 1e9, "sums": 1}}, "weights", "no row of sums is left"),
        ({"weights": {"news": 1e-320, "code": 1, "sums": 1}}, "weights.news", "weights.news is 1e-320"),
        ({"weights": {"news": 10**400, "code": 1, "sums": 1}}, "weights.news", "weights.news is 1000"),
        ({"weights": {"news": float("nan"), "code": 1, "sums": 1}}, "weights.news", "weights.news is nan"),
        ({"weights": 5}, "weights", "weights is 5"),
        ({"datasets": []}, "datasets", "datasets is a list"),
        ({"datasets": {"a": "a.jsonl"}}, "datasets", "a is a str"),
        ({"datasets": {"a": DatasetDict(test=sets()["news"])}}, "datasets", "divided into test, and has no part train"),
        (
            {
                "datasets": {
                    name: DatasetDict(train=sets()["news"], eval=Dataset.from_dict({column: ["x"]}))
                    for name, column in (("a", "text"), ("b", "body"))
                }
            },
            "datasets",
            "differ in their columns: eval of a has text; eval of b has body",
        ),
        ({"max_samples": {"news": 0}}, "max_samples.news", "max_samples.news is 0"),
        ({"max_samples": {"new": 5}}, "max_samples", "names 'new'"),
        ({"stopping_strategy": "first"}, "stopping_strategy", "stopping_strategy is 'first'"),
        ({"datasets": {}}, "datasets", "there are no data sets"),
        ({"datasets": {"a": Dataset.from_dict({"text": []})}}, "datasets", "a has no rows"),
        (
            {"datasets": {"a": Dataset.from_dict({"text": ["x"]}), "b": Dataset.from_dict({"body": ["x"]})}},
            "datasets",
            "differ in their columns: a has text; b has body",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(options, argument, message):
    with pytest.raises(ValueError, match=message) as error:
        mix(**{"datasets": sets(), **options})
    assert ("FG945", argument) == (error.value.code, error.value.argument)


WORDS = """\
-- extends 'tasks/chat.yaml'
[config_metadata]
    -- set ns.train_file = joinpath(project_dir, 'train.jsonl')
    -- set ns.eval_file = joinpath(project_dir, 'eval.jsonl')
    -- set ns.max_seq_length = 40
    -- set ns.preprocessing_num_workers = {workers}
[raw_dataset]
    -- include '{template}'
[tokenizer]
    == super()
    vocab_size: 260
"""
ROWS = {
    "datasets/chat.yaml": lambda n: {
        "messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "a" * n}]
    },
    "datasets/instructions.yaml": lambda n: {"instruction": f"{n}", "input": "in", "output": "a" * n},
}


@pytest.mark.parametrize("template", thinned([*ROWS], lambda template: "instructions" in template))
def test_the_words_of_other_tools_set_files_length_and_processes(template, tmp_path, monkeypatch):
    monkeypatch.setattr("forgather.ml.data.cache.default_cache_dir", lambda: tmp_path / "cache")
    texts = {name: "".join(f"{json.dumps(ROWS[template](n))}\n" for n in numbers) for name, numbers in
             (("train.jsonl", range(1, 60, 6)), ("eval.jsonl", (3, 5)))}  # fmt: skip
    configs = {f"templates/configs/{n}.yaml": WORDS.format(workers=n, template=template) for n in (1, 2)}
    folder = make_project(tmp_path / "bench", {**texts, **configs})
    made = [Project(f"{n}.yaml", str(folder))(["train_dataset", "eval_dataset"]) for n in (1, 2)]
    train, held = (made[0][name] for name in ("train_dataset", "eval_dataset"))
    assert 2 == len(held) and 40 == max(map(len, train["input_ids"]))
    for name, rows in made[0].items():
        assert (rows._fingerprint, rows[:]) == (made[1][name]._fingerprint, made[1][name][:])
