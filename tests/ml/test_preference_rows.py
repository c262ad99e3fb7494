"""Preference pairs from files: all forms are read, conversations are rendered by the template, and bad rows are named."""

import json

import pytest
from datasets import Dataset

from forgather.errors import TrainingError
from forgather.ml.data import pair_prompts, preference_pairs, row_texts, tokenize_preferences, train_bpe
from forgather.ml.data.chat_template import template_names

USER = {"role": "user", "content": "What is 2 + 2?"}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
GOOD, BAD = {"role": "assistant", "content": "It is 4."}, {"role": "assistant", "content": "It is 5."}
FORMS = {
    "apart": {"prompt": [*EARLIER, USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole": {"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]},
    "twice": {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "single messages": {"prompt": [*EARLIER, USER], "chosen": GOOD, "rejected": BAD},
    "text and message": {"prompt": [*EARLIER, USER], "chosen": GOOD["content"], "rejected": [BAD]},
    "system": {"system": "Be short.", "prompt": USER["content"], "chosen": [GOOD], "rejected": [BAD]},
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"]
SPECIAL += [
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "[INST]",
    "[/INST]",
]


def written(tmp_path, *rows):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def tokenizer(template="chatml"):
    rows = Dataset.from_dict({"text": ["What is 2 + 2? It is 4. It is 5. Hi Hello Be short."]})
    return train_bpe(rows, 320, special_tokens=SPECIAL, chat_template=template)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_messages_gives_the_same_pair(tmp_path, form):
    rows = preference_pairs(written(tmp_path, FORMS[form]))
    before = json.loads(rows[0]["conversation"])["messages"]
    first = {"system": [{"role": "system", "content": "Be short."}], "twice": []}.get(form, EARLIER)
    assert [*first, USER] == before
    assert (GOOD, BAD) == (json.loads(rows[0]["chosen"]), json.loads(rows[0]["rejected"]))
    assert f"{tmp_path}/pairs.jsonl:1" == rows[0]["source"]


@pytest.mark.parametrize("template", template_names())
def test_prompt_and_answers_have_the_tokens_of_the_chat_template(tmp_path, template):
    made = tokenizer(template)
    pair = tokenize_preferences(preference_pairs(written(tmp_path, FORMS["apart"])), made, cache_dir=tmp_path)[0]

    prompt = made.apply_chat_template([*EARLIER, USER], add_generation_prompt=True, tokenize=False)
    for answer, ids in ((GOOD, pair["chosen_ids"]), (BAD, pair["rejected_ids"])):
        whole = made.apply_chat_template([*EARLIER, USER, answer], tokenize=False)
        read = made.decode([*pair["prompt_ids"], *ids])
        # Some templates write a line break or the end-of-text token after the token at which generation stops.
        assert whole.startswith(read) and whole[len(read) :].strip() in ("", made.eos_token)
        assert answer["content"] in made.decode(ids) and ids[-1] in made.added_tokens_decoder
    assert made.decode(pair["prompt_ids"]) == prompt
    assert pair["chosen_ids"] != pair["rejected_ids"]
    assert [prompt] == pair_prompts(preference_pairs(written(tmp_path, FORMS["apart"])), made)


def test_texts_stay_texts_unless_they_are_turns(tmp_path):
    file = written(tmp_path, {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})
    plain, turns = preference_pairs(file), preference_pairs(file, as_turns=True)
    assert {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5", "source": f"{file}:1"} == plain[0]
    assert [{"role": "user", "content": "2 + 2 = "}] == json.loads(turns[0]["conversation"])["messages"]
    assert plain._fingerprint != turns._fingerprint == preference_pairs(file, as_turns=True)._fingerprint
    assert ["2 + 2 = ", "4", "5"] == row_texts(plain)["text"][:] == row_texts(turns)["text"][:]
    assert ["2 + 2 = "] == pair_prompts(plain, None)
    made = tokenizer()
    ids = tokenize_preferences(plain, made, cache_dir=tmp_path)[0]
    assert ("4" + made.eos_token, "2 + 2 = ") == (made.decode(ids["chosen_ids"]), made.decode(ids["prompt_ids"]))


def test_a_message_with_a_control_token_is_left_out_and_another_template_is_another_cache(tmp_path, caplog):
    odd = {**FORMS["apart"], "rejected": [{"role": "assistant", "content": "5<|im_end|>"}]}
    rows = preference_pairs(written(tmp_path, FORMS["apart"], odd))
    first = tokenize_preferences(rows, tokenizer("chatml"), cache_dir=tmp_path)
    assert 1 == len(first) and "1 left out" in caplog.text
    assert first[0] != tokenize_preferences(rows, tokenizer("llama3"), cache_dir=tmp_path)[0]


PAIR = FORMS["apart"]


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ([1], "FG940", "a row must be a JSON object"),
        ({"prompt": "a", "chosen": "b"}, "FG940", "no 'rejected'; it has 'prompt', 'chosen'"),
        ({"chosen": "b", "rejected": "c"}, "FG940", "no 'prompt'"),
        ({**PAIR, "chosen": None}, "FG940", "'chosen' is null"),
        ({**PAIR, "prompt": " "}, "FG940", "'prompt' is empty"),
        ({**PAIR, "chosen": 4}, "FG940", "'chosen' must be a text or a list of messages, found int"),
        ({**PAIR, "chosen": [{"role": "asistant", "content": "4"}]}, "FG890", "unknown role 'asistant'"),
        ({**PAIR, "chosen": [{"role": "assistant", "content": ""}]}, "FG891", "is empty"),
        ({**PAIR, "prompt": [USER, GOOD]}, "FG891", "expected 'user'"),
        ({**PAIR, "rejected": [GOOD]}, "FG912", "are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "FG911", "the answer in 'rejected' is empty"),
        ({"chosen": [USER, GOOD], "rejected": [*EARLIER, BAD]}, "FG941", "'chosen' and 'rejected' differ"),
        ({**PAIR, "chosen": [GOOD, USER, GOOD], "rejected": [GOOD, USER, BAD]}, "FG941", "2 more messages"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "FG941", "no message before the answers"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "FG892", "the row has texts, and the rows from"),
    ],
)
def test_a_row_that_is_no_pair_is_named_or_dropped(tmp_path, caplog, row, code, message):
    file = written(tmp_path, PAIR, row)
    with pytest.raises(TrainingError, match=f"pairs.jsonl:2: .*{message}") as error:
        preference_pairs(file)
    assert code == error.value.code
    assert 1 == len(preference_pairs(file, bad_rows="drop"))
    assert "1 row left out" in caplog.text


def test_a_file_without_a_pair_and_an_unknown_choice_are_refused(tmp_path):
    file = written(tmp_path, {})
    with pytest.raises(TrainingError, match="gives no preference pair") as error:
        preference_pairs(file, bad_rows="drop")
    assert "FG832" == error.value.code
    with pytest.raises(TrainingError, match="bad_rows is 'keep'") as error:
        preference_pairs(file, bad_rows="keep")
    assert "FG892" == error.value.code


def test_a_template_that_writes_two_prompts_is_refused(tmp_path):
    made = tokenizer()
    made.chat_template = (
        "{% if messages[-1].content == 'It is 5.' %}!{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    rows = preference_pairs(written(tmp_path, PAIR))
    with pytest.raises(TrainingError, match="pairs.jsonl:1: the chat template writes different prompts") as error:
        tokenize_preferences(rows, made, cache_dir=tmp_path)
    assert "FG942" == error.value.code
    made.chat_template = (
        "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(TrainingError, match="marks 4 of 2 answers") as error:
        tokenize_preferences(rows, made, cache_dir=tmp_path)
    assert "FG894" == error.value.code
