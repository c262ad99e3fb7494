"""The weights that a run begins with: those of one process, however many hold them.

Takes a recipe and who this process is; gives `InitialWeights`: the model without memory, any of its weights by name,
and models or parts of models filled with them. Keeps true: the model is made once on each machine, on the CPU, as one
process makes it and before any other use of the random numbers; every process goes on with the random numbers as they
were after that; a weight that two modules share stays shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgather.errors import DistributedError, nearest
from forgather.ml.checkpoint.rng import restore_rng
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.initial_weights_file import SeedWeights, seed_checkpoint
from forgather.ml.strategy.meta_model import emptied, is_plain, put, skeleton, tensors_of
from forgather.ml.strategy.state import like_local
from forgather.ml.types import Topology

_log = get_logger(__name__)


class InitialWeights:
    """Weights by name, and the model that they belong to.

    Args:
        find: gives a weight, whole and on the CPU; raises KeyError for a name that it does not know.
        names: the names it knows.
        make_skeleton: gives the model with every tensor on the meta device.
        device: where weights go by default.
        existing: the model, where it was there before.
    """

    def __init__(
        self,
        find: Callable[[str], Tensor],
        names: list[str],
        make_skeleton: Callable[[], nn.Module],
        device: torch.device,
        existing: nn.Module | None = None,
    ) -> None:
        self._existing = existing
        self._find = find
        self._make_skeleton = make_skeleton
        self._device = device
        self.names = names

    def on_meta(self) -> nn.Module:
        """Returns the model with every parameter and buffer on the meta device; it takes no memory.

        Where the recipe gave a model that exists, it is that one: its values are kept here until `fill`.
        """
        return self._make_skeleton()

    def read(self, fqn: str) -> Tensor:
        """Returns a parameter or buffer, whole and on the CPU; the file of the weights is read as far as it is used.

        Raises:
            DistributedError: FG731 for a name that the model does not have.
        """
        try:
            return self._find(fqn)
        except KeyError:
            raise DistributedError(
                f"the initial weights have no {fqn!r}",
                code="FG731",
                hint=nearest(fqn, self.names) or "parts of a model keep the names of its modules",
            ) from None

    def fill(self, module: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Gives every parameter and buffer of a model, or of a part that keeps its names, its value.

        A tensor on the meta device is replaced by one on `device`; any other is written where it lies. Of a sharded
        one (a DTensor) only the local part is read.

        Args:
            module: the model, or a part of it that keeps the names of its modules.
            device: where tensors on the meta device go; that of this process by default.

        Raises:
            DistributedError: FG731 for a name or a shape that the weights do not have.
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
                put(owner, name, new)

    def whole(self) -> nn.Module:
        """Returns the model with its weights, on the CPU; one that exists already as it is."""
        if self._existing is not None:
            return self._existing
        model = self.on_meta()
        self.fill(model, device="cpu")
        return model

    @torch.no_grad()
    def _filled(self, fqn: str, old: Tensor, device: torch.device) -> Tensor:
        value = self.read(fqn)
        if value.shape != old.shape:
            raise DistributedError(
                f"{fqn!r} is of shape {tuple(old.shape)}, and the initial weights have {tuple(value.shape)}",
                code="FG731",
                hint="the model must be the same on every rank: nothing in it may depend on the rank",
            )
        local = like_local(value, old)
        if not old.is_meta:
            (old.to_local() if isinstance(old, DTensor) else old).copy_(local)
            return old
        new: Tensor = local.to(device=device, dtype=old.dtype, copy=True).contiguous()
        if isinstance(old, DTensor):
            new = DTensor.from_local(
                new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        new.__dict__.update({name: item for name, item in vars(old).items() if name not in new.__dict__})
        return new


def initial_state(recipe: Recipe, topology: Topology) -> InitialWeights:
    """Returns the weights of a recipe, the same on every process; every process calls this.

    Raises:
        DistributedError: FG730 where another process could not make the model, FG732 where the processes were given
            different models.
        TrainingError: FG733 for a model that does not fit into the memory of this machine.
    """
    if _shapes_only.get():
        return _Shapes(recipe, topology)
    if recipe.model_is_made_anew:
        return _from_seed(recipe, topology)
    return _of_existing(recipe, topology)


_shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Leaves weights without memory and values: what is built has its shapes alone. Nobody is asked or waited for."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


class _Shapes(InitialWeights):
    """The model of a recipe, and no values."""

    def __init__(self, recipe: Recipe, topology: Topology) -> None:
        model = skeleton(recipe.make_model)
        names = [fqn for fqn, *_ in tensors_of(model)]
        super().__init__(dict[str, Tensor]().__getitem__, names, lambda: model, topology.device)

    def fill(self, module: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Gives buffers, which are small, memory; weights stay as they are."""
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
            outcome |= {"folder": str(seed.folder), "skeleton": _pickled(seed.model), "rng": seed.rng}
            outcome["is_kept"] = seed.is_kept
        except Exception as caught:  # noqa: BLE001 - told to the other ranks, then raised
            error = caught
            outcome["error"] = f"{type(caught).__name__}: {caught}".splitlines()[0]
    outcomes = collectives.gathered(outcome)
    if error is not None:
        raise error
    for rank, other in enumerate(outcomes):
        if "error" in other:
            raise DistributedError(
                f"rank {rank} could not make the model: {other['error'][:200]}",
                code="FG730",
                hint="look at the message of that rank",
            )
    mine = outcomes[(topology.rank - topology.local_rank) if len(outcomes) > 1 else 0]
    weights = SeedWeights(Path(mine["folder"]))
    restore_rng(mine["rng"])
    collectives.gathered(None)
    if topology.local_rank == 0 and not mine["is_kept"]:  # everyone has the file open, and nobody needs its name
        shutil.rmtree(mine["folder"], ignore_errors=True)

    def make_skeleton() -> nn.Module:
        return made.pop() if made else _unpickled(mine["skeleton"]) or skeleton(recipe.make_model)

    return InitialWeights(weights.find, weights.names, make_skeleton, topology.device)


def _pickled(model: nn.Module) -> bytes | None:
    """Returns a model without values as other ranks can read it; None for one that cannot be sent."""
    try:
        return pickle.dumps(model)
    except Exception as error:  # noqa: BLE001 - anything may be an attribute of a user's model
        _log.info("every rank makes the model by itself: it cannot be sent (%s)", error)
        return None


def _unpickled(sent: bytes | None) -> nn.Module | None:
    if sent is None:
        return None
    try:
        model: nn.Module = pickle.loads(sent)  # noqa: S301 - of a peer of this run, over the run's own group
    except Exception as error:  # noqa: BLE001 - anything may be an attribute of a user's model
        _log.info("this rank makes the model by itself: what was sent cannot be read (%s)", error, all_ranks=True)
        return None
    return model


def _of_existing(recipe: Recipe, topology: Topology) -> InitialWeights:
    model = recipe.make_model()
    values = {fqn: tensor for fqn, _, _, tensor in tensors_of(model)}
    shapes = [(fqn, str(tensor.dtype), tuple(tensor.shape)) for fqn, tensor in values.items()]
    digests = collectives.gathered(hashlib.sha256(repr(shapes).encode()).hexdigest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DistributedError(
                f"rank {rank} was given another model than rank 0: names, shapes or types of the weights differ",
                code="FG732",
                hint="nothing in the construction of the model may depend on the rank",
            )
    done: set[int] = set()
    for tensor in values.values():
        if id(tensor) not in done and len(digests) > 1:
            done.add(id(tensor))
            _broadcast(tensor, topology.device)
    taken: dict[str, Tensor] = {}

    def make_skeleton() -> nn.Module:
        taken.update(emptied(model))
        return model

    def find(fqn: str) -> Tensor:
        return (taken if fqn in taken else values)[fqn].detach()

    return InitialWeights(find, list(values), make_skeleton, topology.device, existing=model)


@torch.no_grad()
def _broadcast(tensor: Tensor, device: torch.device) -> None:
    there = tensor.detach().to(device).contiguous()
    dist.broadcast(there, src=0)
    tensor.copy_(there)
