"""The host decides on masks: no bit of the logits changes, no tensor is read, and a plain batch has no mask at all."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
)

from forgather.ml.attention_inputs import AttentionInputs, padded_rows, why_left_alone
from forgather.ml.documents import Documents
from forgather.ml.model_inputs import DOCUMENTS, ModelInputs, inputs_of
from forgather.ml.strategy.pipeline.split import plan_split
from forgather.ml.strategy.pipeline.stage import make_stage
from forgather.ml.strategy.pipeline.trace import on_meta_device
from tests.ml.host_reads import HostReads
from tests.ml.packed_rows import VOCAB
from tests.ml.pipeline.models import transformer
from tests.ml.test_documents import MODELS, SIZES, Wrapper
from tests.ml.test_documents import make as causal

ROWS, LENGTH = 3, 12
IDS = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(IDS)
RIGHT, LEFT = ONES.clone(), ONES.clone()
RIGHT[1, 8:], LEFT[2, :3] = 0, 0
PACKED = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(ROWS, -1)
BATCHES = {
    "no mask": {},
    "ones": {"attention_mask": ONES},
    "padded right": {"attention_mask": RIGHT},
    "padded left": {"attention_mask": LEFT},
    "packed": {"position_ids": PACKED},
    "packed, ones": {"position_ids": PACKED, "attention_mask": ONES},
}


def make(name, attention):
    if name in MODELS:
        return causal(name, attention)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    if name == "t5":
        model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    else:
        config = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        model = BertForMaskedLM(BertConfig(**config, num_attention_heads=2)).eval()
    model.set_attn_implementation(attention)
    return model


def batch_of(name, kind):
    decoder = {"decoder_input_ids": IDS.flip(1)} if name == "t5" else {}
    return {"input_ids": IDS, **decoder, **BATCHES[kind]}


def before(model, prepared):
    """The logits with transformers' own detection, which is in force outside of `ModelInputs.call`."""
    return model(**inputs_of(prepared), use_cache=False).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*MODELS, "t5"])
def test_no_bit_differs_and_nothing_is_read(name, attention):
    model = make(name, attention)
    inputs = ModelInputs(model)
    kinds = [kind for kind in BATCHES if name != "t5" or "packed" not in kind]
    with torch.no_grad():
        for kind in kinds:
            prepared = inputs.prepared(batch_of(name, kind))
            with HostReads() as reads:
                actual = inputs.call(model, prepared).logits
            assert torch.equal(before(model, prepared), actual), kind
            assert 0 == reads.count, kind


def test_an_encoder_gets_the_masks_that_it_had():
    model = make("bert", "sdpa")
    inputs = ModelInputs(model)
    for kind in ("no mask", "ones", "padded right", "padded left"):
        prepared = inputs.prepared(batch_of("bert", kind))
        expected = model(**inputs_of(prepared)).logits
        assert torch.equal(expected, inputs.call(model, prepared).logits), kind


def test_transformers_reads_where_nobody_answers():
    """What the answers are for, and that a wrong answer would be seen by the tests here."""
    model = causal()
    counts = {}
    for kind in ("no mask", "padded right", "packed"):
        prepared = ModelInputs(model).prepared(batch_of("llama", kind))
        with HostReads() as reads, torch.no_grad():
            expected = before(model, prepared)
        counts[kind] = reads.count
    assert {"no mask": 1, "padded right": 2, "packed": 1} == counts
    wrong = {**prepared, DOCUMENTS: Documents(None, (ROWS, LENGTH), padded_rows=())}
    assert 1e-3 < (ModelInputs(model).call(model, wrong).logits - expected).abs().max()


def masks_of_graphs(*kinds):
    """Compiles a whole model; returns the elements of the largest mask of each graph, in the order of compilation."""
    found = []

    def backend(graph, _):
        values = (node.meta.get("example_value") for node in graph.graph.nodes)
        masks = [value.numel() for value in values if isinstance(value, torch.Tensor) and value.dtype is torch.bool]
        found.append(max(masks, default=0))
        return graph.forward

    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))
    torch._dynamo.reset()
    compiled, inputs = torch.compile(model, backend=backend), ModelInputs(model)
    with torch.no_grad():
        for kind in kinds:
            prepared = inputs.prepared(batch_of("llama", kind))
            torch.testing.assert_close(before(model, prepared), inputs.call(compiled, prepared).logits)
    torch._dynamo.reset()
    return found


def test_a_plain_batch_has_no_mask_in_a_model_that_is_compiled_whole():
    # One graph for both plain batches: a mask that is all ones is not passed on. Packed rows are compiled once.
    assert [0, ROWS * LENGTH * LENGTH] == masks_of_graphs("no mask", "packed", "ones", "packed")


@pytest.mark.matrix
def test_without_answers_a_compiled_model_has_a_mask(monkeypatch):
    monkeypatch.setattr(AttentionInputs, "in_force", lambda *_: torch.no_grad())
    assert [ROWS * LENGTH * LENGTH] == masks_of_graphs("no mask")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_why_a_model_keeps_the_detection_of_transformers():
    class Own(LlamaForCausalLM):
        pass

    torch.manual_seed(0)
    prompts = get_peft_model(causal(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    lora = get_peft_model(causal(), LoraConfig(r=2, target_modules=["q_proj"]))
    xlm = XLMWithLMHeadModel(XLMConfig(vocab_size=VOCAB, emb_dim=16, n_layers=1, n_heads=2))
    assert None is why_left_alone(causal()) is why_left_alone(lora)
    assert "puts tokens in front of each row" in why_left_alone(prompts)
    assert "Own is not a class of transformers" in why_left_alone(Own(MODELS["llama"][1]))
    assert "Wrapper is not a model of transformers" in why_left_alone(Wrapper())
    assert "not measured that XLMWithLMHeadModel" in why_left_alone(xlm)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_and_a_model_left_alone_compute_what_they_did():
    lora = get_peft_model(causal(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    for model in (lora, Wrapper().inner):
        inputs = ModelInputs(model)
        prepared = inputs.prepared(batch_of("llama", "packed, ones"))
        with HostReads() as reads, torch.no_grad():
            actual = inputs.call(model, prepared).logits
        assert 0 == reads.count
        assert torch.equal(before(model, prepared), actual)


def test_rows_know_whether_they_are_padded_or_packed():
    documents = ModelInputs(causal()).prepared(batch_of("llama", "padded right"))[DOCUMENTS]
    assert ((False, True, False), True) == (documents.padded_rows, documents.are_padded)
    assert (False, True) == (documents[:1].are_padded, documents[1:2].are_padded)
    positions = torch.stack([torch.arange(LENGTH), PACKED[0]])
    documents = Documents(positions, (2, LENGTH))
    assert (None, True) == (documents.are_padded, documents.are_packed)
    assert (False, True) == (documents[:1].are_packed, documents[1:].are_packed)
    assert None is padded_rows({"attention_mask": torch.ones(1, 1, 2, 2)})
    assert None is padded_rows({"attention_mask": ONES.to("meta")})


def test_stages_of_a_pipeline_read_nothing():
    model = transformer("qwen2", attn_implementation="sdpa")
    plan = plan_split(on_meta_device(model), {"layer.1": "end", "layer.3": "end"}, 3)
    stages = [make_stage(model, plan, index) for index in range(3)]
    inputs = ModelInputs(model)
    for kind in ("no mask", "ones", "padded right", "packed"):
        prepared = inputs.prepared({**batch_of("llama", kind), "input_ids": IDS % 20})
        keywords = {n: v for n, v in inputs_of(prepared).items() if n != "input_ids" and v is not None}
        outputs = []
        for documents in (None, prepared[DOCUMENTS]):
            states = prepared["input_ids"]
            with HostReads() as reads, torch.no_grad():
                for stage in stages:
                    stage._leak_checked, stage.documents = True, documents
                    states = stage(states, **keywords)
            outputs.append(states)
        assert torch.equal(*outputs), kind
        assert 0 == reads.count, kind
