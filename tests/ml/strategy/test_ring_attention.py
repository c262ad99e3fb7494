"""Rows that are divided by positions over a ring give the losses and gradients of whole rows, or are refused."""

import contextlib
import functools
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import transformers
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer
from torch.nn import functional as F

import forgather.ml.context_ring as context_ring
import forgather.ml.ring_attention as ring_module
from forgather.errors import DistributedError, TrainingError
from forgather.ml import AccelTrainingArguments
from forgather.ml.losses import loss_rule
from forgather.ml.ring_attention import kernel_of, own_positions, piece_multiple, ring_attention, torch_module
from forgather.ml.strategy.context_parallel import SequenceParts, proven_families, refuse_model
from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.ring_models import ring_families, ring_obstacle
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.context_models import FAMILIES, causal_model_of, model_of, rows_of_kind
from tests.ml.strategy.divided_rows import distance

KINDS = ("whole", "uneven", "padded")
METHODS = ("allgather", "alltoall")
CPU = torch.device("cpu")


def _distance(family, kind, rotate_method="allgather", damage=contextlib.nullcontext, **settings):
    model = causal_model_of(family, **settings)
    return distance(model, rows_of_kind(kind), damage, method="ring", rotate_method=rotate_method)


def _distances(cases):
    torch.set_num_threads(1)
    return {case: _distance(*case) for case in cases}


CASES = [(family, kind, method) for family in sorted(ring_families()) for kind in KINDS for method in METHODS]
_QUICK = {
    2: [("llama", "uneven", "alltoall"), ("gpt2", "padded", "allgather"), ("gemma", "whole", "allgather")],
    4: [("llama", "padded", "alltoall"), ("qwen3", "whole", "allgather")],
}


@pytest.mark.parametrize(
    ("size", "cases"),
    thinned([*_QUICK.items(), (2, CASES), (4, CASES)], lambda size, cases: cases is not CASES),
    ids=["2", "4", "2, all", "4, all"],
)
def test_rows_on_a_ring_are_equal_to_whole_rows(size, cases):
    for found in run_ranks(size, _distances, cases, start_group=True, timeout=240):
        # The norms of Gemma add float32 numbers.
        assert {} == {
            case: value for case, value in found.items() if not value <= (1e-8 if case[0] == "gemma" else 1e-14)
        }


def _three_heads():
    model = causal_model_of("llama", num_attention_heads=3, num_key_value_heads=1)
    rule = loss_rule(model)
    refuse_model(model, rule, size=2, method="ring")
    with pytest.raises(DistributedError, match="FG758.*3 attention heads"):
        refuse_model(model, rule, size=2)
    return distance(model, rows_of_kind("whole"), method="ring")


def test_heads_need_not_be_divided():
    assert max(run_ranks(2, _three_heads, start_group=True)) < 1e-14


@contextlib.contextmanager
def _replaced(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _in_order(length, rank, size):
    return torch.arange(length).chunk(size)[rank]


def _positions_in_order():
    """A negative control: the positions of a rank follow one another, and torch's ring believes that they do not."""
    return _replaced(context_ring, "own_positions", _in_order)


def _heads_not_added():
    """A negative control: only the first query head that shares keys gives them a gradient."""
    return _replaced(ring_module, "_added", lambda gradient, per_key: gradient[:, ::per_key].contiguous())


def _padding_moved():
    """A negative control: tokens before the padding do not see where they are."""
    inner = context_ring.Ring.own_positions
    return _replaced(context_ring.Ring, "own_positions", lambda ring, length: inner(ring, length).flip(0))


def _controls():
    damaged = (_positions_in_order, _heads_not_added, _padding_moved)
    # Otherwise the comparison after the first attention finds the second one.
    with _replaced(context_ring.Ring, "_compare", lambda ring: None):
        return [_distance("llama", "whole", damage=damage) for damage in damaged]


def test_other_positions_and_lost_gradients_would_be_seen():
    found = run_ranks(2, _controls, start_group=True)[0]
    assert all(value > 1e-3 for value in found), found


def _low_precision():
    torch.set_num_threads(1)
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    mine = own_positions(32, rank, size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        draws = torch.Generator().manual_seed(1)
        whole = [torch.randn(2, heads, 32, 16, generator=draws).to(dtype).requires_grad_() for heads in (4, 2, 2)]
        expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True, scale=0.3)
        parts = [tensor.detach()[:, :, mine].requires_grad_() for tensor in whole]
        output = ring_attention(*parts, group=dist.group.WORLD, rotate_method="alltoall", scale=0.3)
        expected.float().square().sum().backward()
        output.float().square().sum().backward()
        pairs = [
            (output.detach(), expected.detach()),
            *((part.grad, tensor.grad) for part, tensor in zip(parts, whole, strict=True)),
        ]
        found[dtype] = max(
            float((one.float() - other.float()[:, :, mine]).norm() / other.float().norm()) for one, other in pairs
        )
    return found


def test_attention_alone_is_equal_but_for_rounding():
    for found in run_ranks(4, _low_precision, start_group=True):
        assert found[torch.float32] < 1e-6
        assert found[torch.bfloat16] < 1e-2
        assert found[torch.float16] < 2e-3


def _bytes_sent(method, heads=4, groups=2, positions=8, channels=16):
    sent = []
    inner = {name: getattr(functional_collectives, name) for name in ("all_gather_single", "permute_tensor")}

    def counting(name, tensor, *args, **kwargs):
        copies = dist.get_world_size() - 1 if name == "all_gather_single" else 1
        sent.append(tensor.numel() * tensor.element_size() * copies)
        return inner[name](tensor, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in inner:
            stack.enter_context(_replaced(functional_collectives, name, functools.partial(counting, name)))
        shapes = [(1, number, positions, channels) for number in (heads, groups, groups)]
        parts = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        output = ring_attention(*parts, group=dist.group.WORLD, rotate_method=method, scale=None)
        forward = sum(sent)
        output.float().sum().backward()
    return forward, sum(sent) - forward


def _bytes_of_methods():
    return [_bytes_sent(method) for method in METHODS]


def test_a_rank_sends_keys_and_values_and_their_gradients_in_float32():
    keys_and_values = 2 * 2 * 8 * 16
    size = 3
    forward = (size - 1) * keys_and_values * 2
    for found in run_ranks(size, _bytes_of_methods, start_group=True):
        assert [(forward, forward + size * keys_and_values * 4)] * 2 == found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_positions_are_those_of_torchs_balancer(size):
    indices = _HeadTailLoadBalancer(24, size, "cpu")._generate_indices()[0].chunk(size)
    for rank in range(size):
        assert indices[rank].tolist() == own_positions(24, rank, size).tolist()


def _refused_rows():
    model = causal_model_of("llama")
    rule = loss_rule(model)
    parts = SequenceParts(dist.group.WORLD, CPU, method="ring")
    padded = rows_of_kind("padded")
    labeled = {**padded, "labels": padded["input_ids"]}
    messages = []
    for batch in (rows_of_kind("packed"), rows_of_kind("padded first"), labeled):
        with pytest.raises(TrainingError, match="FG794") as error:
            parts.part(rule.prepared(batch))
        messages.append(str(error.value))
    return messages


def test_rows_of_another_mask_are_refused():
    packed, first, labeled = run_ranks(1, _refused_rows, start_group=True)[0]
    assert "several documents" in packed
    assert "hides tokens before others" in first
    assert "padding_side: right" in first
    assert "label padding -100" in labeled


@pytest.mark.parametrize(
    ("model", "words"),
    (
        (lambda: model_of("gemma2", "eager"), "family 'gemma2'"),
        (lambda: model_of("mistral"), "sliding_window 4 .*sliding_window: null"),
        (lambda: model_of("qwen2"), "use_sliding_window True .*use_sliding_window: false"),
        (lambda: causal_model_of("gpt2", attn_pdrop=0.1), "attn_pdrop 0.1 .*attn_pdrop: 0.0"),
        (lambda: model_of("llama", "eager"), "attn_implementation is 'eager'.*attn_implementation: sdpa"),
        (lambda: model_of("llama", "varlen"), "attn_implementation is 'varlen'"),
    ),
)
def test_models_with_other_attention_are_refused(model, words):
    made = model()
    with pytest.raises(DistributedError, match=rf"(?s)FG759.*{words.replace(' .*', '.*')}"):
        refuse_model(made, loss_rule(made), size=2, method="ring")


def _refused_calls():
    """What a model asks for that its configuration did not show is refused, and nothing is left out."""
    ring = context_ring.Ring(dist.group.WORLD, CPU)
    tensor, module = torch.zeros(1, 2, 4, 8), torch.nn.Identity()
    asked = [
        {"attention_mask": torch.ones(1, 1, 4, 4)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"sliding_window": 4},
        {"softcap": 30.0},
    ]
    for given in asked:
        with pytest.raises(DistributedError, match="FG759"):
            ring._attend(module, tensor, tensor, tensor, **{"attention_mask": None, **given})
    with pytest.raises(DistributedError, match="FG759.*sliding window"):
        context_ring._no_mask(mask_function=lambda *given: True)
    with pytest.raises(DistributedError, match="FG759.*'flex_attention'"):
        context_ring._refuse_implementation("flex_attention")
    assert ring.num_calls == 0


def test_attention_beyond_the_causal_one_is_refused_when_it_is_asked_for():
    run_ranks(1, _refused_calls, start_group=True)


def test_every_proven_family_is_compared_and_has_the_defaults_of_transformers():
    table = {family: FAMILIES[family]() for family in ring_families()}
    assert ring_families() < proven_families()
    assert {"gemma2", "gemma3"} == proven_families() - ring_families()
    for family, small in table.items():
        usual = type(small)()
        obstacle = ring_obstacle(family, {})
        assert obstacle == ring_obstacle(family, vars(usual)), family
        assert (obstacle is None) == (family not in ("gpt2", "mistral"))


def _with_wrong_scale(kernel):
    """A kernel that computes what no run may use: the products of queries and keys have another scale."""

    def forward(*tensors, scale=None, **settings):
        return kernel.forward(*tensors, scale=0.5, **settings)

    fields = {name: getattr(kernel, name) for name in kernel.__dataclass_fields__}
    return ring_module.Kernel(**{**fields, "forward": forward})


def _damaged_kernel():
    inner = ring_module.kernel_of
    with (
        _replaced(ring_module, "kernel_of", lambda *given: _with_wrong_scale(inner(*given))),
        pytest.raises(DistributedError, match="FG795.*differs from attention over whole rows") as error,
    ):
        _distance("llama", "whole")
    return str(error.value)


def test_a_kernel_that_computes_something_else_is_refused_on_every_rank():
    for message in run_ranks(2, _damaged_kernel, start_group=True):
        assert "write context_parallel_method: ulysses" in message


def _draws():
    torch.manual_seed(4)
    _distance("llama", "whole")
    return float(torch.rand(()))


def test_the_comparison_draws_no_numbers_of_the_run():
    torch.manual_seed(4)
    model = causal_model_of("llama")
    expected = float(torch.rand(()))
    assert model is not None
    assert {expected} == set(run_ranks(2, _draws, start_group=True))


def test_devices_without_a_kernel_are_refused(monkeypatch):
    assert piece_multiple("cpu") == 1
    assert piece_multiple("cuda") == 32
    for dtype in (torch.bfloat16, torch.float32):
        kernel = kernel_of("cuda", dtype)
        names = {argument.name for argument in kernel.backward._schema.arguments}
        assert {kernel.gradient, *kernel.kept, *kernel.backward_settings} <= names
        assert {*kernel.settings} <= {argument.name for argument in kernel.forward._schema.arguments}
    for kind, dtype in (("cuda", torch.float64), ("mps", torch.float32)):
        with pytest.raises(DistributedError, match=f"FG795.*{dtype} on {kind}"):
            kernel_of(kind, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(ring_module, "kernel_of", functools.partial(_cuda_kernel, kernel_of))
        with pytest.raises(DistributedError, match="FG795.*multiple of 4 channels and pieces of a multiple of 32"):
            ring_module._fitting_kernel(torch.zeros(1, 2, 12, 8))


def _cuda_kernel(inner, device_type, dtype):
    return inner("cuda", dtype)


def _ring_over_a_mesh(mesh, seq_dim, op):
    """Has the parameters of an earlier version of torch."""


@pytest.mark.parametrize("names", [{}, {"_templated_ring_attention": _ring_over_a_mesh}])
def test_torch_without_the_known_ring_is_refused(monkeypatch, names):
    found = {**{name: getattr(torch_module(), name) for name in ring_module._USED}, **names} if names else {}
    monkeypatch.setattr(ring_module, "import_module", lambda name: types.SimpleNamespace(**found))
    torch_module.cache_clear()
    with pytest.raises(DistributedError, match="FG795.*has no _templated_ring_attention"):
        torch_module()
    monkeypatch.undo()
    torch_module.cache_clear()
    assert torch_module()._cp_options is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    (
        ({"context_parallel_method": "ring"}, "context_parallel_size is 1"),
        ({"context_parallel_method": "rings", "context_parallel_size": 2}, "context_parallel_method"),
        (
            {"context_parallel_method": "ring", "context_parallel_size": 2, "context_parallel_rotate_method": "p2p"},
            "context_parallel_rotate_method",
        ),
    ),
)
def test_settings_that_do_not_fit_are_refused(settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        AccelTrainingArguments(output_dir=str(tmp_path), **settings)


CONFIG = """
main: !singleton:forgather.ml:AccelTrainer
    model_init: !partial:forgather.ml.models:from_config
        config: !singleton:transformers:{config}
        attn_implementation: {attention}
    args: !singleton:forgather.ml:AccelTrainingArguments
        output_dir: out
        context_parallel_size: 3
        context_parallel_method: ring
    {part}_dataset: !singleton:forgather.ml.data:tokenize
        dataset: []
        tokenizer: ~
        block_size: 16
"""


@pytest.mark.parametrize(
    ("config", "attention", "rows", "expected"),
    (
        ("LlamaConfig { num_attention_heads: 4 }", "~", "document_boundaries: false", None),
        ("MistralConfig { sliding_window: ~ }", "sdpa", "document_boundaries: false", None),
        ("MistralConfig { num_hidden_layers: 2 }", "~", "document_boundaries: false", ("FG759", "sliding_window 4096")),
        ("GPT2Config { n_layer: 2 }", "~", "document_boundaries: false", ("FG759", "attn_pdrop 0.1")),
        ("Gemma2Config { num_hidden_layers: 2 }", "~", "document_boundaries: false", ("FG759", "family 'gemma2'")),
        ("LlamaConfig { attention_dropout: 0.1 }", "~", "document_boundaries: false", ("FG759", "attention_dropout")),
        ("LlamaConfig { num_hidden_layers: 2 }", "eager", "document_boundaries: false", ("FG759", "'eager'")),
        ("LlamaConfig { num_hidden_layers: 2 }", "~", "{}", ("FG794", "train_dataset hold several")),
        ("LlamaConfig { num_hidden_layers: 2 }", "~", "eval", ("FG794", "eval_dataset hold several")),
    ),
)
def test_the_check_finds_what_a_ring_does_not_compute(tmp_path, config, attention, rows, expected):
    (tmp_path / "meta.yaml").write_text("name: Ring\n")
    folder = tmp_path / "templates" / "configs"
    folder.mkdir(parents=True)
    text = CONFIG.format(config=config, attention=attention, part="train")
    if rows == "eval":
        text += CONFIG[CONFIG.index("    {part}_dataset") :].format(part="eval")
        text = text.replace("block_size", "document_boundaries: false\n        block_size", 1)
    (folder / "long.yaml").write_text(text if rows in ("{}", "eval") else f"{text}        {rows}\n")
    findings = check_project(Project("long.yaml", str(tmp_path))).findings
    found = [(one.code, one.message) for one in findings if one.code in ("FG757", "FG758", "FG759", "FG794")]
    assert ([expected[0]] if expected else []) == [code for code, _ in found]
    assert expected is None or expected[1] in found[0][1]


def test_versions_of_transformers_have_the_causal_mask():
    assert context_ring.causal_mask_function is transformers.masking_utils.causal_mask_function
