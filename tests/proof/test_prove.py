"""Code that does not do what its config does is found out, and where."""

from __future__ import annotations

import os
import sys

import pytest

from forgather.codegen.emit_python import emit_python
from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.render import render_text
from forgather.errors import ForgatherError
from forgather.verification.prove import prove

CONFIG = """\
block: &block !factory:models:Block [&norm !singleton:models:Norm [1e-6]]
make: &make !partial:models:Layer@make { inner: *block, sizes: [1, 2], norm: *norm }
main: !singleton:models:Model
  blocks: [*block, *block]
  make: *make
  optimizer: !partial:torch.optim:AdamW { lr: 0.1 }
  width: !var { name: width, default: 8 }
  token: !env TOKEN
  size: !call:len [&data !call:data:load ]
  train: !call:getitem [*data, train]
  first: !call:print [*norm]
"""
MUTATIONS = {
    "a value": ("lr=0.1", "lr=0.2", "main.optimizer().lr, expected 0.1, found 0.2"),
    "a keyword": ("lr=0.1", "rate=0.1", "main.optimizer(), expected the keys lr, found the keys rate"),
    "a constructor": (
        "return Model(", "return Norm(", "main, expected a call of models.Model, found a call of models.Norm"),
    "sharing lost": ("make=make", "make=partial(Layer)", "main.make()"),
    "an object for two": (
        "[Block(norm), Block(norm)]", "[Block(norm)] * 2", "main.blocks[1], expected an object of its own"),
    "a parameter": ("width=width", "width=8", "main.width, expected a call of the variable width, found 8"),
    "the environment": ('os.environ["TOKEN"]', '"secret"', "main.token, expected 'value of TOKEN', found 'secret'"),
    "what a partial is asked for": ('"norm": norm}', '"norm": 0}', "main.make.keywords['norm'], expected"),
    "a factory built once": ("Block(norm) if", "built if", "main.make()"),
    "an argument more": ("print(norm)", "print(norm, 1)", "main.first, expected 1 positional arguments"),
    "an item": ('data["train"]', 'data["test"]', "main.train, expected 'train', found 'test'"),
    "a call more": ("    return Model(", "    print()\n    return Model(", "expected"),
    "an error": ("return Model(", "return nothing(", "the generated code fails: NameError: name 'nothing' is not defined"),
    "a syntax error": ("return Model(", "return Model((", "the generated code cannot be compiled: '(' was never closed"),
}  # fmt: skip

MORE = {
    "a factory built once": lambda code: code.replace("    @wraps(Layer", "    built = Block(norm)\n\n    @wraps(Layer")
}


def graph_of(text):
    return load(render_text(ConfigEnvironment(), text))


def proven(text, change=lambda code: code, targets=("main",)):
    graph = graph_of(text)
    code = emit_python(graph, targets)
    return prove(graph, change(code.text), code.targets, code.parameters)


def test_the_code_of_a_config_is_equal_and_its_calls_are_counted():
    assert 6 == proven(CONFIG)
    assert 1 == proven("a: !call:m:f [1]\nmain: [1]\n", targets=["a"])


@pytest.mark.parametrize("kind", ["call", "partial"])
@pytest.mark.parametrize("late", ["!var late", "!var {name: late, default: {x: 2, y: !call:m:g []}}"])
def test_the_code_of_latent_arguments_in_a_variable_is_equal(kind, late):
    text = f"main: !{kind}:m:f\n  args: [1]\n  kwargs: {{x: 1}}\n  latent_args: {late}\n"
    assert 0 < proven(text) + proven(f"main: [!call:m:g [], {{}}]\nother: !{kind}:m:h {{x: 1, latent_args: {late}}}\n")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_code_that_was_changed_is_found_out(mutation):
    old, new, message = MUTATIONS[mutation]

    def change(code):
        assert old in code
        return MORE.get(mutation, lambda text: text)(code.replace(old, new))

    with pytest.raises(ForgatherError) as caught:
        proven(CONFIG, change)
    assert "FG333" == caught.value.code
    assert message in caught.value.message


def test_the_order_of_calls_counts():
    config = "main: [!call:m:f [1], !call:m:g [2]]\n"

    def swap(code):
        return code.replace("return [f(1), g(2)]", "b = g(2)\n    return [f(1), b]")

    with pytest.raises(ForgatherError, match=r"\[FG333\].* at step 1, expected m.f, found m.g"):
        proven(config, swap)


def test_nothing_of_the_config_is_imported_or_run(tmp_path, monkeypatch):
    (tmp_path / "canary_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = "main: [!call:canary_module:f [1], !call:os:system ['touch CANARY'], !call:canary_module.py:f [1],"
    config += (
        " !call:exec ['raise SystemExit(1)'], !call:open [CANARY, w], !call:importlib:import_module [canary_module]]\n"
    )
    assert 6 == proven(config)
    assert "canary_module" not in sys.modules
    assert ["canary_module.py"] == os.listdir(tmp_path)


ACT = "\"import os; os.system('touch CANARY')\""
GLOBALS = "!call:getattr [!call:getattr [!call:getattr [!call:m:f [], __class__], __len__], __globals__]"


@pytest.mark.parametrize(
    "main",
    [
        f"!call:builtins:abs.__self__.exec [{ACT}]",
        "!call:getattr [!call:getattr [[], __class__], __base__]",
        f"!call:call [!call:getitem [!call:getitem [{GLOBALS}, __builtins__], exec], {ACT}]",
        "!call:call [!partial:getattr [!call:m:f []], __class__]",
        "!call:call [!call:getattr [!call:m:f [], !call:str [__class__]]]",
        f"!call:m:__init__.__globals__.get [{ACT}]",
        "!call:m:f.__init__ []",
        "!call:getattr [!partial:m:f [], _run]",
    ],
)
def test_a_config_does_not_reach_past_the_stand_ins(main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForgatherError) as caught:
        proven(f"main: {main}\n")
    assert "FG334" == caught.value.code
    assert "leads out of the stand-ins" in caught.value.message
    assert [] == os.listdir(tmp_path)


def test_names_with_an_underscore_are_names_like_others_on_results():
    assert 1 == proven("main: !call:getattr [!call:m:f [], _log]\n")


@pytest.mark.parametrize(
    "act",
    [
        "import os\nos.system('touch CANARY')\n",
        "import os\nos.path.os.system('touch CANARY')\n",
        "import subprocess\nsubprocess.run(['touch', 'CANARY'])\n",
        "import sys\nsys.modules['os'].system('touch CANARY')\n",
        "import importlib\nimportlib.util.sys.modules['os'].system('touch CANARY')\n",
        "from os import system\nsystem('touch CANARY')\n",
        "open('CANARY', 'w')\n",
        "eval('1')\n",
        "__import__('os').system('touch CANARY')\n",
    ],
)
def test_what_is_run_reaches_nothing_that_acts(act, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForgatherError) as caught:
        proven("main: [1]\n", lambda code: act + code)
    assert "FG333" == caught.value.code
    assert [] == os.listdir(tmp_path)


def test_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("TOKEN", "planted")
    monkeypatch.delenv("OTHER_TOKEN", raising=False)
    proven("main: [!env TOKEN, !env OTHER_TOKEN, !env {name: TOKEN, default: !call:m:f [1]}]\n".replace("],", " ],"))
    assert "planted" == os.environ["TOKEN"]
    assert "OTHER_TOKEN" not in os.environ


def test_a_config_that_cannot_be_built_is_distinguished_from_wrong_code():
    with pytest.raises(
        ForgatherError, match=r"\[FG334\] the config cannot be built: ValueError: invalid literal for int"
    ):
        proven("main: !call:int [many]\n")


def test_an_environment_that_was_exchanged_is_the_one_that_counts(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    assert 0 == proven("main: !env TOKEN\n")
