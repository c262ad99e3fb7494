"""The initial weights of a run, which equal those that a single process would make, for any number of processes.

`make_initial_weights` takes a recipe and the position of this rank, and returns `InitialWeights`: the model on the meta
device, each weight by name, and a method that fills a model or a part of it. With `sequential`, one process per machine
makes the model on the CPU, from the random state that a single process would have, and the others read its weights
(`seed_checkpoint.py`). Every process continues with the random state after the model was made. Tied weights stay tied.

Making the model on the meta device and initializing it on each rank would not give the same weights, because most
weights would be drawn from other random numbers.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor

from forgather.errors import DistributedError, nearest
from forgather.ml.adapter_base import base_of, names_of_adapter, note_base
from forgather.ml.checkpoint.rng import restore_rng
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.model_class import initial_weights_of, note_initial_weights
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.counter_weights import COUNTER_VERSION, CounterWeights
from forgather.ml.strategy.meta_model import is_plain, meta_model, move_to_meta, set_tensor, tensors_of
from forgather.ml.strategy.seed_checkpoint import (
    QuantizedModel,
    SeedWeights,
    pickled_skeleton,
    seed_checkpoint,
    unpickled_skeleton,
)
from forgather.ml.strategy.shapes_only import fill_with_fakes, has_shapes_only
from forgather.ml.strategy.state import local_box, whole_box
from forgather.ml.strategy.stored_weights import StoredWeights, stored_weights
from forgather.ml.strategy.unset_tensors import forget_unset, has_unset, note_unset
from forgather.ml.strategy.unset_weights import UnsetWeights, unset_weights
from forgather.ml.strategy.weight_source import ModelValues, WeightSource
from forgather.ml.types import Topology

_log = get_logger(__name__)


class InitialWeights:
    """The initial weights by name, and the model that they belong to.

    Args:
        source: where the weights come from.
        make_skeleton: a function that returns the model on the meta device.
        device: the default device of filled tensors.
    """

    def __init__(
        self,
        source: WeightSource,
        make_skeleton: Callable[[], nn.Module],
        device: torch.device,
    ) -> None:
        self._source = source
        self._make_skeleton = make_skeleton
        self._device = device
        self.names = source.names

    def on_meta(self) -> nn.Module:
        """Returns the model with every parameter and buffer on the meta device, where they take no memory.

        If the recipe returns an existing model, that model is moved to the meta device, and its values are kept until
        `fill`.
        """
        return self._make_skeleton()

    def read(self, fqn: str) -> Tensor:
        """Returns a parameter or buffer, whole and on the CPU. Only this tensor is read or computed.

        Args:
            fqn: the name of the parameter or buffer.

        Shapes:
            Returns the shape of the whole tensor.

        Raises:
            DistributedError: FG731 if there is no initial weight with this name.
        """
        return self._source.part(fqn, whole_box(self._shape(fqn)))

    def _shape(self, fqn: str) -> torch.Size:
        try:
            return self._source.shape(fqn)
        except KeyError:
            raise DistributedError(
                f"the initial weights have no {fqn!r}",
                code="FG731",
                hint=nearest(fqn, self.names) or "a part of a model must keep the names of its modules",
            ) from None

    def fill(self, module: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Sets the values of all parameters and buffers in a model, or in a part of a model.

        A tensor on the meta device is replaced by a tensor on `device`. Any other tensor is written in place. Of a
        DTensor, only the local part is read or computed.

        Args:
            module: the model, or a part of it whose modules have the same qualified names as in the whole model.
            device: the device of the tensors that replace meta tensors. None for the device of this rank.

        Raises:
            DistributedError: FG731 if there is no initial weight with a tensor's name, or if its shape differs.
        """
        target = torch.device(device) if device is not None else self._device
        done: dict[int, tuple[Tensor, Tensor]] = {}
        for fqn, owner, name, old in list(tensors_of(module)):
            if type(old) is not DTensor and not is_plain(old):
                continue
            if id(old) not in done:
                done[id(old)] = (old, self._filled(fqn, old, target))
            new = done[id(old)][1]
            if new is not old:
                set_tensor(owner, name, new)
        if isinstance(self._source, UnsetWeights):
            note_unset(module, self._source.unset)

    @torch.no_grad()
    def _filled(self, fqn: str, old: Tensor, device: torch.device) -> Tensor:
        shape = self._shape(fqn)
        if shape != old.shape:
            raise DistributedError(
                f"{fqn!r} has shape {tuple(old.shape)} in the model and {tuple(shape)} in the initial weights",
                code="FG731",
                hint="the model must be the same on every rank: nothing in it may depend on the rank",
            )
        local = self._source.part(fqn, local_box(old), old.dtype)
        if not old.is_meta:
            (old.to_local() if isinstance(old, DTensor) else old).copy_(local)
            return old
        new: Tensor = local.to(device=device).contiguous()
        if isinstance(old, DTensor):
            new = DTensor.from_local(
                new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        new.__dict__.update({name: item for name, item in vars(old).items() if name not in new.__dict__})
        return new


def make_initial_weights(recipe: Recipe, topology: Topology) -> InitialWeights:
    """Returns the initial weights of a recipe, which are equal on all ranks. Collective: every rank must call it.

    Args:
        recipe: the recipe that makes the model.
        topology: the position of this rank.

    Raises:
        DistributedError: FG730 if another rank could not make the model, FG732 if the ranks have different models.
        TrainingError: FG733 if the model does not fit into the memory of this machine.
    """
    if has_shapes_only():
        return _Shapes(recipe, topology)
    if (unset := _unset_on_all(recipe)) is not None:
        return InitialWeights(unset, lambda: unset.model, topology.device)
    if recipe.initial_weights == "counter":
        weights = CounterWeights(recipe.make_model)
        refuse_other_models(weights.digest())
        note_initial_weights(weights.model, f"counter-{COUNTER_VERSION}")
        if (base := base_of(weights.model)) is not None and not base.digest:
            # The fills stand for the weights that have no values yet.
            left_out = names_of_adapter(weights.model)
            note_base(weights.model, replace(base, digest=f"counter-{weights.digest(left_out)}"))
        return InitialWeights(weights, lambda: weights.model, topology.device)
    if (stored := _stored_of_all(recipe)) is not None:
        return InitialWeights(stored, lambda: stored.model, topology.device)
    if recipe.model_is_made_anew:
        return _from_seed(recipe, topology)
    return _from_existing_model(recipe.make_model(), topology)


def _unset_on_all(recipe: Recipe) -> UnsetWeights | None:
    """Returns weights that wait for a checkpoint, if there is one and no rank needs their values. Collective."""
    if recipe.is_resumed is None or not collectives.run_on_main(recipe.is_resumed):
        return None
    unset = unset_weights(recipe)
    digests = collectives.all_gather(None if unset is None else unset.digest())
    return unset if digests[0] is not None and all(other == digests[0] for other in digests) else None


def make_unset_weights(
    model: nn.Module, recipe: Recipe, topology: Topology, *, parts: Sequence[nn.Module] | None = None
) -> None:
    """Gives a model that waits for a checkpoint the initial weights of a recipe. Collective: every rank must call it.

    Args:
        model: the whole model, with which it is kept how the weights were made.
        recipe: the recipe that makes the model.
        topology: the position of this rank.
        parts: the parts of the model on this rank; None if the rank has the model, or its shards.

    Raises:
        DistributedError: the errors of `make_initial_weights`.
        TrainingError: the errors of `make_initial_weights`.
    """
    waiting = [module for module in (parts or [model]) if has_unset(module)]
    if not waiting:
        return
    weights = make_initial_weights(replace(recipe, is_resumed=None), topology)
    for module in waiting:
        weights.fill(module)
        forget_unset(module)
    if recipe.initial_weights == "counter" and (made := initial_weights_of(weights.on_meta())) is not None:
        note_initial_weights(model, made)


def _stored_of_all(recipe: Recipe) -> StoredWeights | None:
    """Returns the stored weights of a loaded model, if every rank can read its slices of them. Collective."""
    if recipe.stored_in is None or collectives.size() == 1:
        return None
    stored = stored_weights(recipe.make_model, recipe.stored_in)
    facts = collectives.all_gather(None if stored is None else stored.facts())
    return stored if facts[0] is not None and all(other == facts[0] for other in facts) else None


def build_whole(recipe: Recipe, topology: Topology) -> nn.Module:
    """Returns the whole model of a recipe with its initial weights, on the device of this rank.

    Collective with `initial_weights: counter` or before a resume: every rank must call it.

    Args:
        recipe: the recipe that makes the model.
        topology: the position of this rank.

    Raises:
        DistributedError: FG732 if the ranks have different models.
        TrainingError: FG619 if the fills of the model cannot be recorded.
    """
    unset = None if has_shapes_only() else _unset_on_all(recipe)
    if unset is None and (recipe.initial_weights == "sequential" or has_shapes_only()):
        return recipe.make_model().to(topology.device)
    if unset is not None:
        weights = InitialWeights(unset, lambda: unset.model, topology.device)
    else:
        weights = make_initial_weights(replace(recipe, is_resumed=None), topology)
    model = weights.on_meta()
    weights.fill(model)
    return model


class _Shapes(InitialWeights):
    """The model of a recipe, with shapes but without values."""

    def __init__(self, recipe: Recipe, topology: Topology) -> None:
        model = meta_model(recipe.make_model)
        names = [fqn for fqn, *_ in tensors_of(model)]
        super().__init__(ModelValues({}, names), lambda: model, topology.device)

    def fill(self, module: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Allocates the buffers, which are small. Parameters stay on the meta device, or become fake tensors."""
        if active_fake_mode() is not None:
            fill_with_fakes(module, device or self._device)
            return
        for _, owner, name, old in list(tensors_of(module)):
            if name in owner._buffers and is_plain(old) and old.is_meta:
                owner._buffers[name] = torch.zeros_like(old, device=device or self._device)


def _from_seed(recipe: Recipe, topology: Topology) -> InitialWeights:
    made: list[nn.Module] = []
    outcome: dict[str, Any] = {}
    error: BaseException | None = None
    if topology.local_rank == 0:
        try:
            seed = seed_checkpoint(recipe)
            made.append(seed.model)
            outcome |= {"folder": str(seed.folder), "skeleton": pickled_skeleton(seed.model), "rng": seed.rng}
            outcome["is_kept"] = seed.is_kept
        except QuantizedModel as found:
            made.append(found.model)
            outcome["is_quantized"] = True
        except Exception as caught:  # noqa: BLE001 - reported to the other ranks, then raised
            error = caught
            outcome["error"] = f"{type(caught).__name__}: {caught}".splitlines()[0]
    # A failure is sent like a result: the other ranks would otherwise wait for it until the group times out.
    outcomes = collectives.all_gather(outcome)
    if error is not None:
        raise error
    for rank, other in enumerate(outcomes):
        if "error" in other:
            raise DistributedError(
                f"rank {rank} could not make the model: {other['error'][:200]}",
                code="FG730",
                hint="see the message of that rank",
            )
    if any("is_quantized" in other for other in outcomes):
        return _from_existing_model(made.pop() if made else recipe.make_model(), topology)
    # The file of this machine: launchers give consecutive ranks to the processes of a machine.
    mine = outcomes[(topology.rank - topology.local_rank) if len(outcomes) > 1 else 0]
    weights = SeedWeights(Path(mine["folder"]))
    restore_rng(mine["rng"])
    # A barrier: the folder must not be removed before every process has opened the file.
    collectives.all_gather(None)
    if topology.local_rank == 0 and not mine["is_kept"]:  # every process has the file open
        shutil.rmtree(mine["folder"], ignore_errors=True)

    def make_skeleton() -> nn.Module:
        return made.pop() if made else unpickled_skeleton(mine["skeleton"]) or meta_model(recipe.make_model)

    return InitialWeights(weights, make_skeleton, topology.device)


def refuse_other_models(digest: str) -> int:
    """Raises an error on every rank if the ranks have different models; returns the number of ranks. Collective.

    Args:
        digest: a digest of what must be equal on all ranks.

    Raises:
        DistributedError: FG732.
    """
    digests = collectives.all_gather(digest)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise DistributedError(
                f"rank {rank} has a different model than rank 0: names, shapes or types of the weights differ",
                code="FG732",
                hint="nothing in the construction of the model may depend on the rank",
            )
    return len(digests)


def _from_existing_model(model: nn.Module, topology: Topology) -> InitialWeights:
    values = {fqn: tensor for fqn, _, _, tensor in tensors_of(model)}
    # Values are not compared, because rank 0 broadcasts its values to all ranks below.
    shapes = [(fqn, str(tensor.dtype), tuple(tensor.shape)) for fqn, tensor in values.items()]
    several = refuse_other_models(hashlib.sha256(repr(shapes).encode()).hexdigest()) > 1
    done: set[int] = set()
    for tensor in values.values():
        if id(tensor) not in done and several:
            done.add(id(tensor))
            _broadcast(tensor, topology.device)
    source = ModelValues(values, list(values))

    def make_skeleton() -> nn.Module:
        source.values |= move_to_meta(model)
        return model

    return InitialWeights(source, make_skeleton, topology.device)


@torch.no_grad()
def _broadcast(tensor: Tensor, device: torch.device) -> None:
    # On the device: NCCL cannot communicate CPU tensors.
    there = tensor.detach().to(device).contiguous()
    dist.broadcast(there, src=0)
    tensor.copy_(there)
