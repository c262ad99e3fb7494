"""A budget of activations: less is kept, no gradient changes, and it holds for the model that it was set for."""

import functools

import pytest
import torch
from torch import nn

from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, TrainingArguments
from forgather.ml.trainer.model_setup import compile_model
from tests.ml.strategy.models import batches, gpt2, llama

BUDGETS = (0.0, 0.5, 1.0)


class Block(nn.Module):
    """A block whose products and activations can be kept or recomputed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x)).sin()
        return x


class Blocks(nn.Module):
    """A model of one block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self):
        x = torch.linspace(-1, 1, 64 * 32).view(64, 32)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def step(make, budget, backend="aot_eager", call=lambda model: model()):
    """Returns the gradients of a step, and the bytes of activations that the forward pass keeps."""
    torch.manual_seed(0)
    model = make()
    model.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    compile_model(model, backend=backend, mode=None, by_blocks=True, memory_budget=budget)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = call(model)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, sum(size for place, size in kept.items() if place not in weights)


def test_less_is_kept_and_no_gradient_changes():
    # In one process: code that was compiled for another budget is not used again.
    found = {budget: step(Blocks, budget) for budget in BUDGETS}
    sizes = [found[budget][1] for budget in BUDGETS]
    inputs = 64 * 32 * 4
    assert sizes[0] <= 2 * inputs < sizes[1] < sizes[2]
    assert sizes[1] - sizes[0] <= 0.6 * (sizes[2] - sizes[0])
    for gradients, _ in found.values():
        assert all(torch.equal(value, gradients[name]) for name, value in found[1.0][0].items())
    assert 1.0 == torch._functorch.config.activation_memory_budget


# Of a module that inductor imports.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [functools.partial(llama, layers=2), functools.partial(gpt2, layers=2)])
def test_half_of_the_activations_of_a_transformer(make, backend):
    def call(model):
        return model(**batches(1)[0], use_cache=False).loss

    (expected, most), (found, half) = (step(make, budget, backend, call) for budget in (1.0, 0.5))
    assert half < 0.8 * most
    # What inductor fuses, it may round in another way.
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "settings", "codes"),
    [
        (TrainingArguments, {"torch_compile": True}, []),
        (TrainingArguments, {}, ["FG711"]),
        (TrainingArguments, {"torch_compile_backend": "inductor"}, []),
        (TrainingArguments, {"torch_compile_mode": "default"}, []),
        (TrainingArguments, {"torch_compile_regions": True}, []),
        (TrainingArguments, {"torch_compile_regions": False}, ["FG711"]),
        (TrainingArguments, {"torch_compile_backend": "eager"}, ["FG711"]),
        (TrainingArguments, {"torch_compile": True, "torch_compile_backend": "eager"}, ["FG711"]),
        (TrainingArguments, {"torch_compile": True, "gradient_checkpointing": True}, ["FG725"]),
        (
            AccelTrainingArguments,
            {"torch_compile": True, "fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}},
            ["FG725"],
        ),
        (PipelineTrainingArguments, {"torch_compile": True, "checkpoint_sequential": True}, ["FG725"]),
    ],
)
def test_the_check_says_what_a_budget_needs(arguments, settings, codes):
    given = {"output_dir": "out", "activation_memory_budget": 0.5, **settings}
    broken = [breach.code for breach in arguments.RULES.broken(arguments.RULES.complete(given), given=given)]
    assert codes == [code for code in broken if code in ("FG711", "FG725")]
