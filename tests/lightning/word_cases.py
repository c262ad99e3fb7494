"""Inputs that both Lightning and `forgather.lightning` are given: scripts/oracles/lightning_words.py and the tests."""

import math

DEEPSPEED_OPTIONS = [
    {},
    {"stage": 1},
    {"stage": 2, "offload_optimizer": True},
    {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "pin_memory": True},
    {"stage": 3, "offload_parameters": True, "params_buffer_count": 6, "params_buffer_size": 1000, "max_in_cpu": 10},
    {
        "stage": 3,
        "offload_optimizer": True,
        "offload_optimizer_device": "nvme",
        "offload_parameters": True,
        "offload_params_device": "nvme",
        "nvme_path": "/local",
        "optimizer_buffer_count": 5,
    },
    {"overlap_comm": False, "reduce_bucket_size": 1000, "allgather_bucket_size": 2000, "sub_group_size": 3000},
    {"contiguous_gradients": False, "allgather_partitions": False, "reduce_scatter": False},
    {"stage": 3, "cpu_checkpointing": True, "partition_activations": True, "contiguous_memory_optimization": True},
    {"block_size": 4096, "queue_depth": 16, "single_submit": True, "overlap_events": False, "thread_count": 2},
    {"zero_allow_untested_optimizer": False},
    {"zero_optimization": False},
]
NAME_PATTERNS = [
    ("model-{epoch:02d}", {"epoch": 3, "step": 7}),
    ("{epoch}-{step}", {"epoch": 0, "step": 12}),
    ("{epoch}-{val_loss:.2f}", {"epoch": 2, "val_loss": 0.123456}),
    ("best", {"epoch": 1}),
    ("{epoch_loss:.1f}-{epoch:d}", {"epoch": 4, "epoch_loss": 2.25}),
    ("{missing:d}", {"epoch": 4}),
]
METRIC_COURSES = [
    [1.0, 0.9, 0.8, 0.7, 0.6],
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7],
    [1.0, 2.0, 0.5, 0.6, 0.7, 0.8, 0.4],
    [1.0, math.nan, 0.5],
    [0.2, 0.5, 0.55, 0.6, 0.61, 0.62, 0.63, 0.64],
]
STOPPING_OPTIONS = [
    {},
    {"patience": 1},
    {"patience": 2, "min_delta": 0.08},
    {"patience": 2, "min_delta": 0.08, "mode": "max"},
    {"mode": "max"},
    {"stopping_threshold": 0.75},
    {"divergence_threshold": 1.5, "check_finite": False},
    {"divergence_threshold": 0.1, "mode": "max"},
    {"check_finite": False, "patience": 2},
]
