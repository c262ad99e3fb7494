"""What a training step needs on each GPU, by published formulas over the shape of a model.

Takes a `ModelShape` and a `Way` to train it; gives `Memory` and seconds. No model is built. For a config, `fgcli plan`
traces the model itself and is closer: these formulas are for choices that are made before there is a config.

Source:
    Optimizer, gradients and their division: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 3. Activations:
    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section
    4.1, part by part, so that it holds for grouped queries and gated feed-forward parts too; without the scores of
    attention, which the kernels of `scaled_dot_product_attention` do not keep (section 5 there: "selective"). 4-bit
    weights: Dettmers et al. 2023, "QLoRA", arXiv:2305.14314, section 3 (4.127 bits for each weight).
Units:
    bytes, seconds, floating-point operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forgather.planner.architectures import BlockShape
from forgather.planner.hardware import LINKS, Hardware
from forgather.planner.model_shapes import ModelShape

LORA_TARGETS = ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONTEXT_BYTES = 800_000_000
"""What the driver and the libraries keep on a GPU. Assumed; 0.5 to 1 GB is usual."""
FRAGMENTATION = 0.05
"""The share of memory that the allocator cannot use. Assumed."""
EFFICIENCY = 0.4
"""The share of the peak rate that a step reaches while it computes. Assumed; 0.3 to 0.5 is usual."""
OVERLAP = 0.7
"""The share of communication that is hidden behind computation. Assumed."""
HOST_BYTES_PER_SECOND = 100e9
"""The bandwidth of the host's memory, which all processes of a machine share. Assumed."""
SECONDS_PER_BLOCK = 1e-3
"""The time to start the kernels of one block, forward and backward. Assumed."""
UNKNOWN_LINK = 12.5e9
"""The bandwidth of a link that the facts of a device do not have. Assumed: 100 Gbit/s."""
_BUCKET = 500_000_000
"""`reduce_bucket_size` and `allgather_bucket_size` of DeepSpeed, in elements."""
_LIVE = 1_000_000_000
"""`stage3_max_live_parameters` of DeepSpeed, in elements."""
_NF4_BYTES = 4.127 / 8
_ACTIVATION_TENSORS = {"relu": 1, "gelu_new": 5}
"""How many tensors of the inner width a function and the matrix after it keep: its input and its output, unless it is
listed. relu keeps its output only. transformers computes "gelu_new" by several operators, which keep five."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train a model on a number of GPUs.

    Args:
        strategy: "DDP" (with one GPU: no communication), "FSDP" or "DeepSpeed".
        stage: what is divided among the GPUs: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
            FSDP with stage 2 is SHARD_GRAD_OP, which gathers the parameters once for forward and backward.
        gpus: the number of GPUs.
        gpus_per_node: how many of them share a machine.
        tokens: the tokens of a row.
        micro_batch: the rows of one forward pass on one GPU.
        accumulation: the forward passes of one optimizer step.
        recompute: True for gradient checkpointing: blocks keep only their inputs.
        offload_optimizer: True if the optimizer's state, and its step, are on the host.
        offload_parameters: True if parameters and gradients are on the host too.
        dtype: "bf16" or "fp16" for mixed precision, "fp32" without it.
        lora_rank: the rank of adapters of all matrices of the blocks, which are trained in place of the weights.
        four_bit: True if the frozen matrices of the blocks have 4 bits (NF4, double quantization).
    """

    strategy: str = "DDP"
    stage: int = 0
    gpus: int = 1
    gpus_per_node: int = 8
    tokens: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    recompute: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    dtype: str = "bf16"
    lora_rank: int | None = None
    four_bit: bool = False

    @property
    def shards(self) -> int:
        """The number of GPUs that divide what this way divides."""
        return self.gpus if self.stage else 1


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one GPU, in bytes; every number is a formula, and `overhead` is assumed.

    Args:
        parameters: weights, their 16-bit copies, and what is gathered of them.
        gradients: gradients after the backward pass.
        optimizer: Adam's two moments, and the 32-bit weights that DeepSpeed keeps.
        activations: what the blocks keep for the backward pass.
        logits: predictions and what the loss makes of them.
        communication: buckets.
        overhead: context and fragmentation.
        peak: the largest sum at one time. At the end of the forward pass there are no gradients yet, unless they are
            accumulated; at the end of the backward pass there are no activations. Buckets of FSDP are made when the
            logits are gone.
        host: memory of the host, for each GPU.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    communication: float
    overhead: float
    peak: float
    host: float


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Returns the number of trained parameters of LoRA on all matrices of all blocks: r (inputs + outputs) each."""
    return sum(rank * (i + o) * block.count for block in shape.blocks for i, o in block.linear_layers)


def block_activations(block: BlockShape, tokens: int, *, wide: int = 2, stream: int | None = None) -> int:
    """Returns the bytes that one block keeps for the backward pass of one row.

    Args:
        block: the block.
        tokens: the tokens of the row.
        wide: the bytes of an element that matrices read.
        stream: the bytes of an element between the parts of a block; the same by default. Autocast leaves 4, and casts
            the input of each matrix.

    Example:
        >>> gpt = BlockShape(count=1, hidden_size=64, query_size=64, kv_size=64, num_heads=4, intermediate_size=256,
        ...     gated=False, dropout=True)
        >>> (block_activations(gpt, 10) - 4 * 4 * 10) // (10 * 64)  # 34 s b h, and the logsumexp of each head
        34
    """
    hidden, inner = block.hidden_size, block.intermediate_size
    between = stream or wide
    casts = between > wide and not block.fused_inputs
    mask = hidden if block.dropout else 0
    # RMSNorm keeps its input in 32 bits, and the input that is divided by its root mean square.
    norm = (between + 4 if block.rms_norm else between) * hidden
    # Input of q, k and v; q, k, v; the output of attention, which is the input of o; a dropout mask.
    attention = wide * ((3 if casts else 1) * hidden + 2 * block.query_size + 2 * block.kv_size) + mask
    attention += 4 * block.num_heads + (4 + wide) * (block.query_size + block.kv_size) * block.norms_heads
    # Input of the first matrices; what the activation and, with a gate, the product keep.
    kept = _ACTIVATION_TENSORS.get(block.activation, 2) + (2 if block.gated else 0)
    feed_forward = wide * ((2 if casts and block.gated else 1) * hidden + kept * inner) + mask
    return tokens * (block.num_norms * norm + block.attentions * attention + feed_forward)


def _stream(way: Way) -> int:
    # Autocast leaves what is between the matrices in 32 bits; FSDP and DeepSpeed cast the whole model.
    return 4 if way.dtype == "fp32" or way.strategy == "DDP" else 2


def _activations(shape: ModelShape, way: Way) -> int:
    wide, stream = 4 if way.dtype == "fp32" else 2, _stream(way)
    rows = way.micro_batch
    if shape.traced is not None:
        return rows * shape.traced[f"{'recomputed' if way.recompute else 'kept'}_{'fp32' if wide == 4 else 'half'}"]
    kept = [(block, block_activations(block, way.tokens, wide=wide, stream=stream)) for block in shape.blocks]
    if not way.recompute:
        return rows * sum(block.count * size for block, size in kept)
    inputs = sum(block.count * stream * block.hidden_size * way.tokens for block in shape.blocks)
    return rows * (inputs + max(size for _, size in kept))


def _logits(shape: ModelShape, way: Way) -> int:
    # In 32 bits: the predictions, their log-softmax, and its gradient.
    predictions = way.micro_batch * (shape.predictions_per_row or way.tokens)
    return predictions * shape.vocab_size * 12


def memory(shape: ModelShape, way: Way) -> Memory:
    """Returns the memory of one GPU.

    Args:
        shape: the model.
        way: the way to train it.
    """
    trained = lora_parameters(shape, way.lora_rank) if way.lora_rank else shape.parameters
    parameters, gradients, optimizer, host = _state(shape, way, trained)
    gathered, communication = _gathered(shape, way, trained)
    parameters += gathered
    activations, logits = _activations(shape, way), _logits(shape, way)
    # FSDP makes its buckets unit by unit in the backward pass, after the loss; those of the others last.
    passing = communication if way.strategy == "FSDP" else 0
    lasting = parameters + optimizer + communication - passing
    accumulated_before = gradients if way.accumulation > 1 else 0
    # The copies that autocast makes die with the backward pass of their block.
    copies = gathered if way.strategy == "DDP" else 0
    start = activations + max(logits, passing) + accumulated_before
    used = lasting + max(start, passing + gradients - copies)
    overhead = CONTEXT_BYTES + FRAGMENTATION * used
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        communication=communication,
        overhead=overhead,
        peak=used + overhead,
        host=host,
    )


def _state(shape: ModelShape, way: Way, trained: int) -> tuple[float, float, float, float]:
    """Returns the bytes of parameters, gradients and optimizer on the GPU, and of all that is on the host."""
    shards = way.shards
    divided = [shards if way.stage >= least else 1 for least in (3, 2, 1)]
    half = 4 if way.dtype == "fp32" else 2
    if way.strategy == "DeepSpeed" and way.dtype != "fp32":
        # 16-bit weights and gradients; the optimizer has 32-bit weights and two moments.
        sizes: list[float] = [half * trained, half * trained, 12 * trained]
    else:
        sizes = [4 * trained, 4 * trained, 8 * trained]
    if way.strategy == "FSDP":
        # FSDP keeps its parameters in shards; with SHARD_GRAD_OP it gathers all of them, see `_gathered`.
        divided[0] = shards
    if way.lora_rank:
        matrices = shape.matrix_parameters
        sizes[0] += (
            matrices * _NF4_BYTES + 4 * (shape.parameters - matrices) if way.four_bit else half * shape.parameters
        )
    parameters, gradients, optimizer = (size / by for size, by in zip(sizes, divided, strict=True))
    host = 0.0
    if way.offload_optimizer or way.offload_parameters:
        host, optimizer = host + optimizer + gradients, 0.0
        # Gradients leave the GPU bucket by bucket during the backward pass.
        gradients = 0.0
    if way.offload_parameters:
        host, parameters = host + parameters, 0.0
    return parameters, gradients, optimizer, host


def _gathered(shape: ModelShape, way: Way, trained: int) -> tuple[float, float]:
    """Returns the bytes of weights for the computation, in addition to those that are kept, and of buckets."""
    mixed = way.dtype != "fp32"
    half = 2 if mixed else 4
    if way.strategy == "DDP":
        # Autocast keeps 16-bit copies of all 32-bit weights until the backward pass has used them.
        copies = 2 * trained if mixed and not way.lora_rank else 0
        return copies, 4 * trained if way.gpus > 1 else 0
    unit = min(shape.largest_unit, shape.parameters)
    if way.strategy == "FSDP":
        # Two units at a time, the current and the next one; the gradient of one unit, before it is divided.
        whole: float = half * shape.parameters if way.stage == 2 else half * 2 * unit
        if way.four_bit:
            whole *= _NF4_BYTES / half
        return whole, (half + 4) * unit if not way.lora_rank else 0
    bucket = half * min(_BUCKET, trained)
    # With `overlap_comm`, one bucket is filled while another one is sent.
    if way.stage == 3:
        return half * min(max(_LIVE, 2 * unit), shape.parameters), 2 * bucket
    return 0, 3 * bucket


def flops(shape: ModelShape, way: Way) -> float:
    """Returns the operations of one row on its GPU, forward and backward: 6 for each weight in a matrix and token.

    Causal attention counts half. Recomputation adds a forward pass; frozen weights have no gradients.

    Source:
        Hoffmann et al. 2022, arXiv:2203.15556, appendix F; Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    if shape.traced is not None:
        return ((2 if way.lora_rank else 3) + way.recompute) * float(shape.traced["forward_flops"])
    matrices = shape.matrix_parameters
    head = shape.vocab_size * shape.blocks[-1].hidden_size
    predictions = shape.predictions_per_row or way.tokens
    causal = 0.5 if shape.family == "text_generation" else 1.0
    scores = sum(b.count * b.attentions * 4 * b.query_size * way.tokens * causal for b in shape.blocks)
    passes = (2 if way.lora_rank else 3) + way.recompute
    forward = (2 * matrices + scores) * way.tokens
    return passes * forward + (3 - bool(way.lora_rank)) * 2 * head * predictions


def step_seconds(shape: ModelShape, way: Way, device: Hardware) -> float:
    """Returns the time of one optimizer step, to compare ways: efficiency and overlap are assumed.

    Args:
        shape: the model.
        way: the way to train it.
        device: the GPU.
    """
    trained = lora_parameters(shape, way.lora_rank) if way.lora_rank else shape.parameters
    half = 4 if way.dtype == "fp32" else 2
    rate = device.peak_flops.get("tf32" if way.dtype == "fp32" else way.dtype) or device.peak_flops.get("fp32", 0)
    rows = way.micro_batch * way.accumulation
    compute = rows * flops(shape, way) / (rate * EFFICIENCY)
    inside = _link(device, *LINKS)
    link = inside if way.gpus <= way.gpus_per_node else min(inside, _link(device, "network"))
    share = (way.gpus - 1) / way.gpus
    if way.strategy == "DDP":
        moved: float = 2 * 4 * trained * share
    elif way.stage < 3:
        moved = (half + (4 if way.strategy == "FSDP" else half)) * trained * share
    else:
        moved = (
            way.accumulation * (2 * half * shape.parameters + (4 if way.strategy == "FSDP" else half) * trained) * share
        )
    seconds = compute + max(moved / link * (1 - OVERLAP), moved / link - compute)
    seconds += way.accumulation * SECONDS_PER_BLOCK * sum(block.count for block in shape.blocks)
    return seconds + _host_seconds(shape, way, device, trained)


def _link(device: Hardware, *names: str) -> float:
    return next((device.links[name] for name in names if name in device.links), UNKNOWN_LINK)


def _host_seconds(shape: ModelShape, way: Way, device: Hardware, trained: int) -> float:
    if not (way.offload_optimizer or way.offload_parameters):
        return 0.0
    half = 4 if way.dtype == "fp32" else 2
    # Gradients go down, new weights come up; with parameters on the host, weights come up in every pass.
    moved = 2 * half * trained / way.shards
    if way.offload_parameters:
        moved += way.accumulation * 2 * half * shape.parameters / way.shards
    # Adam on the host reads and writes weights and moments, and reads gradients: 28 bytes for each weight.
    node_share = min(way.gpus, way.gpus_per_node) / way.shards
    return moved / _link(device, "pcie") + 28 * trained * node_share / HOST_BYTES_PER_SECOND


def accumulated(way: Way, micro_batch: int, rows: int) -> Way:
    """Returns a way with another micro-batch, which computes the same rows in one optimizer step."""
    return replace(way, micro_batch=micro_batch, accumulation=rows // micro_batch)
