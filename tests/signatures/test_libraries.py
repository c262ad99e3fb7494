"""Signatures of libraries, read from source, against those of the imported objects."""

import inspect
import random
from pathlib import Path

import pytest

from forgather.config.lint.argument_check import mismatch
from forgather.config.resolve import Resolver
from forgather.signatures import Callee, Reader, Unknown
from tests.each import each

CONSTRUCTORS = [
    line
    for line in Path(__file__).with_name("constructors.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What is read, before anything is imported."""
    reader = Reader(str(tmp_path_factory.mktemp("project")))
    return {constructor: reader.read(constructor) for constructor in CONSTRUCTORS}


@pytest.fixture(scope="module")
def resolve(tmp_path_factory):
    return Resolver(str(tmp_path_factory.mktemp("project"))).resolve


def real_signature(function):
    """The signature that Python knows; None where it knows none."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    # PyO3 writes `self` into the text signatures of its classes.
    params = [p for p in signature.parameters.values() if p.name != "self"]
    return signature.replace(parameters=params)


def binds(signature, args, kwargs):
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def generated_calls(signature, seed):
    """Calls around a signature: all given, each left out, one too many, one misspelled, some by position."""
    chance = random.Random(seed)
    names = [p.name for p in signature.parameters.values() if p.kind not in _STARS]
    yield [], {}
    yield [], dict.fromkeys(names)
    yield [], {**dict.fromkeys(names), "not_a_parameter": None}
    for count in range(min(len(names) + 2, 8)):
        yield [None] * count, {}
        yield [None] * count, dict.fromkeys(names[count:])
        yield [None] * count, dict.fromkeys(names)
    for _ in range(12):
        yield [], dict.fromkeys(chance.sample(names, chance.randint(0, len(names))))
    for name in names:
        yield [], dict.fromkeys(other for other in names if other != name)


def test_no_call_that_python_takes_is_refused(answers, resolve):
    def test(constructor):
        answer = answers[constructor]
        if isinstance(answer, Unknown):
            assert answer.reason
            return
        real = real_signature(resolve(constructor))
        if real is None or constructor.startswith("tokenizers"):
            return
        for args, kwargs in generated_calls(real, constructor):
            if binds(real, args, kwargs):
                accepted = any(binds(signature, args, kwargs) for signature in answer.signatures)
                assert accepted or raises_at_once(resolve(constructor), args, kwargs), (args, kwargs)

    each(CONSTRUCTORS, test)


def raises_at_once(function, args, kwargs):
    """Whether a call that binds is refused all the same, further down: `**kwargs` was handed on."""
    with pytest.raises(TypeError):
        function(*args, **kwargs)
    return True


def test_no_call_that_python_refuses_is_taken_where_nothing_is_handed_on(answers, resolve):
    def test(constructor):
        answer = answers[constructor]
        real = None if isinstance(answer, Unknown) else real_signature(resolve(constructor))
        if real is None or any(p.kind in _STARS for s in (real, *answer.signatures) for p in s.parameters.values()):
            return
        for args, kwargs in generated_calls(real, constructor):
            if not binds(real, args, kwargs):
                assert not any(binds(signature, args, kwargs) for signature in answer.signatures), (args, kwargs)

    each(CONSTRUCTORS, test)


def test_parameters_are_those_that_python_knows(answers, resolve):
    def test(constructor):
        answer = answers[constructor]
        real = None if isinstance(answer, Unknown) else real_signature(resolve(constructor))
        if real is None or constructor in FOLLOWED or constructor.startswith("tokenizers"):
            return
        expected = [(p.name, p.kind, p.default is p.empty) for p in real.parameters.values()]
        found = [(p.name, p.kind, p.default is p.empty) for p in answer.signatures[0].parameters.values()]
        assert expected == found

    each(CONSTRUCTORS, test)


def test_a_construction_takes_every_keyword_that_the_check_takes(answers, resolve):
    def test(constructor):
        answer = answers[constructor]
        if isinstance(answer, Unknown):
            return
        for signature in answer.signatures:
            args = [None for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
            kwargs = {p.name: None for p in signature.parameters.values() if p.kind in _NAMED}
            assert mismatch(resolve(constructor), constructor, args, kwargs) is None

    each(CONSTRUCTORS, test)


# Python's own signature ends at `**kwargs`, or is that of a function which is not what gets called.
FOLLOWED = {
    "torch.nn:LSTM",
    "torch.nn:GRU",
    "transformers:LlamaConfig",
    "transformers:GPT2Config",
    "transformers:MistralConfig",
    "transformers:Qwen3Config",
    "transformers:GPTNeoXConfig",
    "transformers:BertConfig",
    "transformers:T5Config",
    "transformers:AutoConfig.from_pretrained",
    "transformers:AutoTokenizer.from_pretrained",
    "accelerate:PartialState",
    "datasets:Dataset.from_json",
    "datasets:Dataset.from_generator",
    "datasets:load_dataset",
    "peft:PeftModel.from_pretrained",
}


@pytest.mark.parametrize("constructor", ["torch.nn:LSTM", "torch.nn:GRU"])
def test_keywords_that_are_handed_on_are_those_that_the_last_callee_takes(answers, resolve, constructor):
    real, (signature,) = resolve(constructor), answers[constructor].signatures
    given = {"input_size": 4, "hidden_size": 4}
    for name in signature.parameters:
        if name not in (*given, "proj_size"):
            default = signature.parameters[name].default.value
            real(**given, **{name: default})
    for name in ("mode", "hiden_size", "layers"):
        assert not binds(signature, [], {**given, name: 1})
        with pytest.raises(TypeError):
            real(**given, **{name: 1})


@pytest.mark.parametrize("name", ["LlamaConfig", "GPT2Config", "MistralConfig", "Qwen3Config", "GPTNeoXConfig"])
def test_a_model_config_takes_any_keyword_and_each_field(answers, resolve, name):
    (signature,), real = answers[f"transformers:{name}"].signatures, resolve(f"transformers:{name}")
    fields = {p.name: p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(inspect.signature(real).parameters) == set(fields)
    assert binds(signature, [], {"hiden_size": 1})
    assert 1 == real(hiden_size=1).hiden_size


@pytest.mark.parametrize("constructor", [name for name in CONSTRUCTORS if name.startswith("tokenizers")])
def test_what_a_stub_requires_is_required(answers, resolve, constructor):
    answer = answers[constructor]
    assert isinstance(answer, Callee)
    required = [p for p in answer.signatures[0].parameters.values() if p.default is p.empty and p.kind not in _STARS]
    if required:
        with pytest.raises(TypeError):
            resolve(constructor)()
    else:
        resolve(constructor)()


def test_most_constructors_are_known(answers):
    unknown = [name for name, answer in answers.items() if isinstance(answer, Unknown)]
    assert len(CONSTRUCTORS) >= 150
    assert len(unknown) <= 0.1 * len(CONSTRUCTORS), unknown
