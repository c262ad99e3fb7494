"""The settings of weight sharding, as configs name them, and their meaning in FSDP2.

`Sharding` is made from the training arguments `fsdp` and `fsdp_config`. An unknown key or value is refused. A setting
of FSDP1 that FSDP2 does not need or does not have logs a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from forgather.errors import nearest
from forgather.ml.log import get_logger
from forgather.ml.strategy.fsdp_precision import BFLOAT16, MixedPrecision, precision_of, refused_setting

_log = get_logger(__name__)

Recompute = Literal["none", "full", "selective"]

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_WRAP = {
    "TRANSFORMER_BASED": "blocks",
    "TRANSFORMER_BASED_WRAP": "blocks",
    "SIZE_BASED": "size",
    "SIZE_BASED_WRAP": "size",
    "NO_WRAP": "none",
}
_KEYS = (
    "sharding_strategy",
    "reshard_after_forward",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "wrap_embeddings",
    "cpu_offload",
    "mixed_precision",
    "activation_checkpointing",
    "shard_size",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
)
# Settings of FSDP1 and of its wrappers that FSDP2 does not have, each with what FSDP2 does instead.
_IGNORED = {
    "use_orig_params": "FSDP2 always trains the original parameters",
    "sync_module_states": "every rank reads its part of the initial weights from one file",
    "cpu_ram_efficient_loading": "every rank reads its part of the initial weights from one file",
    "state_dict_type": "checkpoints do not depend on the layout of the processes",
    "version": "FSDP2 is used",
}


def shards_weights(fsdp: bool | str | None, config: Mapping[str, Any] | None) -> bool:
    """Returns whether the arguments request sharded weights. NO_SHARD requests replicated weights.

    Args:
        fsdp: the training argument `fsdp`.
        config: the training argument `fsdp_config`.

    Example:
        >>> shards_weights("NO_SHARD", None), shards_weights(True, None)
        (False, True)
    """
    # An `fsdp_config` alone asks for sharding; `fsdp: false` switches it off.
    wanted = bool(fsdp) or (fsdp is None and bool(config))
    return wanted and Sharding.from_arguments(fsdp, config).strategy != "NO_SHARD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The settings of FSDP2.

    Args:
        strategy: the sharding strategy: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD.
        reshard_after_forward: True to free gathered weights after the forward pass and gather them again in the
            backward pass. A number of ranks to keep them sharded over groups of so many ranks, such as those of one
            machine, from which the backward pass gathers them.
        wrap: the modules that become FSDP2 units: "blocks" (the layers of a transformer), "size" (modules with at least
            `min_num_params` elements), or "none" (the whole model is one unit).
        layers: the names of the classes or modules that become units. If it is empty, the model's own list of such
            classes is used.
        min_num_params: the smallest number of elements in a unit, for `wrap` "size".
        wrap_embeddings: True if the token embedding and the output head of a transformers model become units of their
            own. False to shard them with the root unit, which gathers them for the whole step.
        cpu_offload: True to keep weights, gradients and optimizer state on the CPU.
        precision: the dtypes of computation and reduction. None to derive them from the precision of the run; see
            `with_precision_of`.
        recompute: the activations that the backward pass recomputes: "none"; "full" for all activations in the units;
            "selective" for all except the results of matrix products.
        shard_size: the number of ranks that shard one replica under HYBRID_SHARD. None for the number of data-parallel
            ranks on one machine.
        forward_prefetch: the number of units whose weights are requested before the current unit computes its forward
            pass.
        backward_prefetch: the number of units whose weights are requested before the current unit computes its backward
            pass. None for torch's default, which is one unit.

    Units:
        min_num_params: elements.

    Example:
        >>> Sharding.from_arguments("SHARD_GRAD_OP", None).reshard_after_forward
        False
    """

    strategy: str = "FULL_SHARD"
    reshard_after_forward: bool | int = True
    wrap: Literal["blocks", "size", "none"] = "blocks"
    layers: tuple[str, ...] = ()
    min_num_params: int = 100_000_000
    wrap_embeddings: bool = True
    cpu_offload: bool = False
    precision: MixedPrecision | None = None
    recompute: Recompute = "none"
    shard_size: int | None = None
    forward_prefetch: int = 0
    backward_prefetch: int | None = None

    @classmethod
    def from_arguments(cls, fsdp: bool | str | None, config: Mapping[str, Any] | None) -> Sharding:
        """Returns the settings that the training arguments request.

        Args:
            fsdp: True, or the name of a sharding strategy. None if only the config is given.
            config: the training argument `fsdp_config`.

        Raises:
            DistributedError: FG734 if a key or value is unknown, or if two settings contradict each other.
        """
        config = _known_keys(config or {})
        strategy = _strategy(fsdp, config)
        _warn_of_ignored(config)
        wrap, layers = _wrapping(config)
        reshard = config.get("reshard_after_forward")
        return cls(
            strategy=strategy,
            reshard_after_forward=strategy != "SHARD_GRAD_OP" if reshard is None else _reshard(config),
            wrap=wrap,
            layers=layers,
            min_num_params=_count(config, "min_num_params", 100_000_000),
            wrap_embeddings=config.get("wrap_embeddings") is None or _flag(config, name="wrap_embeddings"),
            cpu_offload=_flag(config, name="cpu_offload"),
            precision=precision_of(config.get("mixed_precision")),
            recompute=_recompute(config.get("activation_checkpointing")),
            shard_size=_count(config, "shard_size", 0) or None,
            forward_prefetch=_prefetch_count(config, "forward_prefetch") or 0,
            backward_prefetch=_prefetch_count(config, "backward_prefetch"),
        )

    def with_precision_of(
        self, dtype: torch.dtype | None, *, takes_tokens: bool
    ) -> tuple[Sharding, torch.dtype | None]:
        """Returns the settings for a run in the given precision, and the dtype of autocast that is still needed.

        With bfloat16, FSDP2 gathers the weights in bfloat16 and sums gradients in float32. Under autocast, it would
        gather the weights in float32, and a bfloat16 copy of all weights would be kept until the backward pass.

        Args:
            dtype: the dtype of forward passes. None for the dtype of the weights.
            takes_tokens: True if the model maps token ids to logits. FSDP2 casts any floating-point input, labels
                included, to the dtype of the gathered weights, which would round a loss that the model computes. A
                model with such inputs therefore keeps autocast.
        """
        half = takes_tokens and dtype is torch.bfloat16
        precision = self.precision
        if precision is None:
            precision = BFLOAT16 if half else MixedPrecision()
        needs_none = half and precision.param_dtype is torch.bfloat16
        return replace(self, precision=precision), None if needs_none else dtype

    def shard_size_among(self, replicas: int, replicas_of_a_machine: int) -> int:
        """Returns the number of ranks that shard one replica.

        Args:
            replicas: the data-parallel size.
            replicas_of_a_machine: the number of data-parallel ranks on one machine, which is the default shard size
                under HYBRID_SHARD.
        """
        if self.strategy == "NO_SHARD":
            return 1
        if self.strategy != "HYBRID_SHARD":
            return replicas
        return self.shard_size or min(replicas, max(replicas_of_a_machine, 1))

    @property
    def keeps_groups(self) -> bool:
        """Whether weights stay sharded over groups of ranks after the forward pass."""
        return not isinstance(self.reshard_after_forward, bool)

    def offload_policy(self, device_type: str) -> OffloadPolicy:
        """Returns torch's offload policy for the sharded weights.

        Args:
            device_type: the type of the device that this rank computes on.
        """
        # Without an accelerator torch refuses to pin memory.
        return CPUOffloadPolicy(pin_memory=device_type != "cpu") if self.cpu_offload else OffloadPolicy()


_RESHARD = "reshard_after_forward"


def _known_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with plain key names, without the prefix `fsdp_` that transformers and Accelerate use."""
    known: dict[str, Any] = {}
    for key, value in config.items():
        name = str(key).removeprefix("fsdp_").replace("offload_params", "cpu_offload")
        if name not in _KEYS and name not in _IGNORED:
            hint = nearest(name, [*_KEYS, *_IGNORED]) or "one of: " + ", ".join(_KEYS)
            raise refused_setting(f"fsdp_config has no setting {str(key)!r}", hint)
        if name in known:
            raise refused_setting(f"fsdp_config gives {name!r} twice", "remove one of them")
        known[name] = value
    return known


def _strategy(fsdp: bool | str | None, config: Mapping[str, Any]) -> str:
    found: dict[str, str] = {}
    for place, value in (("fsdp", fsdp), ("fsdp_config.sharding_strategy", config.get("sharding_strategy"))):
        if isinstance(value, str):
            word = value.upper()
            if word not in _STRATEGIES:
                raise refused_setting(f"{place} is {value!r}", nearest(word, _STRATEGIES), place)
            found[place] = word
    if len(set(found.values())) > 1:
        said = " and ".join(f"{place} is {word}" for place, word in found.items())
        raise refused_setting(said, "remove one of them", "fsdp")
    strategy = next(iter(found.values()), "HYBRID_SHARD" if config.get("shard_size") else "FULL_SHARD")
    if config.get("shard_size") and strategy != "HYBRID_SHARD":
        raise refused_setting(
            f"fsdp_config.shard_size is {config['shard_size']!r}, and {strategy} "
            + ("does not shard the weights" if strategy == "NO_SHARD" else "shards the weights over all replicas"),
            "give sharding_strategy: HYBRID_SHARD, or remove shard_size",
        )
    reshard = config.get(_RESHARD)
    # HYBRID_SHARD with false is HYBRID_SHARD_ZERO2 of Accelerate.
    known = strategy in found.values() and not (strategy == "HYBRID_SHARD" and reshard is False)
    if reshard is not None and known and bool(reshard) != (strategy != "SHARD_GRAD_OP"):
        raise refused_setting(
            f"sharding_strategy {strategy} and reshard_after_forward {reshard!r} contradict each other",
            "remove one of them: SHARD_GRAD_OP is reshard_after_forward: false",
        )
    return strategy


def _wrapping(config: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    layers = config.get("transformer_layer_cls_to_wrap")
    named = _names(layers, "transformer_layer_cls_to_wrap")
    policy = config.get("auto_wrap_policy")
    if policy is None:
        return ("size" if config.get("min_num_params") else "blocks"), named
    if isinstance(policy, str) and (wrap := _WRAP.get(policy.upper())):
        if named and wrap != "blocks":
            message = f"auto_wrap_policy is {policy!r}, and transformer_layer_cls_to_wrap names layers"
            raise refused_setting(message, "remove one of them")
        return wrap, named
    # Any other value names layers, as in auto_wrap_policy: LlamaDecoderLayer.
    return "blocks", (*named, *_names(policy, "auto_wrap_policy"))


def _names(value: Any, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str | type) else value
    if not isinstance(items, Sequence | set | frozenset) or not all(isinstance(item, str | type) for item in items):
        hint = "give the name of a class, or a list of names"
        raise refused_setting(f"fsdp_config.{key} is {value!r}", hint)
    named = [item.__name__ if isinstance(item, type) else item for item in items]
    return tuple(name.strip() for item in named for name in item.split(",") if name.strip())


def _flag(config: Mapping[str, Any], *, name: str) -> bool:
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise refused_setting(f"fsdp_config.{name} is {value!r}", "give true or false")


def _reshard(config: Mapping[str, Any]) -> bool | int:
    value = config[_RESHARD]
    if isinstance(value, bool) or (isinstance(value, int) and value > 1):
        return value
    raise refused_setting(
        f"fsdp_config.{_RESHARD} is {value!r}",
        "give true, false, or the number of ranks that keep the weights sharded after the forward pass, at least 2",
    )


def _count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        hint = "give a whole number of at least 1"
        raise refused_setting(f"fsdp_config.{name} is {value!r}", hint)
    return value


def _prefetch_count(config: Mapping[str, Any], name: str) -> int | None:
    """Returns how many units a prefetch looks ahead, or None for a word of FSDP1, which does not give a number."""
    value = config.get(name)
    # True counts as one unit for `forward_prefetch`, as in FSDP1. FSDP1's `backward_prefetch` gives no number.
    if isinstance(value, int) and value >= 0:
        return int(value) if name == "forward_prefetch" or not isinstance(value, bool) else None
    if value is None or (name == "backward_prefetch" and isinstance(value, str)):
        return None
    hint = "give true, false, or the number of units to look ahead"
    raise refused_setting(f"fsdp_config.{name} is {value!r}", hint)


def _recompute(value: Any) -> Recompute:
    known: dict[Any, Recompute] = {None: "none", False: "none", True: "full"}
    known |= {"none": "none", "full": "full", "selective": "selective"}
    try:
        return known[value]
    except (KeyError, TypeError):
        hint = 'give true, false, "full" or "selective"'
        raise refused_setting(f"fsdp_config.activation_checkpointing is {value!r}", hint) from None


def _warn_of_ignored(config: Mapping[str, Any]) -> None:
    prefetch = config.get("backward_prefetch")
    if prefetch is False or (isinstance(prefetch, str) and prefetch.upper() != "BACKWARD_PRE"):
        if str(prefetch).upper() not in ("BACKWARD_POST", "NO_PREFETCH", "NONE", "FALSE"):
            words = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
            raise refused_setting(
                f"fsdp_config.backward_prefetch is {prefetch!r}", nearest(str(prefetch).upper(), words), "fsdp_config"
            )
        _log.warning(
            "backward_prefetch: %s has no effect: FSDP2 always prefetches the next weights before it computes the "
            "current gradients, as BACKWARD_PRE does",
            prefetch,
        )
    if config.get("limit_all_gathers") is False:
        _log.warning("limit_all_gathers: false has no effect: FSDP2 always limits how far ahead it gathers")
    elif config.get("limit_all_gathers") is not None:
        _flag(config, name="limit_all_gathers")
    for name, instead in _IGNORED.items():
        if name in config and (name, config[name]) != ("version", 2):
            _log.warning("fsdp_config.%s has no effect: %s", name, instead)
