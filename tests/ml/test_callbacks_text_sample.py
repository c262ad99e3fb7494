import io

import pytest
import torch
from rich.console import Console

from forgather.ml.callbacks import TextSampleCallback
from forgather.ml.metrics import read_records
from tests.ml.callback_scene import arguments, control, letters, state, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def sampled(folder, model, event="on_evaluate", step=3, prompts=("ab", ""), tokenizer=None, **options):
    screen = io.StringIO()
    callback = TextSampleCallback(prompts, console=Console(file=screen, width=100), **{"max_new_tokens": 6} | options)
    scene = {"model": model, "processing_class": tokenizer or letters()}
    getattr(callback, event)(arguments(folder), state(step), control(), **scene)
    file = folder / "samples.jsonl"
    return (read_records(file) if file.exists() else []), screen.getvalue()


def greedy(model, ids, length):
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            if ids[0, -1] == 1:
                break
    return ids


def test_greedy_samples_equal_a_plain_loop(tmp_path, model):
    records, _ = sampled(tmp_path, model.eval(), prompts="ab")
    expected = letters().decode(greedy(model, torch.tensor([[2, 3]]), 6)[0, 2:], skip_special_tokens=True)
    assert [(record["step"], record["prompt"], record["text"]) for record in records] == [(3, "ab", expected)]


def test_samples_are_printed_with_their_prompt(tmp_path, model):
    records, screen = sampled(tmp_path, model)
    assert screen.splitlines()[0] == "sample at step 3"
    assert [line for line in screen.splitlines() if line.startswith("  | ")] == [
        f"  | {record['prompt']}{record['text']}" for record in records
    ]


@pytest.mark.parametrize("do_sample", [False, True])
def test_sampling_leaves_the_random_state_and_every_modules_mode(tmp_path, model, do_sample):
    model.train()
    model.lm_head.eval()
    torch.manual_seed(5)
    before, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    sampled(tmp_path, model, do_sample=do_sample)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes


def test_drawn_samples_follow_the_seed_alone(tmp_path, model):
    def texts(name, **options):
        torch.manual_seed(len(name))
        return [record["text"] for record in sampled(tmp_path / name, model, do_sample=True, top_k=0, **options)[0]]

    assert texts("a", seed=1) == texts("bb", seed=1)
    assert texts("ccc", seed=1, prompts=["a"] * 8) != texts("dddd", seed=2, prompts=["a"] * 8)


def test_every_steps_samples_at_its_steps_only(tmp_path, model):
    assert sampled(tmp_path, model, "on_step_end", step=4, every_steps=2)[0]
    assert not sampled(tmp_path / "odd", model, "on_step_end", step=3, every_steps=2)[0]
    assert not sampled(tmp_path / "other", model, "on_evaluate", step=4, every_steps=2)[0]


def test_a_step_is_sampled_once(tmp_path, model):
    callback = TextSampleCallback("a", max_new_tokens=2, console=Console(file=io.StringIO()))
    scene = {"model": model, "processing_class": letters()}
    callback.on_evaluate(arguments(tmp_path), state(5), control(), **scene)
    callback.on_train_end(arguments(tmp_path), state(5), control(), **scene)
    assert len(read_records(tmp_path / "samples.jsonl")) == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_that_goes_on_keeps_the_samples_up_to_its_checkpoint(tmp_path, model, elsewhere):
    scene = {"model": model, "processing_class": letters()}

    def callback(**restored):
        made = TextSampleCallback("a", max_new_tokens=2, console=Console(file=io.StringIO()))
        vars(made).update(restored)
        return made

    earlier, first = callback(), callback()
    earlier.on_train_begin(arguments(tmp_path), state(), control())
    earlier.on_evaluate(arguments(tmp_path), state(9), control(), **scene)
    first.on_train_begin(arguments(tmp_path), state(), control())
    first.on_evaluate(arguments(tmp_path), state(2), control(), **scene)
    saved = first.state()["attributes"]
    first.on_evaluate(arguments(tmp_path), state(4), control(), **scene)
    folder = tmp_path / "other" if elsewhere else tmp_path
    second = callback(**saved)
    second.on_train_begin(arguments(folder), state(3), control())
    second.on_evaluate(arguments(folder), state(4), control(), **scene)
    steps = [record["step"] for record in read_records(folder / "samples.jsonl")]
    assert ([2, 4] if elsewhere else [9, 2, 4]) == steps


def test_a_prompt_as_long_as_the_models_positions_still_gets_a_token(tmp_path, model):
    records, _ = sampled(tmp_path, model, prompts="abcdefgh" * 4)
    assert len(records) == 1
    assert len(records[0]["text"]) <= 1


def test_a_missing_tokenizer_is_told_once_and_ends_nothing(tmp_path, model, caplog):
    callback = TextSampleCallback("a")
    for step in (1, 2):
        callback.on_evaluate(arguments(tmp_path), state(step), control(), model=model, processing_class=None)
    assert len(caplog.records) == 1
    assert [
        "no text is sampled: there is no tokenizer; give `tokenizer`, or `processing_class` to the trainer"
    ] == caplog.messages


def test_control_characters_do_not_reach_the_terminal():
    from forgather.ml.callbacks.text_sample import quote_sample

    assert quote_sample("a\x1b[31m\rb\n\tc") == "  | a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b\n  | \tc"


MESSAGES = [{"role": "user", "content": "ab"}]


def chatting():
    tokenizer = letters()
    tokenizer.chat_template = (
        "{% for m in messages %}c{{ m.content }}{% endfor %}{% if add_generation_prompt %}d{% endif %}"
    )
    return tokenizer


def test_messages_are_answered_through_the_chat_template(tmp_path, model):
    records, screen = sampled(tmp_path, model.eval(), prompts=[MESSAGES], tokenizer=chatting())
    assert [
        ("cabd", letters().decode(greedy(model, torch.tensor([[4, 2, 3, 5]]), 6)[0, 4:], skip_special_tokens=True))
    ] == [(record["prompt"].replace(" ", ""), record["text"]) for record in records]
    assert "c a b d" in screen
    # One conversation may be given as it is, like one text.
    assert records[0]["text"] == sampled(tmp_path, model, prompts=MESSAGES, tokenizer=chatting())[0][-1]["text"]


def test_messages_without_a_chat_template_are_told_once(tmp_path, model, caplog):
    assert not sampled(tmp_path, model, prompts=[MESSAGES])[0]
    assert "a prompt consists of messages, and the tokenizer has no chat template" in caplog.messages[0]


ANSWERS = [{"row": 0, "prompt": "ab", "reference": "c", "text": "d", "finish": "stop"}]


def test_answers_of_an_evaluation_are_kept_once_and_up_to_the_checkpoint(tmp_path, model):
    scene = {"model": model, "processing_class": letters()}

    def callback(**restored):
        made = TextSampleCallback("a", max_new_tokens=2, every_steps=3, console=Console(file=io.StringIO()))
        vars(made).update(restored)
        made.on_train_begin(arguments(tmp_path), state(4 if restored else 0), control())
        return made

    first = callback()
    first.on_step_end(arguments(tmp_path), state(3), control(), **scene)
    for step in (4, 4):
        first.on_evaluate(arguments(tmp_path), state(step), control(), answers=ANSWERS, **scene)
    saved = first.state()["attributes"]
    first.on_evaluate(arguments(tmp_path), state(5), control(), answers=ANSWERS, **scene)
    callback(**saved)

    records = read_records(tmp_path / "samples.jsonl")
    assert [(3, None), (4, "c")] == [(record["step"], record.get("reference")) for record in records]
