"""Hardware and a strategy for a model, from its name alone: all ways to train it that fit, the fastest first.

Takes the name of a model with a shape file, a number of GPUs and a limit of memory; gives a mapping that says how to
train it. Nothing is downloaded and torch is not imported: every number is a formula of `forgather.planner.formulas`.

Units:
    GB is 10^9 bytes. A card that is sold with 24 GB has 24 GiB, which are 25.8 GB.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from forgather.errors import PlanError
from forgather.planner.formulas import Memory, Way, accumulated, memory, step_seconds
from forgather.planner.hardware import Hardware, hardware, hardware_names
from forgather.planner.memory_plan import format_size
from forgather.planner.model_shapes import ModelShape, model_family, model_shape

DEVICES = {"cuda": "a100-80", "rocm": "mi300x"}
"""The device that a kind of hardware stands for, if none is named."""
KINDS = ("cuda", "rocm", "cpu")
_GB = 1e9
_USUAL_TOKENS = 2048
_AS_FAST = 1.1
_BF16_AS_FP16 = (
    "mixed_precision_dtype is 'bf16': pass it as bf16=True. With fp16=True, as in fp16=config['mixed_precision'], the "
    "run uses another type, which overflows above 65,504 and needs loss scaling"
)


class HardwareSelector:
    """Selects hardware and a strategy for the training of a model.

    Example:
        >>> config = HardwareSelector().get_distributed_training_config(
        ...     model_family="text_generation", model_name="gpt2", gpu_count=2, batch_size=8, device="v100")
        >>> config["distributed_strategy"], config["mixed_precision_dtype"], config["global_batch_size"]
        ('DDP', 'fp16', 16)
    """

    def select_hardware_for_task(
        self,
        model_family: str,
        model_name: str,
        task_type: str = "training",
        batch_size: int = 1,
        distributed: bool = False,
        gpu_count: int = 1,
        *,
        max_memory_gb: float | None = None,
        available_hardware: Sequence[str] | None = None,
        sequence_length: int | None = None,
    ) -> dict[str, Any]:
        """Returns the kind of hardware on which the training is fastest, and the others on which it fits.

        Args:
            model_family: the family, such as "text_generation", "embedding", "vision".
            model_name: the name of the model on the Hugging Face Hub.
            task_type: "training".
            batch_size: the rows of one optimizer step on each GPU.
            distributed: False plans for one GPU, whatever `gpu_count` is.
            gpu_count: the number of GPUs.
            max_memory_gb: the memory of each GPU.
            available_hardware: kinds ("cuda", "rocm", "cpu") or names of devices, such as "h100"; all kinds by default.
            sequence_length: the tokens of a row; by default the longest that the model takes, at most 2,048.

        Returns:
            `primary_recommendation` and `fallback_options` (kinds or names), and the keys of
            `get_distributed_training_config` for the first of them; `unsuitable` has the reason for each of the others.

        Raises:
            PlanError: FG998 for an unknown name or a number out of range; FG999 if the training fits nowhere.
        """
        if task_type != "training":
            raise _bad("task_type", task_type, "the formulas are those of 'training'")
        names = list(KINDS if available_hardware is None else available_hardware)
        if not names:
            raise _bad("available_hardware", available_hardware, "it names at least one")
        shape = _shape(model_family, model_name)
        gpus = gpu_count if distributed else 1
        fitting, unsuitable = self._try_all(
            names, shape, gpus, batch_size, max_memory_gb=max_memory_gb, sequence_length=sequence_length
        )
        if not fitting:
            raise PlanError(next(iter(unsuitable.values())), code="FG999", hint=_MORE)
        # Which of two GPUs is faster depends on libraries too: the order of the question decides between the kinds.
        name, found = fitting[0] if available_hardware is None else min(fitting, key=_seconds_of)
        if gpus != gpu_count:
            found["assumed"].append(f"gpu_count {gpu_count} is for distributed=True: planned for one GPU")
        _warn(found)
        return {
            "primary_recommendation": name,
            "fallback_options": [other for other, _ in sorted(fitting, key=_seconds_of) if other != name],
            "unsuitable": unsuitable,
            "task_type": task_type,
            **found,
        }

    def _try_all(
        self, names: Sequence[str], shape: ModelShape, gpus: int, batch_size: int, **limits: Any
    ) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, str]]:
        """Returns the answer for each hardware that fits, and the reason for each of the others."""
        fitting: list[tuple[str, dict[str, Any]]] = []
        unsuitable: dict[str, str] = {}
        for name in names:
            try:
                fitting.append((name, self._configure(shape, gpus, batch_size, device=name, warn=False, **limits)))
            except PlanError as error:
                if error.code != "FG999":
                    raise
                unsuitable[name] = error.message
        return fitting, unsuitable

    def get_distributed_training_config(
        self,
        model_family: str,
        model_name: str,
        gpu_count: int,
        batch_size: int,
        max_memory_gb: float | None = None,
        *,
        sequence_length: int | None = None,
        device: str = "cuda",
    ) -> dict[str, Any]:
        """Returns how to train a model on a number of GPUs: the fastest way of those that fit.

        Args:
            model_family: the family, such as "text_generation", "embedding", "vision".
            model_name: the name of the model on the Hugging Face Hub.
            gpu_count: the number of GPUs; 0, which `torch.cuda.device_count()` gives without a GPU, plans for one.
            batch_size: the rows of one optimizer step on each GPU. Where they do not fit at once, they are divided
                into `gradient_accumulation_steps` passes of `per_gpu_batch_size` rows.
            max_memory_gb: the memory of each GPU; that of `device` by default.
            sequence_length: the tokens of a row; by default the longest that the model takes, at most 2,048.
            device: "cuda", "rocm", or a name that `fgcli plan --hardware` takes.

        Returns:
            `distributed_strategy` ("DDP", "FSDP" or "DeepSpeed"), `gpu_count`, `per_gpu_batch_size`,
            `gradient_accumulation_steps`, `global_batch_size` (the product of the three numbers), `mixed_precision` (a
            bool), `mixed_precision_dtype` ("bf16", "fp16" or "no"), `gradient_checkpointing`; `fsdp_config` or
            `deepspeed_config` if that is the strategy; `estimated_memory` in GB; `estimated_step_seconds`; `assumed`,
            sentences about what the question left open.

        Raises:
            PlanError: FG998 for an unknown name or a number out of range; FG999 if nothing fits.

        Warns:
            UserWarning: if the type is bf16, because `mixed_precision` is often passed on as `fp16=`.
        """
        return self._configure(
            _shape(model_family, model_name),
            gpu_count,
            batch_size,
            device=device,
            max_memory_gb=max_memory_gb,
            sequence_length=sequence_length,
        )

    def get_strategy_config(
        self,
        strategy: str,
        model_family: str,
        model_name: str,
        gpu_count: int,
        batch_size: int,
        max_memory_gb: float | None = None,
        *,
        sequence_length: int | None = None,
        device: str = "cuda",
    ) -> dict[str, Any]:
        """Returns the same as `get_distributed_training_config` for one strategy, and warns of nothing.

        Args:
            strategy: "DDP", "FSDP" or "DeepSpeed"; the other arguments are those of `get_distributed_training_config`.

        Raises:
            PlanError: FG998 for an unknown name, a number out of range, or a strategy that these devices do not have,
                such as FSDP on one GPU; FG999 if nothing fits.
        """
        return self._configure(
            _shape(model_family, model_name),
            gpu_count,
            batch_size,
            device=device,
            max_memory_gb=max_memory_gb,
            sequence_length=sequence_length,
            strategy=strategy,
            warn=False,
        )

    def _configure(
        self,
        shape: ModelShape,
        gpu_count: int,
        batch_size: int,
        *,
        device: str,
        max_memory_gb: float | None,
        sequence_length: int | None,
        strategy: str | None = None,
        warn: bool = True,
    ) -> dict[str, Any]:
        _check_numbers(gpu_count, batch_size, max_memory_gb)
        facts, assumed = _device(device, max_memory_gb)
        tokens = _tokens(shape, sequence_length, assumed)
        if facts.memory_bytes is None and max_memory_gb is None:
            assumed.append("the memory of the host is not known: compare it with what each process needs")
        if gpu_count == 0:
            assumed.append("gpu_count is 0: planned for one GPU")
        limit = max_memory_gb * _GB if max_memory_gb is not None else facts.memory_bytes
        dtype = next((name for name in ("bf16", "fp16") if name in facts.peak_flops), "fp32")
        if shape.traced and dtype != "fp32":
            assumed.append(f"activations are those of the whole model in {dtype}; parts that stay in fp32 need more")
        start = Way(gpus=max(1, gpu_count), tokens=tokens, dtype=dtype)
        every = list(ways(start, batch_size, has_host=facts.kind != "cpu"))
        possible = [way for way in every if strategy in (None, way.strategy)]
        if not possible:
            known = ", ".join(dict.fromkeys(way.strategy for way in every))
            raise _bad("strategy", strategy, f"on {start.gpus} x {facts.title} there is {known}")
        way, used = _fastest(shape, possible, facts, limit)
        found = {"model_name": shape.name, "device": facts.name, **_answer(way, used, batch_size)}
        found["estimated_step_seconds"] = step_seconds(shape, way, facts)
        found["sequence_length"] = tokens
        found["assumed"] = [*assumed, "formulas, not measured: AdamW, attention that does not keep its scores"]
        if warn:
            _warn(found)
        return found


def _seconds_of(fitting: tuple[str, dict[str, Any]]) -> float:
    seconds: float = fitting[1]["estimated_step_seconds"]
    return seconds


_MORE = "more GPUs, GPUs with more memory, a smaller model or shorter rows (sequence_length)"


def ways(start: Way, rows: int, *, has_host: bool = True) -> Iterator[Way]:
    """Yields every way to train, for each micro-batch that divides the rows; the simpler ones first.

    Args:
        start: the number of GPUs, the tokens and the type.
        rows: the rows of one optimizer step on each GPU.
        has_host: False if the processes run on the host itself, where DeepSpeed and its offload are of no use.
    """
    base: list[dict[str, Any]] = [{"strategy": "DDP", "stage": 0}]
    if start.gpus > 1:
        base += [{"strategy": "FSDP", "stage": stage} for stage in (2, 3)]
    if has_host and start.gpus > 1:
        base += [{"strategy": "DeepSpeed", "stage": stage} for stage in (2, 3)]
        base += [{"strategy": "FSDP", "stage": 3, "offload_optimizer": True, "offload_parameters": True}]
    if has_host:
        base += [{"strategy": "DeepSpeed", "stage": stage, "offload_optimizer": True} for stage in (2, 3)]
        base += [{"strategy": "DeepSpeed", "stage": 3, "offload_optimizer": True, "offload_parameters": True}]
    for settings in base:
        for recompute in (False, True):
            for micro_batch in (size for size in range(rows, 0, -1) if rows % size == 0):
                yield accumulated(replace(start, recompute=recompute, **settings), micro_batch, rows)


def _fastest(shape: ModelShape, possible: list[Way], device: Hardware, limit: float | None) -> tuple[Way, Memory]:
    found = [(way, memory(shape, way)) for way in possible]
    fitting = [one for one in found if limit is None or one[1].peak <= limit]
    if not fitting:
        way, used = min(found, key=lambda one: one[1].peak)
        # From a process on processors nothing can be offloaded: what fits on a GPU with offload may not fit here.
        where, each = (" of processors, without offload", "process") if device.kind == "cpu" else ("", "GPU")
        raise PlanError(
            f"{shape.name!r} does not fit on {way.gpus} x {format_size(limit or 0)}{where}: the nearest way, "
            f"{spelled(way)}, needs {format_size(used.peak)} on each {each} ({_largest(used)})",
            code="FG999",
            hint=_MORE,
        )
    seconds = [step_seconds(shape, way, device) for way, _ in fitting]
    # The estimate is not better than a tenth: of ways that are as fast, the simplest.
    return next(one for one, took in zip(fitting, seconds, strict=True) if took <= min(seconds) * _AS_FAST)


def spelled(way: Way) -> str:
    """Returns a way in words.

    Example:
        >>> spelled(Way(strategy="DeepSpeed", stage=3, recompute=True, offload_optimizer=True))
        'DeepSpeed ZeRO-3 with the optimizer on the host, gradient checkpointing, 1 row at a time'
    """
    name = {"DeepSpeed": f"DeepSpeed ZeRO-{way.stage}"}.get(way.strategy, way.strategy)
    if way.strategy == "FSDP":
        name += " " + _sharding(way)
    if way.offload_optimizer:
        name += f" with {'parameters and the optimizer' if way.offload_parameters else 'the optimizer'} on the host"
    rows = f"{way.micro_batch} row{'s' * (way.micro_batch > 1)} at a time"
    return ", ".join([name, *["gradient checkpointing"] * way.recompute, rows])


def _sharding(way: Way) -> str:
    return "FULL_SHARD" if way.stage == 3 else "SHARD_GRAD_OP"


def _largest(used: Memory) -> str:
    rows = {name: getattr(used, name) for name in ("parameters", "gradients", "optimizer", "activations", "logits")}
    name = max(rows, key=lambda row: rows[row])
    return f"{name} {format_size(rows[name])}"


def _answer(way: Way, used: Memory, batch_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "distributed_strategy": way.strategy,
        "gpu_count": way.gpus,
        "per_gpu_batch_size": way.micro_batch,
        "gradient_accumulation_steps": way.accumulation,
        "global_batch_size": batch_size * way.gpus,
        "mixed_precision": way.dtype != "fp32",
        "mixed_precision_dtype": "no" if way.dtype == "fp32" else way.dtype,
        "gradient_checkpointing": way.recompute,
        "summary": spelled(way),
    }
    if way.strategy == "FSDP":
        found["fsdp_config"] = {
            "sharding_strategy": _sharding(way),
            "cpu_offload": way.offload_parameters,
            "activation_checkpointing": way.recompute,
        }
    if way.strategy == "DeepSpeed":
        found["deepspeed_config"] = {
            "zero_stage": way.stage,
            "offload_optimizer": way.offload_optimizer,
            "offload_param": way.offload_parameters,
        }
    found["estimated_memory"] = memory_gb(used)
    return found


def memory_gb(used: Memory) -> dict[str, float]:
    """Returns the rows of a `Memory` in GB; `per_gpu_gb` is the peak, which is not the sum of all rows."""
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "overhead")
    rows = {f"{name}_gb": getattr(used, name) / _GB for name in names}
    return {**rows, "per_gpu_gb": used.peak / _GB, "host_gb": used.host / _GB}


def _shape(family: str, name: str) -> ModelShape:
    shape, asked = model_shape(name), model_family(family)
    if asked != shape.family:
        raise _bad("model_family", family, f"{shape.name!r} is in the family {shape.family!r}")
    return shape


def device_kind(name: str) -> str:
    """Returns the kind of a device, see `Hardware`.

    Args:
        name: "cuda", "rocm", "cpu", or a name that `fgcli plan --hardware` takes.
    """
    return _device(name, None)[0].kind


def _device(name: str, max_memory_gb: float | None) -> tuple[Hardware, list[str]]:
    if name == "cpu":
        name = next(known for known in hardware_names() if hardware(known).kind == "cpu")
    facts = hardware(DEVICES.get(name, name))
    limit = (
        "" if max_memory_gb is not None or facts.memory_bytes is None else f" with {format_size(facts.memory_bytes)}"
    )
    return facts, [f"{name!r} is computed as {facts.title}{limit}"] if facts.name != name else []


def _tokens(shape: ModelShape, asked: int | None, assumed: list[str]) -> int:
    if shape.fixed_tokens:
        return shape.max_tokens
    if asked is None:
        tokens = min(shape.max_tokens, _USUAL_TOKENS)
        assumed.append(f"rows of {tokens} tokens; sequence_length sets another length")
        return tokens
    if not 1 <= asked <= shape.max_tokens:
        raise _bad("sequence_length", asked, f"{shape.name!r} takes 1 to {shape.max_tokens} tokens")
    return asked


def _check_numbers(gpu_count: int, batch_size: int, max_memory_gb: float | None) -> None:
    for name, value, least in (("gpu_count", gpu_count, 0), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _bad(name, value, f"it is a whole number from {least}")
    if max_memory_gb is not None and not 0 < max_memory_gb < float("inf"):
        raise _bad("max_memory_gb", max_memory_gb, "it is a number above 0")


def _bad(name: str, value: object, why: str) -> PlanError:
    return PlanError(f"{name} is {value!r}: {why}", code="FG998", found=value).about(name)


def _warn(found: dict[str, Any]) -> None:
    if found["mixed_precision_dtype"] == "bf16":
        warnings.warn(_BF16_AS_FP16, stacklevel=4)
