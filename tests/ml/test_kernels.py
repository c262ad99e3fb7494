"""Custom kernels: used where they equal their reference, and replaced by it elsewhere; Liger's are refused by name."""

import logging

import pytest
import torch
from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml import kernels
from forgather.ml.kernels import custom_kernel, register_custom_kernel
from forgather.ml.liger import check_settings, compare_logits, logits_of_probe, use_liger_kernels
from tests.ml.fixtures import tiny_llama


def norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _fast_norm(x, weight, eps):
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(kernels, "_kernels", {})


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)


def _registered(name, kernel, reference=norm_reference, **words):
    return register_custom_kernel(name, reference=reference, **{"device_types": ("cpu",), **words})(kernel)


def _gradients(function, *inputs):
    weights = torch.arange(24.0).reshape(3, 8)
    return torch.autograd.grad((function(*inputs) * weights).sum(), inputs)


def test_a_kernel_is_used_where_it_equals_its_reference(inputs):
    calls = []
    norm = _registered("norm_used", lambda *args: calls.append(1) or _fast_norm(*args))
    torch.testing.assert_close(norm(*inputs), norm_reference(*inputs))
    assert norm.verdicts == {("cpu", "float32", "float32"): None}
    # Once for the comparison, and once for each call.
    norm(*inputs)
    assert 3 == len(calls)
    assert custom_kernel("norm_used") is norm
    for own, plain in zip(_gradients(norm, *inputs), _gradients(norm_reference, *inputs), strict=True):
        torch.testing.assert_close(own, plain, rtol=0, atol=0)
    assert torch.autograd.gradcheck(norm, [value.detach().double().requires_grad_() for value in inputs])


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (lambda x, weight, eps: x * weight, "gives results that differ from those of its reference by up to"),
        (lambda x, weight, eps: (x * weight)[:1], "gives results of torch.float32 [1, 8], its reference of"),
        (lambda x, weight, eps: 1 / 0, "failed with ZeroDivisionError (division by zero)"),
        (lambda x, weight, eps: norm_reference(x, weight, eps) * float("nan"), "differ from those of its reference"),
    ],
    ids=["other numbers", "other shape", "error", "nan"],
)
def test_a_wrong_kernel_is_replaced_and_named(kernel, told, inputs, caplog):
    norm = _registered("norm_wrong", kernel)
    with caplog.at_level(logging.WARNING):
        found = [norm(*inputs), norm(*inputs)]
    assert all(torch.equal(each, norm_reference(*inputs)) for each in found)
    assert [record.getMessage() for record in caplog.records if told in record.getMessage()]
    assert 1 == len(caplog.records)
    assert "its reference is used" in caplog.text


@pytest.mark.parametrize(
    "first", [torch.zeros(3, 8), torch.empty(0, 8), torch.full((3, 8), float("nan"))], ids=["zero", "empty", "nan"]
)
def test_a_call_that_would_not_show_a_wrong_kernel_decides_nothing(first, inputs):
    """An expert without tokens in the first batch, or a LoRA at its start, accepted any kernel for the whole run."""
    norm = _registered("norm_untold", lambda x, weight, eps: 5 * norm_reference(x, weight, eps))
    torch.testing.assert_close(norm(first, inputs[1]), norm_reference(first, inputs[1]), equal_nan=True)
    assert {} == norm.verdicts
    assert torch.equal(norm(*inputs), norm_reference(*inputs))


@pytest.mark.parametrize(
    "tail",
    [lambda x: x[:2], lambda x: x.double(), lambda x: 2 * x, lambda x: 1 / 0],
    ids="shape dtype numbers error".split(),
)
def test_a_kernel_that_is_wrong_for_another_length_is_replaced_there(tail, inputs):
    """As one in Triton that leaves out the rows behind the last whole block."""

    def blocks_of_three(x, weight, eps):
        found = norm_reference(x, weight, eps)
        return found if len(x) % 3 == 0 else tail(found)

    norm = _registered("norm_blocks", blocks_of_three)
    norm(*inputs)
    x, weight = torch.randn(4, 8), inputs[1]
    assert torch.equal(norm(x, weight), norm_reference(x, weight))


def test_kernels_are_compared_for_a_few_shapes_only():
    calls = []
    norm = _registered("norm_lengths", lambda *args: calls.append(1) or _fast_norm(*args))
    for length in range(1, 41):
        norm(torch.ones(length, 8), torch.ones(8))
    assert 40 + 16 == len(calls)


def _is_positive(x: Tensor) -> Tensor:
    return x > 0


def test_a_kernel_of_truth_values_that_differs_is_named_so(inputs, caplog):
    positive = _registered("positive", lambda x: x < 0, reference=_is_positive)
    assert torch.equal(positive(inputs[0]), inputs[0] > 0)
    assert "gives results that differ from those of its reference by up to 1 " in caplog.text


def test_a_backward_kernel_is_compared_too(inputs, caplog):
    def right(grads, x, weight, eps):
        return kernels.gradients_of(norm_reference, grads, (x, weight, eps))

    norm = _registered("norm_backward", _fast_norm)
    calls = []
    norm.backward(lambda *args: calls.append(1) or right(*args))
    own = _gradients(norm, *inputs)
    assert 2 == len(calls)
    norm.backward(lambda grads, x, weight, eps: [grads[0], None])
    caplog.clear()
    for found in (own, _gradients(norm, *inputs)):
        for one, plain in zip(found, _gradients(norm_reference, *inputs), strict=True):
            torch.testing.assert_close(one, plain)
    assert "gives gradients that differ" in caplog.text


def test_another_device_has_the_reference(inputs):
    norm = _registered("norm_elsewhere", lambda *args: 1 / 0, device_types=("cuda",))
    assert torch.equal(norm(*inputs), norm_reference(*inputs))
    assert {} == norm.verdicts


def test_a_kernel_works_compiled_and_without_memory(inputs):
    norm = _registered("norm_compiled", _fast_norm)
    compiled = torch.compile(lambda x, weight: norm(x, weight, eps=1e-5) * 2, fullgraph=True, backend="aot_eager")
    for own, plain in zip(_gradients(compiled, *inputs), _gradients(norm, *inputs), strict=True):
        torch.testing.assert_close(own, 2 * plain, rtol=1e-4, atol=1e-4)
    assert norm(torch.empty(2, 8, device="meta"), torch.empty(8, device="meta")).shape == (2, 8)
    torch.library.opcheck(torch.ops.forgather.norm_compiled.default, (*inputs, 1e-6))


def test_results_that_share_memory_with_the_inputs_are_copied():
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2

    twice = _registered("shared", both, both)
    x = torch.ones(2, requires_grad=True)
    first, second = twice(x)
    (first.sum() + second.sum()).backward()
    assert x.grad.tolist() == [3, 3]


def _unannotated(x):
    return x


def _of_a_list(xs: list[Tensor]) -> Tensor:
    return xs[0]


@pytest.mark.parametrize(
    ("name", "reference", "told"),
    [
        ("norm", None, "has no reference"),
        ("a b", norm_reference, "is no name of a custom kernel"),
        (7, norm_reference, "is no name of a custom kernel"),
        ("plain", _unannotated, "torch makes no operator of the reference of custom kernel 'plain'"),
        ("lists", _of_a_list, "has the argument 'Tensor[] xs'"),
    ],
)
def test_what_cannot_be_registered_is_refused(name, reference, told):
    with pytest.raises(TrainingError, match="(?s).") as caught:
        register_custom_kernel(name, reference=reference)(_fast_norm)
    assert "FG788" == caught.value.code
    assert told in caught.value.message


def test_names_belong_to_one_function():
    _registered("taken", _fast_norm)
    _registered("taken", _fast_norm)
    with pytest.raises(TrainingError, match="is registered already, by") as caught:
        _registered("taken", norm_reference)
    assert "FG788" == caught.value.code
    with pytest.raises(TrainingError, match="no custom kernel 'token' is registered") as caught:
        custom_kernel("token")
    assert ("FG789", True) == (caught.value.code, "taken" in caught.value.hint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Liger's kernels may be used where there is a GPU")
def test_liger_needs_a_gpu_but_a_plan_does_not(caplog):
    with pytest.raises(TrainingError, match="need a GPU with Triton") as caught:
        use_liger_kernels(tiny_llama(), settings={})
    assert "FG790" == caught.value.code
    with torch._subclasses.fake_tensor.FakeTensorMode():
        planned = nn.Linear(2, 2)
    use_liger_kernels(planned, settings={})
    assert "this plan is that of the model without them" in caplog.text


def test_settings_that_liger_would_skip_are_refused():
    known = {"rope": True, "rms_norm": True, "cross_entropy": False, "model": None}
    check_settings({"rope": False}, known)
    for name, told in (("ropes", "have no setting 'ropes'"), ("cross_entropy", "the loss rule computes the loss")):
        with pytest.raises(TrainingError, match=told) as caught:
            check_settings({name: True}, known)
        assert "FG790" == caught.value.code


def test_kernels_that_change_the_logits_are_an_error():
    model = tiny_llama()
    before = logits_of_probe(model)
    compare_logits(before, logits_of_probe(model))
    model.model.norm.weight.data *= 1.01
    with pytest.raises(TrainingError, match="the logits of a probe differ by") as caught:
        compare_logits(before, logits_of_probe(model))
    assert "FG791" == caught.value.code
    assert logits_of_probe(tiny_llama().to("meta")) is None


def test_a_kernel_without_a_module_is_named_in_the_refusal_of_another():
    scope = {}
    exec("def own(x): return x", scope)
    scope["own"].__module__ = None
    _registered("of_exec", scope["own"])
    with pytest.raises(TrainingError, match="registered already, by None.own"):
        _registered("of_exec", norm_reference)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_a_kernel_that_leaves_out_a_new_adapter_changes_the_logits_of_the_probe():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])).get_base_model()
    layer = model.model.layers[0].self_attn
    before, adapted = logits_of_probe(model), layer.q_proj
    assert not any(weight.any() for name, weight in model.named_parameters() if "lora_B" in name)
    layer.q_proj = adapted.base_layer
    with pytest.raises(TrainingError, match="the logits of a probe differ by"):
        compare_logits(before, logits_of_probe(model))


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _doubled_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 2


def _writes(x):
    return x.mul_(2).clone()


def test_a_kernel_that_writes_into_its_arguments_is_not_used_and_changes_none(caplog):
    value = torch.ones(3)
    kernel = _registered("writes", _writes, _doubled)
    assert [2.0] * 3 == kernel(value).tolist()
    assert [1.0] * 3 == value.tolist()
    assert "changes its argument 1" in caplog.text


@pytest.mark.parametrize("of", [0, 1])
def test_a_backward_pass_that_writes_into_its_arguments_is_not_used(caplog, of):
    value = torch.ones(3, requires_grad=True)
    kernel = _registered(f"writes_back_{of}", lambda x: x * 2, _doubled)
    kernel.backward(lambda grads, x: [(grads[0] * 2, (grads[0], x)[of].zero_())[0]])
    kernel(value).sum().backward()
    assert ([2.0] * 3, [1.0] * 3) == (value.grad.tolist(), value.tolist())
    assert f"changes its argument {of + 1}" in caplog.text


def test_a_list_in_place_of_one_tensor_is_a_difference(caplog):
    assert [2.0] == _registered("list", lambda x: [x * 2], _doubled)(torch.ones(1)).tolist()
    assert "gives list, its reference Tensor" in caplog.text


def test_outputs_of_a_kernel_may_share_memory():
    outputs = _registered("shares", lambda x: (x * 2,) * 2, _doubled_twice)(torch.ones(1, requires_grad=True))
    assert [[2.0], [2.0]] == [out.tolist() for out in outputs]


def test_a_kernel_that_later_gives_no_tensor_is_refused():
    results = iter([torch.full((1,), 2.0), None])
    with pytest.raises(TrainingError, match="None in place of a tensor"):
        _registered("later", lambda x: next(results), _doubled)(torch.ones(1))


def _nothing(x: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"name": "class"}, "no name"),
        ({"name": "é"}, "no name"),
        ({"name": "__init__"}, "Python's own"),
        ({"device_types": "cuda"}, "device_types='cuda'"),
        ({"device_types": None}, "device_types=None"),
        ({"device_types": ()}, "device_types="),
        ({"device_types": ("cdua",)}, "device_types="),
        ({"device_types": ("cpu", 3)}, "device_types="),
        ({"tolerance": 0.1}, "tolerance=0.1"),
        ({"tolerance": (float("inf"), 0.0)}, "tolerance="),
        ({"tolerance": (-1.0, 0.0)}, "tolerance="),
        ({"tolerance": (float("nan"), 0.0)}, "tolerance="),
        ({"kernel": None}, "cannot be called"),
        ({"reference": len}, "makes no operator"),
        ({"reference": _nothing}, "returns nothing"),
    ],
)
def test_what_cannot_be_a_kernel_is_refused_where_it_is_registered(words, told):
    with pytest.raises(TrainingError, match=told) as caught:
        _registered(**{"name": "k", "kernel": lambda x: x * 2, "reference": _doubled, **words})
    assert "FG788" == caught.value.code
    assert caught.value.hint


def test_names_of_kernels_and_of_their_gradients_are_kept_apart():
    _registered("twice", lambda x: x * 2, _doubled)
    with pytest.raises(TrainingError, match="'twice_backward' and 'twice'"):
        _registered("twice_backward", lambda x: x * 2, _doubled)


def test_a_backward_pass_that_is_no_function_is_refused():
    with pytest.raises(TrainingError, match="backward pass of custom kernel 'no_function' is 5"):
        _registered("no_function", lambda x: x * 2, _doubled).backward(5)
