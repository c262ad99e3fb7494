"""Reads weights and optimizer state of a checkpoint of transformers' `Trainer` under the names of a model.

Takes the files of a checkpoint and a model; gives a reader from which each strategy places its own part. The optimizer
state of transformers belongs to numbers, not to names: the parameters get theirs from the groups that transformers
makes (with and without weight decay, each in the order of the model), and shapes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from forgather.errors import CheckpointError
from forgather.ml.adapter_base import is_peft_model, read_saved_adapter
from forgather.ml.checkpoint.files import ADAPTER, OPTIMIZER
from forgather.ml.checkpoint.reader import StoredTensor
from forgather.ml.checkpoint.saved_model import HeldWeights, read_saved_model
from forgather.ml.checkpoint.state import identity_of
from forgather.ml.checkpoint.transformers_folder import TransformersFolder
from forgather.ml.strategy.state import LAYOUT_KEYS
from forgather.value_text import shown

# As in `transformers.Trainer.get_decay_parameter_names`, which needs a trainer.
_NO_DECAY = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
# The state of these names has the shape of the parameter under every optimizer of torch.
_LIKE_WEIGHTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "grad_avg")


class TransformersReader(HeldWeights):
    """A reader of weights and optimizer state of a checkpoint of transformers, which are in memory.

    Args:
        folder: the folder of the checkpoint.
        state: the weights by the names of the model. All names of a tied weight have an entry.
        optimizer: the optimizer state by parameter names, see `LocalState.optimizer`; None if there is none.
    """

    def __init__(self, folder: Path, state: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        super().__init__(folder, state)
        if optimizer is not None:
            self.optimizer = {**optimizer, "state": self._described(optimizer["state"], "")}

    def _described(self, value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: self._described(item, f"{name}/{key}") for key, item in value.items()}
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        # A slash first: no weight has such a name.
        self._held[name] = value
        return StoredTensor(OPTIMIZER, name, value.dtype, value.shape)


def weights_by_name(theirs: TransformersFolder, model: nn.Module) -> dict[str, Any]:
    """Returns the weights of a checkpoint by the names of the model. A tied weight has an entry for each of its names.

    Args:
        theirs: the checkpoint.
        model: the whole model, whose weights may be on the meta device.

    Raises:
        CheckpointError: FG614 if the checkpoint has no weights in the format of safetensors; FG489 if they do not fit
            the model.
    """
    if not theirs.weight_files:
        raise CheckpointError(
            f"the checkpoint {str(theirs.folder)!r} has no weights in the format of safetensors",
            code="FG614",
            hint="save it again with a release of transformers that writes safetensors (4.35 or later)",
        )
    model = getattr(model, "stands_for", model)
    if is_peft_model(model) and theirs.weight_files == [ADAPTER]:
        return dict(read_saved_adapter(theirs.folder, model).state())
    found, state = theirs.weights(), model.state_dict(keep_vars=True)
    # Of a tied weight, the file has one name.
    by_memory = {
        identity_of(state[name]): value for name, value in found.items() if isinstance(state.get(name), Tensor)
    }
    named = {
        name: found.get(name, by_memory.get(identity_of(value)))
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    if not (found.keys() - state.keys() or any(value is None for value in named.values())):
        return named
    if isinstance(model, PreTrainedModel):
        # The class may give weights other names in files, and knows how to read them.
        return dict(read_saved_model(theirs.folder, model).state())
    return {**found, **{name: value for name, value in named.items() if value is not None}}


def optimizer_by_name(
    state: Mapping[str, Any], model: nn.Module, groups: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, Any]:
    """Returns an optimizer state of transformers by parameter names, see `LocalState.optimizer`.

    Args:
        state: the state dict of the optimizer.
        model: the whole model, whose weights may be on the meta device or sharded.
        groups: the parameter groups of the present optimizer, whose settings the saved groups must have.
        folder: the folder of the checkpoint, for messages.

    Raises:
        CheckpointError: FG616 if no order that transformers makes fits the numbers and shapes, or if the state is that
            of another optimizer, or has another form than torch writes.
    """
    _refuse_other_form(state, folder)
    saved = state["param_groups"]
    own = {name for group in groups[:1] for name in group if name not in ("params", "initial_lr", *LAYOUT_KEYS)}
    for group in saved:
        theirs = {name for name in group if name not in ("params", "param_names", "initial_lr", *LAYOUT_KEYS)}
        if own and theirs != own:
            differing = ", ".join(sorted(theirs ^ own))
            raise _unmatched(folder, f"it is that of another optimizer, whose groups differ in {differing}")
    shapes = {name: _shape(one) for name, one in model.named_parameters()}
    numbers = [list(group["params"]) for group in saved]
    for order in _orders(model):
        if [len(names) for names in order] != [len(group) for group in numbers]:
            continue
        name_of = {
            number: name
            for group, names in zip(numbers, order, strict=True)
            for number, name in zip(group, names, strict=True)
        }
        if all(_fits(state["state"].get(number, {}), shapes[name]) for number, name in name_of.items()):
            return {
                "state": {name: state["state"][number] for number, name in name_of.items() if number in state["state"]},
                "param_groups": [
                    {key: value for key, value in group.items() if key != "param_names"}
                    | {"params": [name_of[number] for number in group["params"]]}
                    for group in saved
                    if group["params"]
                ],
            }
    sizes = " and ".join(str(len(group)) for group in numbers)
    raise _unmatched(folder, f"its groups of {sizes} weights are not those that transformers makes of this model")


def _refuse_other_form(state: Mapping[str, Any], folder: Path) -> None:
    """Raises FG616 for a state that is not built as torch builds it: an optimizer would fail in its first step."""
    groups, entries = state["param_groups"], state["state"]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise _unmatched(folder, "its groups are no list of mappings")
    numbers = [group.get("params") for group in groups]
    if not all(isinstance(one, list) and all(type(number) is int for number in one) for one in numbers):
        raise _unmatched(folder, "a group has no list of the numbers of its weights")
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise _unmatched(folder, "the state of a weight is no mapping")
    for number, entry in entries.items():
        wrong = [key for key in _LIKE_WEIGHTS if entry.get(key) is not None and not isinstance(entry[key], Tensor)]
        wrong += [key for key in ("exp_avg", "exp_avg_sq") if key in entry and entry[key] is None]
        if wrong:
            raise _unmatched(folder, f"{wrong[0]} of weight {shown(number)} is {shown(entry[wrong[0]])}, and no tensor")


def _orders(model: nn.Module) -> Iterator[list[list[str]]]:
    """Yields the names of the parameters by groups, in each order that an optimizer of transformers can have."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    decaying = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))  # type: ignore[no-untyped-call]
    yield [[name for name in trained if name in decaying], [name for name in trained if name not in decaying]]
    # A user's optimizer: `AdamW(model.parameters())`.
    yield [trained]
    yield [[name for name, _ in model.named_parameters()]]


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    # ZeRO stage 3 leaves an empty tensor in place of each weight; `ds_shape` is the shape of the whole.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _fits(entry: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    return all(tuple(entry[key].shape) == shape for key in _LIKE_WEIGHTS if isinstance(entry.get(key), Tensor))


def _unmatched(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer state of {str(folder)!r} cannot be given to weights by name: {problem}",
        code="FG616",
        hint="resume with the optimizer and the trainable parameters of that run, or without its moments: "
        "allow_missing: [optimizer]",
    )
