"""Conversations become tokens and labels: by every packaged template, equal to masks that are written down by hand."""

import copy
import json
import re
from itertools import groupby
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig

from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import (
    CausalLMCollator,
    DataError,
    DataFileError,
    as_chats,
    chat_prompts,
    load_tokenizer,
    set_chat_template,
    tokenize_chats,
)
from forgather.ml.data.chat_template import (
    check_marks,
    read_template,
    render,
    special_ids,
    stop_token_ids,
    template_names,
    turn_end,
)
from forgather.ml.data.turn_tokens import chat_tokens
from forgather.ml.models import from_config, from_pretrained
from tests.matrix import thinned
from tests.ml.chat_cases import BOS, CELLS, CONVERSATIONS, EOS, PIECES, byte_pairs, dialogue, said, sentence_pieces
from tests.ml.fixtures import Recorder, tiny_llama


def conversations(*messages, tools=None):
    rows = [{"messages": list(one), **({"tools": tools} if tools else {})} for one in messages]
    return as_chats(rows)


def tokens(template, messages, tmp_path, tools=None, length=4096, make=byte_pairs, **options):
    tokenizer = set_chat_template(make(), template)
    rows = tokenize_chats(conversations(messages, tools=tools), tokenizer, length, cache_dir=tmp_path, **options)
    return rows[0]["input_ids"], rows[0]["labels"]


def by_hand(template, case, tokenizer, trained=lambda answers: answers):
    """Returns ids and labels of a conversation; `trained` chooses among the numbers of the pieces that are answers."""
    pieces = PIECES[template](*CONVERSATIONS[case])
    pieces = [("".join(text for text, _ in same), kind) for kind, same in groupby(pieces, key=lambda piece: piece[1])]
    answers = [number for number, (_, is_answer) in enumerate(pieces) if is_answer]
    ids, labels = [], []
    for number, (text, _) in enumerate(pieces):
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += new
        labels += new if number in trained(answers) else [-100] * len(new)
    return ids, labels


@pytest.mark.parametrize(("template", "case"), CELLS)
def test_ids_and_labels_are_those_that_are_written_down(template, case, tmp_path):
    found = tokens(template, *CONVERSATIONS[case][:1], tmp_path, tools=CONVERSATIONS[case][1])
    assert by_hand(template, case, byte_pairs()) == found


RECORDED = json.loads((Path(__file__).parent / "chat_oracles.json").read_text(encoding="utf-8"))
ORIGINALS = [(name, case) for name, texts in RECORDED["texts"].items() for case in texts]


def test_the_originals_are_named_with_their_versions():
    assert {"trl", "axolotl", "mistral-common"} < set(RECORDED["versions"])
    assert list(PIECES) == template_names() == list(RECORDED["texts"])
    assert set(CELLS) < set(ORIGINALS)


@pytest.mark.parametrize(("name", "case"), ORIGINALS)
def test_the_text_is_that_of_the_original(name, case):
    tokenizer, (messages, tools) = byte_pairs(name), CONVERSATIONS[case]
    expected = RECORDED["texts"][name][case]
    before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    assert expected["text"] == render(tokenizer, messages, tools).text
    assert expected["prompt"] == render(tokenizer, before, tools, add_generation_prompt=True).text
    assert expected["text"] == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


@pytest.mark.parametrize(("template", "case"), CELLS)
def test_the_text_that_is_written_down_is_that_of_the_original(template, case):
    assert RECORDED["texts"][template][case]["text"] == "".join(
        text for text, _ in PIECES[template](*CONVERSATIONS[case])
    )


MAKERS = {
    "byte pairs": byte_pairs,
    "byte pairs of GPT-2": lambda name: byte_pairs(name, None),
    "sentence pieces": sentence_pieces,
}
HARD = ("blanks", "thoughts", "many turns")


@pytest.mark.parametrize(
    ("maker", "name", "case"),
    thinned([(maker, name, case) for maker in MAKERS for name, case in ORIGINALS], lambda *cell: cell[2] in HARD),
)
def test_the_tokens_before_an_answer_are_those_of_the_prompt(maker, name, case):
    """The model is trained after the tokens from which it generates, and each answer ends where generation stops."""
    tokenizer, (messages, tools) = MAKERS[maker](name), CONVERSATIONS[case]
    rendered = render(tokenizer, messages, tools)
    found = chat_tokens(tokenizer, rendered)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(answers) == len(rendered.turns) == len(found.turns)
    # The text before an answer is the prompt, except where a format writes earlier turns in another way afterwards:
    # Qwen3 leaves out their thoughts, Mistral moves the system message.
    before = [(number, turn) for number, turn in zip(answers, found.turns, strict=True)]
    checked = before[-1:] if name in ("qwen3", "mistral") else before
    for number, (begin, _) in checked if messages[-1]["role"] == "assistant" else ():
        prompt = render(tokenizer, messages[:number], tools, add_generation_prompt=True).text
        assert prompt == RECORDED["texts"][name][case]["text"][: len(prompt)]
        expected = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        # If an earlier answer begins with what its prompt ends with, one reading of that place is right for one prompt.
        if maker != "byte pairs of GPT-2" and case != "blanks" or number == answers[0]:
            assert expected == found.ids[:begin]
        assert tokenizer.decode(expected) == tokenizer.decode(found.ids[:begin])
    for begin, end in found.turns:
        assert found.ids[end - 1] == turn_end(tokenizer) in special_ids(tokenizer)
        assert turn_end(tokenizer) not in found.ids[begin : end - 1]
    assert found.ids.count(tokenizer.bos_token_id) == (name in ("alpaca", "gemma3", "llama3", "mistral"))


def chatml_row(case, trained, tmp_path, **options):
    return by_hand("chatml", case, byte_pairs(), trained), tokens("chatml", CONVERSATIONS[case][0], tmp_path, **options)


def test_what_is_trained_can_be_chosen(tmp_path):
    expected, found = chatml_row("many turns", lambda answers: answers[-1:], tmp_path, train_on="last")
    assert expected == found
    expected, found = chatml_row("many turns", lambda answers: answers[-1:], tmp_path, train_on="completion")
    assert expected == found
    expected, found = chatml_row("open", lambda answers: answers[:1], tmp_path)
    assert expected == found
    ids, labels = tokens("chatml", CONVERSATIONS["open"][0], tmp_path, train_on="everything")
    assert expected[0] == ids == labels


def test_a_completion_is_every_answer_after_the_prompt(tmp_path):
    messages, tools = CONVERSATIONS["tools"]
    expected = by_hand("qwen3", "tools", byte_pairs(), lambda answers: answers[2:])
    assert expected == tokens("qwen3", messages, tmp_path, tools=tools, train_on="completion")
    rows = as_chats([{"prompt": messages[:2], "completion": messages[2:], "tools": tools}])
    found = tokenize_chats(rows, byte_pairs("qwen3"), 4096, train_on="completion", cache_dir=tmp_path)
    assert by_hand("qwen3", "tools", byte_pairs())[1] == found[0]["labels"]


@pytest.mark.parametrize("template", list(PIECES))
@pytest.mark.parametrize("truncate", ["end", "start"])
def test_ids_and_labels_are_cut_together(template, truncate, tmp_path):
    ids, labels = by_hand(template, "many turns", byte_pairs())
    is_begin = ids[0] == byte_pairs().bos_token_id
    for length in (len(ids), len(ids) - 1, len(ids) - 7):
        kept = (
            range(length) if truncate == "end" else [*range(is_begin), *range(len(ids) - length + is_begin, len(ids))]
        )
        expected = [ids[place] for place in kept], [labels[place] for place in kept]
        found = tokens(template, CONVERSATIONS["many turns"][0], tmp_path, length=length, truncate=truncate)
        assert expected == found


def test_a_mask_from_truncated_text_is_another_one(tmp_path):
    """The negative control: what the tests above compare does depend on where the answers are."""
    ids, labels = tokens("chatml", CONVERSATIONS["identical turns"][0], tmp_path)
    again = byte_pairs()("again", add_special_tokens=False)["input_ids"]
    by_search = [place for place in range(len(ids)) if ids[place : place + len(again)] == again]
    by_template = [place for place in by_search if labels[place] != -100]
    assert (6, 3) == (len(by_search), len(by_template))
    assert by_hand("chatml", "identical turns", byte_pairs(), lambda answers: answers[1:])[1] != labels


def test_conversations_without_a_target_are_dropped_and_counted(tmp_path, caplog):
    rows = conversations(
        CONVERSATIONS["one turn"][0],
        [said("user", "Only a question")],
        dialogue("question " * 30, "answer"),
        dialogue("What ends a turn?", "It is <|im_end|> there."),
    )
    tokenizer = byte_pairs("chatml")
    found = tokenize_chats(rows, tokenizer, 60, cache_dir=tmp_path)
    assert 1 == len(found)
    assert (
        "1 conversation, 36 tokens, 4 of them trained; 0 cut to 60 tokens; left out: 1 without an answer, "
        in caplog.text
    )
    assert "1 no answer left within max_length, 1 with a control token in a message" in caplog.text
    caplog.clear()
    # The second time they come from the cache, with the same report.
    assert found[:] == tokenize_chats(rows, tokenizer, 60, cache_dir=tmp_path)[:]
    assert "left out: 1 without an answer" in caplog.text
    assert 2 == len(tokenize_chats(rows, tokenizer, 60, train_on="everything", truncate="drop", cache_dir=tmp_path))
    with pytest.raises(DataError, match="no conversation is left to train on: 1 longer than max_length") as error:
        tokenize_chats(conversations(CONVERSATIONS["one turn"][0]), tokenizer, 6, truncate="drop", cache_dir=tmp_path)
    assert "FG896" == error.value.code


def test_an_answer_that_begins_like_its_prompt_ends_is_divided_or_left_out(tmp_path, caplog):
    row = conversations(dialogue("x", "\n\ny"), dialogue("x", "y"))
    found = tokenize_chats(row, byte_pairs("chatml"), 4096, cache_dir=tmp_path)
    text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    prompt = byte_pairs()(text, add_special_tokens=False)["input_ids"]
    assert prompt == found[0]["input_ids"][: len(prompt)]
    assert byte_pairs().apply_chat_template(dialogue("x", "\n\ny"))["input_ids"] != found[0]["input_ids"]
    assert byte_pairs().apply_chat_template(dialogue("x", "y"))["input_ids"] == found[1]["input_ids"]


MARKED = "{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content }}END{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("code", "template", "message"),
    [
        ("FG893", None, "the tokenizer has no chat template"),
        ("FG893", "chatlm", "there is no chat template 'chatlm'"),
        ("FG893", "missing/file.jinja", "there is no chat template 'missing/file.jinja'"),
        ("FG894", "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", "does not mark the answers"),
        ("FG898", MARKED.replace("END", "<|im_done|>"), "which is not a special token"),
        ("FG898", MARKED.replace("END", ""), "ends an answer without a special token"),
    ],
)
def test_a_template_that_cannot_train_is_refused(code, template, message):
    tokenizer = byte_pairs().__class__(tokenizer_object=byte_pairs().backend_tokenizer, bos_token=BOS, eos_token=EOS)
    with pytest.raises((DataError, DataFileError), match=message) as error:
        set_chat_template(tokenizer, template)
    assert code == error.value.code


@pytest.mark.parametrize(("name", "case"), [(name, "no system") for name in PIECES])
def test_a_known_template_without_marks_is_offered_with_them(name, case):
    tokenizer = copy.deepcopy(byte_pairs())
    marked = read_template(name)
    tokenizer.chat_template = re.sub(r"\{%-? (end)?generation %\}", "", marked)
    with pytest.raises(
        DataError, match=rf"chat_template: {re.escape(name)} renders the same text without tools, and marks"
    ):
        check_marks(tokenizer)


@pytest.mark.parametrize(
    ("code", "template", "message"),
    [
        # Every message is marked, also those of the user.
        ("FG894", MARKED.replace("END", EOS), r"row 0 of the data set: the chat template marks 2 of 1 answers"),
        (
            "FG895",
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
            "{{ '!' if m.content == 'Hello' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            r"row 0 of the data set: a marked answer ends with '.*</s>!', at which generation does not stop",
        ),
        (
            "FG899",
            BOS + "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
            r"row 0 of the data set: the chat template writes the begin-of-text token '<s>' twice",
        ),
    ],
)
def test_what_a_template_does_with_a_row_is_checked(code, template, message, tmp_path):
    tokenizer = set_chat_template(copy.deepcopy(byte_pairs()), template)
    with pytest.raises(DataError, match=message) as error:
        tokenize_chats(conversations(dialogue("Hi", "Hello")), tokenizer, cache_dir=tmp_path)
    assert code == error.value.code


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (
            "chatml",
            *CONVERSATIONS["tools"],
            "row 0 of the data set: the conversation uses tools, and the chat template has no place",
        ),
        ("llama3", CONVERSATIONS["tools"][0], None, "uses tools"),
        (
            "qwen2.5",
            [said("user", "x"), {**said("assistant", "y"), "reasoning_content": "z"}],
            None,
            "reasoning_content",
        ),
        (
            MARKED.replace("END", "{{ raise_exception('no') if m.content == 'x' }}" + EOS),
            dialogue("x", "y"),
            None,
            "refuses the conversation: no",
        ),
    ],
)
def test_a_row_that_a_template_cannot_hold_is_refused(template, messages, tools, message, tmp_path):
    tokenizer = set_chat_template(copy.deepcopy(byte_pairs()), template)
    with pytest.raises(DataError, match=message) as error:
        tokenize_chats(conversations(messages, tools=tools), tokenizer, cache_dir=tmp_path)
    assert "FG897" == error.value.code


def test_a_begin_of_text_token_that_a_template_leaves_out_is_reported(tmp_path, caplog):
    tokenizer = copy.deepcopy(byte_pairs())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{BOS} $A", None, [(BOS, tokenizer.bos_token_id)])
    rows = conversations(dialogue("x", "y"))
    for name in ("llama3", "chatml"):
        found = tokenize_chats(rows, set_chat_template(tokenizer, name), cache_dir=tmp_path)
        assert (name == "llama3") == found[0]["input_ids"].count(tokenizer.bos_token_id)
        assert (name == "chatml") == ("the chat template does not write it" in caplog.text)


def test_blanks_after_the_stop_token_are_not_trained(tmp_path):
    template = read_template("chatml").replace("{{- '\\n' }}\n{%- endfor", "{%- endfor")
    template = template.replace("'<|im_end|>' }}", "'<|im_end|>\\n' }}")
    ids, labels = tokens(template, CONVERSATIONS["many turns"][0], tmp_path)
    assert by_hand("chatml", "many turns", byte_pairs()) == (ids, labels)


def test_a_padding_token_is_chosen_that_does_not_end_anything():
    def made(*specials, **options):
        backend = copy.deepcopy(byte_pairs()).backend_tokenizer
        backend.add_special_tokens(list(specials))
        kind = type(byte_pairs())
        return set_chat_template(kind(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, **options), "chatml")

    assert "<pad>" == made().pad_token
    assert "<|end|>" == made(pad_token="<|end|>").pad_token
    assert "<pad>" == made(pad_token=EOS).pad_token


def test_the_last_token_of_an_answer_keeps_its_label_when_padding_is_the_same_token(tmp_path):
    tokenizer = copy.deepcopy(byte_pairs("alpaca"))
    tokenizer.pad_token = EOS
    rows = tokenize_chats(conversations(dialogue("x", "y"), dialogue("x", "y " * 9)), tokenizer, cache_dir=tmp_path)
    batch = CausalLMCollator(tokenizer)(list(rows))
    assert [tokenizer.eos_token_id] * 2 == [int(row[row != -100][-1]) for row in batch["labels"]]
    assert [1, 1] == (batch["labels"] == tokenizer.eos_token_id).sum(1).tolist()


def test_the_template_is_saved_with_the_tokenizer(tmp_path):
    byte_pairs("llama3").save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    messages = CONVERSATIONS["many turns"][0]
    found = loaded.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ids, labels = by_hand("llama3", "many turns", byte_pairs())
    assert ids == found["input_ids"]
    assert [int(label != -100) for label in labels] == found["assistant_masks"]
    other = load_tokenizer(tmp_path / "saved", chat_template="chatml")
    assert read_template("chatml") == other.chat_template
    file = tmp_path / "own.jinja"
    file.write_text(read_template("phi3"))
    assert read_template("phi3") == load_tokenizer(tmp_path / "saved", chat_template=str(file)).chat_template


def test_the_cache_keys_on_all_that_matters(tmp_path):
    rows, tokenizer = conversations(CONVERSATIONS["many turns"][0]), copy.deepcopy(byte_pairs("qwen3"))
    made = [
        tokenize_chats(rows, tokenizer, cache_dir=tmp_path),
        tokenize_chats(rows, tokenizer, 40, cache_dir=tmp_path),
        tokenize_chats(rows, tokenizer, 40, truncate="start", cache_dir=tmp_path),
        tokenize_chats(rows, tokenizer, train_on="last", cache_dir=tmp_path),
        tokenize_chats(rows, tokenizer, template_options={"enable_thinking": False}, cache_dir=tmp_path),
        tokenize_chats(conversations(CONVERSATIONS["one turn"][0]), tokenizer, cache_dir=tmp_path),
        tokenize_chats(rows, set_chat_template(tokenizer, "chatml"), cache_dir=tmp_path),
    ]
    assert (
        len(made) == len({part._fingerprint for part in made}) == len(list((tmp_path / "chats").glob("*/rows.arrow")))
    )
    parts = tokenize_chats(DatasetDict(train=rows, eval=rows), tokenizer, num_proc=2, cache_dir=tmp_path)
    assert made[-1]._fingerprint == parts["train"]._fingerprint == parts["eval"]._fingerprint


def test_processes_give_the_same_rows(tmp_path):
    names = ("one turn", "many turns", "identical turns", "open")
    rows, tokenizer = conversations(*(CONVERSATIONS[name][0] for name in names)), byte_pairs("gemma3")
    expected = tokenize_chats(rows, tokenizer, cache_dir=tmp_path / "one")
    assert expected[:] == tokenize_chats(rows, tokenizer, num_proc=2, cache_dir=tmp_path / "two")[:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "answers"}, "train_on is 'answers'"),
        ({"truncate": "left"}, "truncate is 'left'"),
        ({"max_length": 1}, "max_length is 1 .expected a whole number from 2"),
    ],
)
def test_a_value_that_is_not_a_choice_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        tokenize_chats(conversations(dialogue("x", "y")), byte_pairs("chatml"), **options, cache_dir=tmp_path)
    assert ("FG839", *options) == (error.value.code, error.value.argument)
    with pytest.raises(DataError, match="no column 'conversation'"):
        tokenize_chats(Dataset.from_dict({"text": ["x"]}), byte_pairs("chatml"))


def padded(rows):
    """Pads rows of ids and labels by hand, with an id that no row has."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [2] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows])
    return ids, labels, mask


def plain_losses(model, rows, steps, rate):
    """A training loop without anything of ours: the mean loss of the trained tokens, by AdamW."""
    (ids, labels, mask), losses = padded(rows), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_a_training_on_conversations_is_one_on_labels_written_down(template, tmp_path):
    cases, tokenizer = ("one turn", "no system", "identical turns", "a role's name"), byte_pairs(template)
    rows = tokenize_chats(conversations(*(CONVERSATIONS[case][0] for case in cases)), tokenizer, cache_dir=tmp_path)
    recorder, steps, rate = Recorder(), 3, 1e-2
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        max_steps=steps,
        learning_rate=rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        per_device_train_batch_size=len(cases),
        logging_steps=1,
        save_strategy="no",
    )
    trainer = Trainer(
        tiny_llama(vocab_size=len(tokenizer)),
        args,
        train_dataset=rows,
        data_collator=CausalLMCollator(tokenizer),
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    trainer.train()
    found = [line["loss"] for line in recorder.lines if "loss" in line]
    by_hands = [by_hand(template, case, byte_pairs()) for case in cases]
    expected = plain_losses(tiny_llama(vocab_size=len(tokenizer)), by_hands, steps, rate)
    assert expected == pytest.approx(found, rel=1e-5)
    # The negative control: with labels on everything, or on the last answers, the losses are others.
    for other in (
        [(ids, ids) for ids, _ in by_hands],
        [by_hand(template, case, byte_pairs(), lambda a: a[-1:]) for case in cases],
    ):
        assert abs(plain_losses(tiny_llama(vocab_size=len(tokenizer)), other, 1, rate)[0] - found[0]) > 1e-3
    trainer.save_model(str(tmp_path / "saved"))
    assert tokenizer.chat_template == load_tokenizer(tmp_path / "saved").chat_template


def test_generation_stops_at_the_end_of_an_answer(tmp_path):
    tokenizer = byte_pairs("gemma3")
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    made = from_config(config, tokenizer=tokenizer)
    assert [end, tokenizer.eos_token_id] == made.generation_config.eos_token_id == stop_token_ids(tokenizer)
    plain = from_config(config, tokenizer=byte_pairs("alpaca"))
    assert tokenizer.eos_token_id == plain.generation_config.eos_token_id
    plain.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, tokenizer=tokenizer)
    assert [end, tokenizer.eos_token_id] == loaded.generation_config.eos_token_id
    assert tokenizer.eos_token_id == from_pretrained(tmp_path).generation_config.eos_token_id


def test_prompts_for_samples_are_conversations_up_to_their_last_answer():
    rows = conversations(CONVERSATIONS["no system"][0], CONVERSATIONS["no system"][0], [said("user", "x")])
    expected = RECORDED["texts"]["gemma3"]["no system"]["prompt"]
    assert [expected] == chat_prompts(rows, byte_pairs("gemma3"))
    assert [""] == chat_prompts(conversations([said("user", "x")]), byte_pairs("gemma3"))
