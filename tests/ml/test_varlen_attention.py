"""Packed rows by the lengths of their documents: each document is computed as if it were alone, and no mask is made."""

import copy
import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_flash_attention_utils

from forgather.errors import TrainingError
from forgather.ml.model_inputs import ModelInputs
from forgather.ml.varlen_attention import VARLEN, expecting_borders, flash_attention, varlen_attention
from tests.ml.packed_rows import leak, two_documents
from tests.ml.test_attention_inputs import IDS, LENGTH, PACKED, ROWS, batch_of, before
from tests.ml.test_documents import MODELS, RECOMPUTED, make, train_once


class LargestMask(TorchDispatchMode):
    """The number of elements of the largest tensor of booleans."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is torch.bool:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("name", MODELS)
def test_each_document_is_computed_as_if_it_were_alone(name):
    model = make(name, VARLEN)
    inputs = ModelInputs(model)
    with torch.no_grad():
        packed = inputs.call(model, inputs.prepared({"input_ids": IDS, "position_ids": PACKED})).logits
        plain = make(name, "sdpa")
        for part in (slice(0, 5), slice(5, LENGTH)):
            alone = plain(IDS[:, part], use_cache=False).logits
            torch.testing.assert_close(alone, packed[:, part], atol=1e-6, rtol=0)
        # Rows of which only one is packed.
        positions = torch.cat([PACKED[:1], torch.arange(LENGTH).expand(ROWS - 1, -1)])
        mixed = inputs.call(model, inputs.prepared({"input_ids": IDS, "position_ids": positions})).logits
        torch.testing.assert_close(packed[:1], mixed[:1], atol=1e-6, rtol=0)
        torch.testing.assert_close(plain(IDS, use_cache=False).logits[1:], mixed[1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("settings", [{}, RECOMPUTED], ids=["", "recomputed"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_training_gives_the_weights_of_a_training_with_masks(name, settings, tmp_path):
    trained = [
        train_once(two_documents(1), tmp_path, functools.partial(make, name, attention), **settings)["after"]
        for attention in ("sdpa", VARLEN)
    ]
    for expected, actual in zip(*trained, strict=True):
        torch.testing.assert_close(expected, actual, atol=1e-6, rtol=0)
    assert leak(lambda rows: train_once(rows, tmp_path, functools.partial(make, name, VARLEN), **settings)) <= 1e-6


def _dense(query, key, value, scale, visible):
    """Attention by its definition, of (N, H, K) and (N, G, K)."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = torch.einsum("qhk,shk->hqs", query, key) * scale
    return torch.einsum("hqs,shk->qhk", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """What the library FlashAttention computes for rows of one document."""
    borders = torch.arange(q.shape[0] + 1) * q.shape[1]
    flat = (tensor.flatten(0, 1) for tensor in (q, k, v))
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    return flash_attn_varlen_func(*flat, borders, borders, q.shape[1], k.shape[1], **options).view(q.shape)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """What the library FlashAttention computes for documents one after the other."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    places = torch.arange(q.shape[0])
    number = torch.bucketize(places, cu_seqlens_q, right=True)
    distance = places[:, None] - places[None, :]
    visible = (number[:, None] == number[None, :]) & (distance >= 0 if causal else True)
    if window_size[0] >= 0:
        visible &= distance <= window_size[0]
    return _dense(q, k, v, softmax_scale or q.shape[-1] ** -0.5, visible)


@pytest.fixture
def flash_library(monkeypatch):
    """The library, which needs a GPU, as functions of its signatures."""
    functions = (flash_attn_func, flash_attn_varlen_func, None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_flash_attention_of_transformers_gets_the_borders_of_several_rows(name, flash_library):
    plain, flash = make(name, "sdpa"), make(name, "sdpa")
    flash.config = copy.deepcopy(flash.config)
    for part in flash.modules():
        if hasattr(part, "config"):
            part.config = flash.config
    flash.config._attn_implementation = "flash_attention_2"
    inputs = ModelInputs(flash)
    positions = torch.cat([PACKED[:1], torch.arange(LENGTH).expand(ROWS - 1, -1)])
    for given in (PACKED, positions):
        batch = {"input_ids": IDS, "position_ids": given, "attention_mask": torch.ones_like(IDS)}
        prepared = inputs.prepared(batch)
        with torch.no_grad():
            found = inputs.call(flash, prepared).logits
            of_sdpa = ModelInputs(plain)
            expected = of_sdpa.call(plain, of_sdpa.prepared(batch)).logits
        torch.testing.assert_close(expected, found, atol=1e-6, rtol=0)


def test_a_flash_attention_without_borders_is_refused_where_they_are_expected():
    state = torch.ones(1, 1, 2, 8)
    with expecting_borders(), pytest.raises(TrainingError, match="borders") as caught:
        flash_attention(torch.nn.Identity(), state, state, state, None)
    assert "FG714" == caught.value.code


def test_packed_rows_have_no_mask():
    found = {}
    for attention in ("sdpa", VARLEN):
        model = make("llama", attention)
        inputs = ModelInputs(model)
        prepared = inputs.prepared(batch_of("llama", "packed"))
        with LargestMask() as mask, torch.no_grad():
            inputs.call(model, prepared)
        found[attention] = mask.elements
    # Of varlen, one flag a token is left.
    assert {"sdpa": ROWS * LENGTH * LENGTH, VARLEN: ROWS * LENGTH} == found


@pytest.mark.parametrize("kind", ["no mask", "ones", "padded right", "padded left"])
def test_batches_of_one_document_a_row_are_those_of_sdpa(kind):
    model = make("mistral", VARLEN)
    inputs = ModelInputs(model)
    with torch.no_grad():
        prepared = inputs.prepared(batch_of("mistral", kind))
        assert torch.equal(before(make("mistral", "sdpa"), prepared), inputs.call(model, prepared).logits)


def test_a_model_that_keeps_the_borders_to_itself_is_refused():
    layer, rows = torch.nn.Identity(), [torch.ones(1, 2, 3, 4)] * 3
    with expecting_borders(), pytest.raises(TrainingError, match="does not pass their borders") as excinfo:
        varlen_attention(layer, *rows, None)
    assert "FG714" == excinfo.value.code
    assert (1, 3, 2, 4) == varlen_attention(layer, *rows, None)[0].shape


def test_the_kernel_of_a_gpu_is_called_with_the_borders():
    """Without a GPU, shapes alone are known."""
    with FakeTensorMode():
        query = torch.empty(2, 4, 6, 8, device="cuda", dtype=torch.bfloat16)
        key = torch.empty(2, 2, 6, 8, device="cuda", dtype=torch.bfloat16)
        borders = torch.empty(4, dtype=torch.int32, device="cuda")
        output, _ = varlen_attention(torch.nn.Identity(), query, key, key, None, cu_seq_lens_q=borders, max_length_q=6)
    assert ((2, 6, 4, 8), "cuda") == (tuple(output.shape), output.device.type)
