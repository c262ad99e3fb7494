"""Sums and counts: whatever the model and the loss, batches add up to the whole."""

import functools
import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.errors import TrainingError
from forgather.ml.batch_sizes import num_rows, num_tokens
from forgather.ml.losses import is_causal_lm, labels_of, loss_rule
from forgather.ml.model_inputs import DOCUMENTS, SHIFTED, ModelInputs
from tests.ml.fixtures import VOCAB, Regression, rows, tiny_llama


def number(value):
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def stack(batch):
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


class Configured:
    """A partial as a configuration makes one: it has `func` and `keywords`, and is not a functools.partial."""

    def __init__(self, func, **keywords):
        self.func, self.keywords = func, keywords
        self.__signature__ = inspect.signature(functools.partial(func, **keywords))

    def __call__(self, *args, **kwargs):
        return self.func(*args, **{**self.keywords, **kwargs})


class Classifier(nn.Module):
    def __init__(self, form="tensor"):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.form = nn.Linear(4, 3), form

    def forward(self, x):
        logits = self.layer(x)
        return {"tensor": logits, "tuple": (logits, x), "mapping": {"logits": logits}}[self.form]


def class_batch(count=6):
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 3, (count,), generator=generator)
    labels[1] = -100
    return {"x": torch.randn(count, 4, generator=generator), "labels": labels}


def parts(batch, *sizes):
    at = 0
    for size in sizes:
        yield {name: value[at : at + size] for name, value in batch.items()}
        at += size


def mean_of_parts(rule, model, batches):
    batches = list(batches)
    return sum(number(rule.total(model, batch)) for batch in batches) / sum(
        number(rule.count(batch)) for batch in batches
    )


def test_the_token_loss_is_that_of_the_model_itself():
    model, batch = tiny_llama().eval(), stack(rows())
    rule = loss_rule(model)
    expected = model(**batch).loss
    assert number(expected) == pytest.approx(number(rule.total(model, batch) / rule.count(batch)), rel=1e-6)


@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 5), (7, 1)])
def test_token_losses_of_parts_add_up(sizes):
    model, batch = tiny_llama().eval(), stack(rows())
    rule = loss_rule(model)
    expected = number(rule.total(model, batch)) / rule.count(batch)
    assert expected == pytest.approx(mean_of_parts(rule, model, parts(batch, *sizes)), rel=1e-6)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=2),
        F.cross_entropy,
        functools.partial(F.cross_entropy, label_smoothing=0.2),
        functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 0.5])),
        functools.partial(functools.partial(F.cross_entropy, ignore_index=0), ignore_index=2),
        Configured(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 0.5]), ignore_index=2),
    ],
    ids=["plain", "weighted", "smooth", "ignoring", "function", "partial", "partial-w", "partial-i", "configured"],
)
@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
def test_a_mean_of_classes_becomes_an_exact_sum(loss_fn, form):
    model, batch = Classifier(form), class_batch()
    if 2 in (getattr(loss_fn, "ignore_index", None), getattr(loss_fn, "keywords", {}).get("ignore_index")):
        batch["labels"][1] = 2
    rule = loss_rule(model, loss_fn)
    expected = number(loss_fn(model.layer(batch["x"]), batch["labels"]))
    assert expected == pytest.approx(mean_of_parts(rule, model, [batch]), rel=1e-6)
    assert expected == pytest.approx(mean_of_parts(rule, model, parts(batch, 1, 2, 3)), rel=1e-6)
    assert "mean" == getattr(loss_fn, "reduction", "mean")


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), F.mse_loss, Configured(F.mse_loss)])
def test_a_mean_of_elements_becomes_an_exact_sum(loss_fn):
    model = Classifier()
    batch = {"x": class_batch()["x"], "labels": torch.randn(6, 3)}
    rule = loss_rule(model, loss_fn)
    expected = number(loss_fn(model(batch["x"]), batch["labels"]))
    assert expected == pytest.approx(mean_of_parts(rule, model, parts(batch, 2, 4)), rel=1e-6)


def test_class_probabilities_are_targets():
    model, loss_fn = Classifier(), nn.CrossEntropyLoss()
    batch = {"x": class_batch()["x"], "labels": torch.softmax(torch.randn(6, 3), -1)}
    rule = loss_rule(model, loss_fn)
    expected = number(loss_fn(model(batch["x"]), batch["labels"]))
    assert expected == pytest.approx(mean_of_parts(rule, model, parts(batch, 2, 4)), rel=1e-6)


def test_a_loss_of_the_user_is_shifted_for_causal_language_models():
    model, batch = tiny_llama().eval(), stack(rows())
    own, theirs = loss_rule(model), loss_rule(model, nn.CrossEntropyLoss())
    assert own.count(batch) == theirs.count(batch)
    assert number(own.total(model, batch)) == pytest.approx(number(theirs.total(model, batch)), rel=1e-6)


def test_a_loss_that_divides_by_itself_gets_the_number_of_the_whole_update():
    seen = []

    def loss_fn(logits, labels, num_items_in_batch):
        seen.append(num_items_in_batch)
        return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    model, batch = Classifier(), class_batch()
    rule = loss_rule(model, loss_fn)
    expected = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
    assert number(expected) == pytest.approx(number(rule.total(model, batch, denom=11)), rel=1e-6)
    assert [11, 22] == seen  # the second call shows that it divides by it


@pytest.mark.parametrize("sizes", [(6,), (1, 5)])
def test_items_are_the_numbers_of_a_regression_as_transformers_counts_them(sizes):
    def squares(logits, labels, num_items_in_batch):
        return F.mse_loss(logits, labels, reduction="sum") / num_items_in_batch

    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2), {"input": torch.randn(6, 4), "labels": torch.randn(6, 2)}
    expected = number(F.mse_loss(model(batch["input"]), batch["labels"]))
    rule = loss_rule(model, squares)
    assert rule.count(batch) == 12
    assert expected == pytest.approx(mean_of_parts(rule, model, parts(batch, *sizes)), rel=1e-6)


def own_squares(logits, labels, reduction="mean"):
    return F.mse_loss(logits.squeeze(-1), labels, reduction=reduction)


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 1, 4)])
def test_a_loss_of_the_user_counts_rows_where_labels_are_numbers(sizes):
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 1), {"input": torch.randn(6, 4), "labels": torch.randn(6)}
    rule = loss_rule(model, own_squares)
    expected = number(own_squares(model(batch["input"]), batch["labels"]))
    assert expected == pytest.approx(mean_of_parts(rule, model, parts(batch, *sizes)), rel=1e-6)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.KLDivLoss(reduction="batchmean"),
        lambda logits, labels: logits.mean(),
        F.multilabel_soft_margin_loss,
        functools.partial(F.cross_entropy, weight=[1.0, 2.0]),
    ],
)
def test_a_loss_whose_sum_cannot_be_known_is_refused(loss_fn):
    with pytest.raises(TrainingError, match=r"FG806.*cannot be summed over micro-batches"):
        loss_rule(Classifier(), loss_fn)


def test_the_hint_names_no_parameter_that_the_loss_already_has():
    rule = loss_rule(Classifier(), lambda logits, labels, reduction="mean": 2.0 * logits.mean())
    with pytest.raises(TrainingError, match=r"FG806.*take num_items_in_batch in place of 'reduction'"):
        rule.total(Classifier(), class_batch())


def test_a_loss_that_sums_is_taken_as_it_is():
    model, batch = Classifier(), class_batch()
    rule = loss_rule(model, nn.CrossEntropyLoss(reduction="sum"))
    expected = number(F.cross_entropy(model(batch["x"]), batch["labels"]))
    assert expected == pytest.approx(mean_of_parts(rule, model, parts(batch, 3, 3)), rel=1e-6)


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: (loss, 1), lambda loss: {"loss": loss}])
def test_a_loss_that_the_model_returns_is_taken_from_any_form(wrap):
    class Own(Regression):
        def forward(self, x, y):
            return wrap(super().forward(x, y))

    model = Own().eval()
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4)}
    rule = loss_rule(model)
    assert 4 == rule.count(batch)
    assert number(Regression.forward(model, **batch) * 4) == pytest.approx(number(rule.total(model, batch)))


def test_a_model_without_a_loss_is_an_error_that_says_what_it_returned():
    rule = loss_rule(Classifier())
    with pytest.raises(TrainingError, match=r"FG809.*a tensor of shape \(6, 3\), without a loss"):
        rule.total(Classifier(), {"x": torch.randn(6, 4)})
    with pytest.raises(TrainingError, match=r"FG809.*a mapping with 'out', without logits"):
        loss_rule(nn.Identity(), nn.MSELoss()).total(lambda **_: {"out": 1}, {"labels": torch.ones(1)})


def test_labels_that_are_missing_are_an_error_that_names_the_columns():
    model = tiny_llama()
    with pytest.raises(TrainingError, match=r"FG808.*no labels \(found: input_ids\)"):
        loss_rule(model).count({"input_ids": torch.ones(1, 3)})


def test_label_smoothing_is_that_of_torch_and_refused_elsewhere():
    model, batch = tiny_llama().eval(), stack(rows())
    rule = loss_rule(model, label_smoothing=0.1)
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].reshape(-1, VOCAB)
    expected = F.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), label_smoothing=0.1)
    assert number(expected) == pytest.approx(number(rule.total(model, batch)) / rule.count(batch), rel=1e-6)
    with pytest.raises(TrainingError, match="FG807"):
        loss_rule(model, nn.CrossEntropyLoss(), label_smoothing=0.1)


def test_the_auxiliary_loss_of_experts_is_weighted_by_targets():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    model, batch = MixtralForCausalLM(config).train(), stack(rows(4))
    rule = loss_rule(model)
    expected = model(**batch).loss
    assert number(expected) == pytest.approx(number(rule.total(model, batch)) / rule.count(batch), rel=1e-5)


def test_forms_of_batches():
    pair = (torch.randn(3, 4), torch.tensor([0, 1, -100]))
    assert pair[1] is labels_of(pair)
    assert (3, 3) == (num_rows(pair), num_tokens(pair))
    assert (2, 10) == (
        num_rows({"input_ids": torch.ones(2, 5).long()}),
        num_tokens({"input_ids": torch.ones(2, 5).long()}),
    )
    assert labels_of(torch.ones(2)) is None
    assert (2, 3) == ModelInputs(Classifier()).call(lambda a, b: (a, b), (2, 3), labels=True)
    rule = loss_rule(Classifier(), nn.CrossEntropyLoss())
    assert 2 == rule.count(pair)
    assert number(F.cross_entropy(Classifier()(pair[0]), pair[1])) == pytest.approx(
        number(rule.total(Classifier(), pair)) / 2, rel=1e-6
    )


def test_labels_are_shifted_once():
    model, batch = tiny_llama().eval(), stack(rows())
    for rule in (loss_rule(model), loss_rule(model, nn.CrossEntropyLoss())):
        once = rule.prepared(batch)
        assert ["input_ids", SHIFTED, DOCUMENTS] == list(once)
        assert torch.equal(batch["labels"][:, 1:], once[SHIFTED][:, :-1])
        assert torch.equal(once[SHIFTED], rule.prepared(once)[SHIFTED])
        assert rule.count(batch) == rule.count(once)
        assert torch.equal(rule.total(model, batch), rule.total(model, once))


def test_a_function_of_the_user_meets_only_targets_that_count():
    seen = []

    def own(logits, labels, reduction="mean"):
        seen.append((tuple(logits.shape), tuple(labels.shape)))
        return F.cross_entropy(logits, labels, reduction=reduction)

    model, batch = tiny_llama().eval(), stack(rows())
    rule = loss_rule(model, own)
    expected = number(loss_rule(model).total(model, batch))
    assert expected == pytest.approx(number(rule.total(model, rule.prepared(batch))), rel=1e-6)
    targets = rule.count(batch)
    assert targets < 8 * 11
    assert {((targets, VOCAB), (targets,))} == {*seen}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_float64_stays_and_half_precision_is_raised(dtype):
    model, batch = tiny_llama().eval().to(dtype), stack(rows())
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    assert expected == loss_rule(model).total(model, batch).dtype
    assert expected == loss_rule(model, nn.CrossEntropyLoss()).total(model, batch).dtype


def test_a_returned_loss_over_no_targets_is_zero():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, labels):
            return F.cross_entropy(self.layer(x), labels)

    model = Own()
    total = loss_rule(model).total(model, {"x": torch.randn(2, 4), "labels": torch.full((2,), -100)})
    total.backward()
    assert 0 == total.item() and 0 == model.layer.weight.grad.abs().max()


def test_gpt2_has_the_token_loss_though_transformers_names_no_kind_for_it():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    assert is_causal_lm(model)
    assert not is_causal_lm(model.transformer)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_documents_of_a_packed_row_stay_apart_under_a_lora():
    model = tiny_llama()
    ids = torch.randint(3, VOCAB, (2, 8))
    packed = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)}
    expected = loss_rule(model).total(model, packed)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert number(expected) == pytest.approx(number(loss_rule(wrapped).total(wrapped, packed)))


class Weighted(nn.Module):
    """A loss of one's own that holds tensors in every way in which a module can."""

    def __init__(self):
        super().__init__()
        self.register_buffer("classes", torch.ones(3))
        self.scale = torch.tensor(2.0)
        self.inner = nn.CrossEntropyLoss(weight=torch.ones(3))

    def forward(self, logits, labels, reduction="mean"):
        self.inner.reduction = reduction
        return self.inner(logits * self.classes, labels) * self.scale


class Plain:
    def __init__(self):
        self.weight = torch.ones(3)

    def __call__(self, logits, labels, reduction="mean"):
        return F.cross_entropy(logits, labels, weight=self.weight, reduction=reduction)

    def method(self, logits, labels, reduction="mean"):
        return self(logits, labels, reduction=reduction)


def scaled(logits, labels, scale, reduction="mean"):
    return F.cross_entropy(logits, labels, reduction=reduction) * scale


def tensors_in(value):
    """Yields the tensors that a loss holds, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, functools.partial):
        for inner in (*value.args, *value.keywords.values(), value.func):
            yield from tensors_in(inner)
    elif isinstance(value, nn.Module | Plain):
        modules = value.modules() if isinstance(value, nn.Module) else [value]
        for module in modules:
            held = [*vars(module).values(), *vars(module).get("_buffers", {}).values()]
            yield from (item for item in held if isinstance(item, torch.Tensor))
    elif hasattr(value, "__self__"):
        yield from tensors_in(value.__self__)


LOSSES_WITH_TENSORS = {
    "module of torch": lambda: nn.CrossEntropyLoss(weight=torch.ones(3)),
    "own module": Weighted,
    "own object": Plain,
    "bound method": lambda: Plain().method,
    "partial": lambda: functools.partial(F.cross_entropy, weight=torch.ones(3)),
    "partial of a partial": lambda: functools.partial(functools.partial(scaled, scale=torch.ones(3))),
    "partial of an object": lambda: functools.partial(Plain()),
}


@pytest.mark.parametrize("make", LOSSES_WITH_TENSORS.values(), ids=LOSSES_WITH_TENSORS)
def test_the_tensors_of_a_loss_go_where_the_logits_are(make):
    rule = loss_rule(Classifier(), make())
    batch = class_batch()
    rule.total(Classifier(), batch)
    held = list(tensors_in(rule.call))
    assert held
    assert {"cpu"} == {tensor.device.type for tensor in held}
    there = {name: value.to("meta") for name, value in batch.items()}
    assert "meta" == rule.total(Classifier().to("meta"), there).device.type
    assert {"meta"} == {tensor.device.type for tensor in tensors_in(rule.call)}


def test_a_configured_loss_is_called_with_its_tensors_where_the_logits_are():
    seen = []

    def function(logits, labels, weight=None, reduction="mean"):
        seen.append(weight.device.type)
        return logits.sum()

    rule = loss_rule(Classifier(), Configured(function, weight=torch.ones(3)))
    rule.total(Classifier().to("meta"), {name: value.to("meta") for name, value in class_batch().items()})
    assert ["meta"] == seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_class_weights_meet_logits_in_float32(dtype):
    model, batch = Classifier().to(dtype), class_batch()
    batch["x"] = batch["x"].to(dtype)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    total = loss_rule(model, loss_fn).total(model, batch)
    expected = nn.CrossEntropyLoss(weight=loss_fn.weight, reduction="sum")(model(batch["x"]).float(), batch["labels"])
    assert torch.float32 is total.dtype
    assert torch.equal(expected, total)


class Column(nn.Module):
    """A regression whose predictions keep an axis of one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def log_cosh(logits, labels, reduction="mean"):
    values = torch.log(torch.cosh(logits - labels))
    return values.sum() if reduction == "sum" else values.mean()


def divided(logits, labels, num_items_in_batch=None):
    return (logits - labels).abs().sum() / (num_items_in_batch or len(labels))


def squeezes(logits, labels, reduction="mean"):
    return F.mse_loss(logits.squeeze(-1), labels, reduction=reduction)


def ranked(logits, labels, reduction="mean"):
    """Reads the axis of one: it cannot use logits of the shape of the labels."""
    values = (logits[:, 0] - labels) ** 2
    return values.sum() if reduction == "sum" else values.mean()


PAIRING = {
    **{kind.__name__: kind() for kind in (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss)},
    "mse_loss": F.mse_loss,
    "a partial": functools.partial(F.huber_loss, delta=2.0),
    "own": log_cosh,
    "own, divided": divided,
}


@pytest.mark.filterwarnings("error:Using a target size")
@pytest.mark.parametrize("columns", [1, 0])
@pytest.mark.parametrize("name", PAIRING)
def test_a_loss_that_pairs_each_prediction_with_every_label_is_refused(name, columns):
    batch = {"x": torch.randn(8, 4), "labels": torch.rand(8, *[1] * (1 - columns))}
    model = Column() if columns else nn.Sequential(Column(), nn.Flatten(0))
    with pytest.raises(TrainingError, match=r"\[FG869\].*\(8, 1\)|\[FG869\].*\(8,\)"):
        loss_rule(model, PAIRING[name]).total(model, batch if columns else (batch["x"], batch["labels"]))


def last(logits, labels, reduction="mean"):
    """Takes the last axis away: of logits in the shape of the labels it would take the rows."""
    return F.mse_loss(logits[..., 0], labels, reduction=reduction)


def summed(logits, labels, num_items_in_batch=None):
    return ((logits.sum(-1) - labels) ** 2).sum() / (num_items_in_batch or len(labels))


def test_a_function_that_exchanges_axes_is_not_refused():
    def exchanges(logits, labels, reduction="mean"):
        values = (logits - labels.transpose(1, 2)).square().sum(dim=(1, 2))
        return values.sum() if reduction == "sum" else values.mean()

    model, batch = nn.Identity(), (torch.randn(4, 3, 2), torch.randn(4, 2, 3))
    wanted = (batch[0] - batch[1].transpose(1, 2)).square().sum()
    assert torch.allclose(wanted, loss_rule(model, exchanges).total(model, batch))


@pytest.mark.parametrize("loss", [squeezes, ranked, last, summed], ids=lambda loss: loss.__name__)
def test_a_function_that_brings_shapes_together_itself_is_not(loss):
    model = Column()
    batch = {"x": torch.randn(8, 4), "labels": torch.rand(8)}
    wanted = F.mse_loss(model(batch["x"]).squeeze(-1), batch["labels"], reduction="sum")
    assert torch.allclose(wanted, loss_rule(model, loss).total(model, batch, denom=8))


def test_one_row_has_no_pairs_that_could_be_wrong_for_a_function_of_the_user():
    model = Column()
    batch = {"x": torch.randn(1, 4), "labels": torch.rand(1)}
    wanted = (model(batch["x"]).squeeze(-1) - batch["labels"]).abs().sum()
    assert torch.allclose(wanted, loss_rule(model, divided).total(model, batch, denom=1))


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(), F.l1_loss, log_cosh, divided])
def test_targets_under_another_name_are_missed_by_name(loss):
    batch = {"x": torch.randn(8, 4), "target": torch.rand(8)}
    with pytest.raises(TrainingError, match=r"FG808.*no labels \(found: x, target\)") as caught:
        loss_rule(Column(), loss).total(Column(), batch)
    assert "name the column of targets 'labels'" in caught.value.hint


def test_a_loss_of_logits_alone_needs_no_labels():
    def spread(logits, reduction="mean"):
        return logits.square().sum() if reduction == "sum" else logits.square().mean()

    model, x = Column(), torch.randn(8, 4)
    assert torch.allclose(model(x).square().sum(), loss_rule(model, spread).total(model, {"x": x}))
