"""The formulas of memory: against the papers they come from, and against numbers computed by hand."""

from dataclasses import replace

import pytest

from forgather.planner.formulas import Way, block_activations, flops, lora_parameters, memory, step_seconds
from forgather.planner.hardware import hardware
from forgather.planner.model_shapes import model_shape

GPT = model_shape("gpt2-xl")
LLAMA = model_shape("llama-2-7b")


def test_activations_of_a_gpt_block_are_those_of_the_paper():
    # The paper's activation is one operator; that of transformers' GPT-2 keeps three tensors more.
    block, tokens = replace(GPT.blocks[0], activation="gelu"), 1024
    # 34 s b h of Korthikanti et al., equation 1, without the scores of attention; the kernel keeps one number per head.
    kept = block_activations(block, tokens) - 4 * block.num_heads * tokens
    assert 34 * tokens * block.hidden_size == kept
    assert 3 * 2 * 4 * tokens * block.hidden_size == block_activations(GPT.blocks[0], tokens) - 4 * 25 * tokens - kept


def test_zero_divides_what_its_stages_say():
    count = LLAMA.parameters
    for stage, state in ((1, (2, 2, 12 / 8)), (2, (2, 2 / 8, 12 / 8)), (3, (2 / 8, 2 / 8, 12 / 8))):
        used = memory(LLAMA, Way(strategy="DeepSpeed", stage=stage, gpus=8, recompute=True))
        gathered = 2e9 if stage == 3 else 0
        # 16 bytes for each parameter on one device, as in figure 1 of Rajbhandari et al.
        assert pytest.approx([part * count for part in state]) == [
            used.parameters - gathered,
            used.gradients,
            used.optimizer,
        ]


def test_adam_without_mixed_precision_takes_16_bytes_for_each_parameter():
    used = memory(GPT, Way(dtype="fp32"))
    assert 16 * GPT.parameters == used.parameters + used.gradients + used.optimizer
    assert 0 == used.communication


def test_lora_of_rank_64_on_all_matrices_of_a_7b():
    # 32 blocks; q, k, v, o: 4 (4096 + 4096); gate, up, down: 3 (4096 + 11008).
    assert 32 * 64 * (4 * 8192 + 3 * 15104) == lora_parameters(LLAMA, 64)
    used = memory(LLAMA, Way(lora_rank=64, four_bit=True))
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    trained = lora_parameters(LLAMA, 64)
    assert pytest.approx(matrices * 4.127 / 8 + 4 * (LLAMA.parameters - matrices) + 4 * trained) == used.parameters
    assert 8 * trained == used.optimizer


def test_every_measure_against_memory_saves_some():
    way = Way(strategy="DeepSpeed", stage=2, gpus=4, micro_batch=4)
    peak = memory(LLAMA, way).peak
    for smaller in (
        {"recompute": True},
        {"micro_batch": 2},
        {"offload_optimizer": True},
        {"gpus": 8},
        {"tokens": 1024},
    ):
        assert memory(LLAMA, replace(way, **smaller)).peak < peak, smaller


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "gpt2-xl"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_peak_of_fsdp_is_that_of_its_largest_phase(name, stage, accumulation):
    for tokens in (64, 1024):
        for micro_batch in (1, 16):
            sizes = {"tokens": tokens, "micro_batch": micro_batch, "accumulation": accumulation}
            used = memory(model_shape(name), Way(strategy="FSDP", stage=stage, gpus=64, **sizes))
            kept = used.gradients if accumulation > 1 else 0
            lasting = used.parameters + used.optimizer
            phases = {
                "loss": lasting + kept + used.activations + used.logits,
                "first unit of the backward pass": lasting + kept + used.activations + used.communication,
                "end of the backward pass": lasting + used.communication + used.gradients,
            }
            assert max(phases.values()) == pytest.approx(used.peak - used.overhead)


def test_a_70b_on_512_devices_needs_what_its_plan_traces():
    # fgcli plan: 33 GiB, at the loss. The buckets, 11.7 GiB, come later than the logits.
    way = Way(strategy="FSDP", stage=3, gpus=512, tokens=8192, recompute=True)
    used = memory(model_shape("llama-3-70b"), way)
    assert 33 * 2**30 == pytest.approx(used.peak - used.overhead, rel=0.05)


def test_flops_are_six_for_each_weight_and_token():
    tokens = 128
    exact = 6 * (LLAMA.parameters - 32000 * 4096) * tokens
    scores = 6 * 32 * 4096 * tokens**2
    # Norms are counted in `exact`; they are no matrices.
    assert pytest.approx(exact + scores, rel=1e-4) == flops(LLAMA, Way(tokens=tokens))


def test_offload_and_recomputation_cost_time():
    device = hardware("a100-80")
    way = Way(strategy="DeepSpeed", stage=2, gpus=4)
    for slower in ({"recompute": True}, {"offload_optimizer": True}):
        assert step_seconds(LLAMA, replace(way, **slower), device) > step_seconds(LLAMA, way, device)
    assert step_seconds(LLAMA, replace(way, gpus=16), device) > step_seconds(LLAMA, replace(way, gpus=8), device)
