"""The first weights of a model are made once, and found again by the next run that makes the same."""

import functools
import os

import pytest
import torch
from torch._guards import active_fake_mode
from transformers import LlamaConfig, PreTrainedTokenizerFast

from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.materialize import materialize
from forgather.config.render import render_text
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.data.cache import default_cache_dir
from forgather.ml.losses import loss_rule
from forgather.ml.models import from_config, from_pretrained
from forgather.ml.strategy import seed_checkpoint as ours
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.initial_weights import make_initial_weights
from forgather.ml.strategy.meta_model import tensors_of
from forgather.ml.trainer.model_source import model_key
from forgather.ml.types import Topology
from tests.isolation import private_folders  # noqa: F401
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.models import whole
from tests.ml.strategy.test_initial import started

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def config(**changed):
    return LlamaConfig(**{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, **changed})


def maker(seed=42, **changed):
    return functools.partial(from_config, config(**changed), seed=seed)


def alone():
    return Topology(rank=0, world_size=1, device=torch.device("cpu"), is_writer=True)


class Run:
    """A run that begins: counts how often it makes the model with values."""

    def __init__(self, make, *, seed=42):
        self.made = 0
        self.recipe = Recipe(
            make_model=lambda: self._make(make, seed),
            make_rule=loss_rule,
            make_optimizer=None,
            model_is_made_anew=True,
            model_key=functools.partial(model_key, make, seed),
        )

    def _make(self, make, seed):
        seed_everything(seed)
        model = make()
        self.made += active_fake_mode() is None
        return model

    def begin(self):
        """Returns the model with its weights and what is drawn after them."""
        model = whole(make_initial_weights(self.recipe, alone()))
        return model, torch.rand(3).tolist()


def same(left, right):
    ours, theirs = ({fqn: tensor for fqn, _, _, tensor in tensors_of(model)} for model in (left, right))
    assert list(ours) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def entries():
    return sorted(folder for folder in (default_cache_dir() / ours.KIND).iterdir() if folder.is_dir())


@pytest.mark.parametrize("changed", [{}, {"tie_word_embeddings": True}])
def test_the_next_run_finds_the_weights_and_the_random_numbers(changed):
    seed_everything(42)
    expected, drawn = maker(**changed)(), torch.rand(3).tolist()
    for times in (1, 0):
        run = Run(maker(**changed))
        model, after = run.begin()
        same(expected, model)
        assert (times, drawn) == (run.made, after)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(changed)
    assert 1 == len(entries())


def test_another_seed_or_size_is_another_model():
    makers = [maker(), maker(seed=1), maker(hidden_size=32), maker(initializer_range=0.5)]
    keys = {model_key(make, 42) for make in makers} | {model_key(makers[0], 43)}
    assert 5 == len(keys)
    assert None not in keys
    assert model_key(maker(), 42) in keys


def test_a_partial_of_a_config_file_is_known():
    text = """
main: !partial:forgather.ml.models:from_config
  config: !singleton:transformers:LlamaConfig {vocab_size: 32, hidden_size: 16, num_attention_heads: 2}
  dtype: bfloat16
"""
    built = [materialize(load(render_text(ConfigEnvironment(), text)))["main"] for _ in range(2)]
    first, second = (model_key(make, 42) for make in built)
    assert first is not None
    assert first == second
    assert first != model_key(functools.partial(built[0], dtype="float32"), 42)


def test_the_default_type_of_numbers_counts():
    before = model_key(maker(), 42)
    torch.set_default_dtype(torch.float64)
    try:
        assert before != model_key(maker(), 42)
    finally:
        torch.set_default_dtype(torch.float32)


class OwnConfig(LlamaConfig):
    pass


def test_what_is_not_known_has_no_key():
    strange = config()
    strange.act = object()
    for make in (
        None,
        lambda: maker()(),
        functools.partial(from_config, OwnConfig()),
        functools.partial(from_config, strange),
        functools.partial(from_config, config(), trust_remote_code=True),
        functools.partial(from_config, config(), nonsense=object()),
        functools.partial(from_config),
        functools.partial(from_pretrained, "name/of-the-hub"),
    ):
        assert model_key(make, 42) is None


def test_a_folder_counts_as_it_is_now(tmp_path):
    from_config(config()).save_pretrained(tmp_path)
    make = functools.partial(from_pretrained, tmp_path)
    before = model_key(make, 42)
    assert before == model_key(functools.partial(from_pretrained, str(tmp_path)), 42)
    expected = make()
    for times in (1, 0):
        run = Run(make)
        same(expected, run.begin()[0])
        assert times == run.made
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert before != model_key(make, 42)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert model_key(make, 42) is None


def test_what_is_not_known_is_made_each_time_and_leaves_nothing():
    for _ in range(2):
        run = Run(lambda: maker()())
        run.begin()
        assert 1 == run.made
    assert not (default_cache_dir() / ours.KIND).exists()


def test_damaged_weights_are_made_again(caplog):
    expected, _ = Run(maker()).begin()
    file = entries()[0] / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    file.write_bytes(content)
    run = Run(maker())
    same(expected, run.begin()[0])
    assert 1 == run.made
    assert "is damaged and is built again" in caplog.text


def begins_beside_another():
    run = Run(maker(num_hidden_layers=3))
    same(maker(num_hidden_layers=3)(), run.begin()[0])
    return run.made


def test_runs_that_begin_at_once_make_the_weights_once():
    assert [0, 0, 1] == sorted(run_ranks(3, begins_beside_another))


def test_old_weights_leave_and_those_of_this_hour_stay(monkeypatch):
    monkeypatch.setattr(ours, "MAX_FOLDERS", 2)
    for seed in range(4):
        Run(maker(seed=seed)).begin()
    assert 4 == len(entries())
    old = entries()[:3]
    for age, folder in enumerate(old):
        os.utime(folder / "manifest.json", (10_000 - age, 10_000 - age))
    Run(maker(seed=9)).begin()
    assert 2 == len(entries())
    assert not set(old) & set(entries())


def test_a_model_that_the_cache_does_not_hold_is_made_for_this_run_alone(monkeypatch):
    monkeypatch.setattr(ours, "MAX_BYTES", 1000)
    expected = maker()()
    run = Run(maker())
    same(expected, run.begin()[0])
    assert 1 == run.made
    assert [] == entries()


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ours, "cached_folder", full)
    same(maker()(), Run(maker()).begin()[0])
    assert "initial weights are not cached for later runs" in caplog.text


def test_the_error_of_a_model_that_cannot_be_made_is_raised_unchanged():
    def broken(*args):
        raise OSError("a broken constructor")

    recipe = Recipe(make_model=broken, make_rule=loss_rule, make_optimizer=None, model_is_made_anew=True,
                    model_key=lambda: "key")  # fmt: skip
    with pytest.raises(OSError, match="a broken constructor"):
        make_initial_weights(recipe, alone())


def test_a_tokenizer_counts_by_what_the_model_takes_of_it():
    from tokenizers import Tokenizer, models

    def tokenizer(size):
        words = {f"w{number}": number for number in range(size)}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))

    keys = [model_key(functools.partial(maker(), tokenizer=tokenizer(size)), 42) for size in (8, 8, 9)]
    assert keys[0] == keys[1] != keys[2]
    assert None not in keys


def _processes_that_load(is_quantized):
    made = []

    def make():
        model = torch.nn.Linear(2, 2)
        model.is_quantized = is_quantized
        # Without values, only the shapes are asked for.
        made.append(model) if active_fake_mode() is None else None
        return model

    recipe = Recipe(make_model=make, make_rule=loss_rule, make_optimizer=None, model_is_made_anew=True)
    weights = whole(make_initial_weights(recipe, started())).weight.tolist()
    return len(made), weights


@pytest.mark.parametrize(("is_quantized", "loads"), [(True, [1, 1]), (False, [1, 0])])
def test_every_process_loads_a_model_whose_files_say_that_it_is_quantized(is_quantized, loads):
    found = run_ranks(2, _processes_that_load, is_quantized)
    assert loads == [times for times, _ in found]
    assert found[0][1] == found[1][1]
