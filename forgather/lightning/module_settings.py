"""Settings of our trainers that mean something else, or nothing, where a `LightningModule` trains.

A word of `forgather.lightning:Trainer` may be a setting of ours. The module makes its optimizer and its loss, and its
loaders give the rows, so settings about these would have no effect. They are refused, and so are settings whose effect
on a module was not compared with a plain loop. Nothing here imports torch: `fgcli check` reads the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forgather.rules import Violation

_OPTIMIZER = "return the optimizer and its schedule from configure_optimizers"
_LOSS = "compute it in training_step"
_ROWS = "give it to the DataLoader: rows and batches are those of the loaders"
_BATCHES = "set batch_size of the DataLoader and accumulate_grad_batches"
_VALIDATION = "set val_check_interval, check_val_every_n_epoch and limit_val_batches"
_COMPILED = "compile parts of the module in its constructor: self.net = torch.compile(self.net)"
_WEIGHTS = "make the initial weights in the constructor of the module"
_UNTESTED = "remove it: with a module, it was not compared with a plain loop"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim"), _OPTIMIZER),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"), _OPTIMIZER),
    **dict.fromkeys(("parameter_groups", "layer_lr_decay", "loraplus_lr_ratio", "loraplus_lr_embedding"), _OPTIMIZER),
    "bf16_stochastic_round": _OPTIMIZER,
    "optimizer_in_backward": "remove it: the hooks of a module see gradients between the backward pass and the update",
    "freeze": "set requires_grad to false in the constructor of the module",
    **dict.fromkeys(("ema_decay", "ema_update_after_step", "ema_every", "ema_evaluate"), _UNTESTED),
    "neftune_noise_alpha": "add the noise in training_step",
    "include_num_input_tokens_seen": "count tokens in training_step, and log them",
    **dict.fromkeys(("label_smoothing_factor", "z_loss_coefficient"), _LOSS),
    **dict.fromkeys(("linear_cross_entropy", "linear_cross_entropy_chunk_size"), _LOSS),
    **dict.fromkeys(("fp8", "fp8_exclude", "fp8_emulate"), _UNTESTED),
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "apply Liger's kernels in the constructor"),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILED),
    "torch_compile_regions": _COMPILED,
    "activation_memory_budget": _COMPILED,
    **dict.fromkeys(("context_parallel_size", "context_parallel_method", "context_parallel_rotate_method"), _UNTESTED),
    **dict.fromkeys(("eval_strategy", "eval_steps", "eval_delay", "eval_on_start"), _VALIDATION),
    **dict.fromkeys(
        ("include_for_metrics", "batch_eval_metrics", "eval_full_logits"), "log metrics in validation_step"
    ),
    **dict.fromkeys(("predict_with_generate", "generation_max_new_tokens"), "generate in validation_step"),
    **dict.fromkeys(("generation_max_length", "generation_max_samples"), "generate in validation_step"),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "global_batch_size"), _BATCHES),
    "auto_find_batch_size": _BATCHES,
    **dict.fromkeys(("data_seed", "train_sampling_strategy", "shuffle_order", "remove_unused_columns"), _ROWS),
    **dict.fromkeys(("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"), _ROWS),
    **dict.fromkeys(("dataloader_persistent_workers", "dataloader_prefetch_factor"), _ROWS),
    "dataloader_device_prefetch": _ROWS,
    **dict.fromkeys(("data_retries", "data_streams", "dispatch_rows", "bad_rows"), _ROWS),
    **dict.fromkeys(("initial_weights", "skip_initial_weights_on_resume"), _WEIGHTS),
    "resume_from_checkpoint": "give fit the checkpoint: ckpt_path",
}
"""The settings that are refused as words, with what to write instead."""


def refused_settings(
    settings: Iterable[str], origins: Mapping[str, str], words: Mapping[str, Any]
) -> Iterator[Violation]:
    """Yields an FG865 violation for each setting of ours that a word has and that does nothing for a module.

    Args:
        settings: the names of the settings that the words mean.
        origins: the word from which each setting comes, by the name of the setting.
        words: the words as the user wrote them.
    """
    for name in settings:
        # A word of Lightning's own means what it means under Lightning, whatever setting it becomes.
        if name in REFUSED and origins.get(name) == name and name in words:
            message = f"{name!r} is a setting of our trainers, and a LightningModule is not trained with it"
            yield Violation("FG865", message, name, REFUSED[name], found=words[name])
