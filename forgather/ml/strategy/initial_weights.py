"""The initial weights of a run, which equal those that a single process would make, for any number of processes.

`make_initial_weights` takes a recipe and the position of this rank, and returns `InitialWeights`: the model on the meta
device, each weight by name, and a method that fills a model or a part of it. One process per machine makes the model on
the CPU, from the random state that a single process would have, and writes the weights to a file that the other
processes read. Every process continues with the random state after the model was made. Tied weights stay tied. The
files are cached up to a size limit. A model that is too large for the cache is written to a temporary folder.

Making the model on the meta device and initializing it on each rank would not give the same weights, because most
weights would be drawn from other random numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor

from forgather.errors import CheckpointError, DistributedError, TrainingError, nearest
from forgather.ml.adapter_base import base_of, names_of_adapter, note_base
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.checkpoint.state import read_state, split_tensors, write_state, write_tensors
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.data.cache import cached_folder, default_cache_dir, prune
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.memory import available_bytes
from forgather.ml.model_class import initial_weights_of, is_quantized, note_initial_weights
from forgather.ml.number_format import format_bytes
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.counter_weights import COUNTER_VERSION, CounterWeights
from forgather.ml.strategy.initial_room import lack_of_room
from forgather.ml.strategy.meta_model import is_plain, meta_model, move_to_meta, set_tensor, tensors_of, without_memory
from forgather.ml.strategy.state import Box, local_box, whole_box
from forgather.ml.strategy.stored_weights import StoredWeights, stored_weights
from forgather.ml.strategy.unset_tensors import forget_unset, has_unset, note_unset
from forgather.ml.strategy.unset_weights import UnsetWeights, unset_weights
from forgather.ml.types import Topology

_log = get_logger(__name__)

KIND = "initial"
# The limits of the cache, as a number of bytes and a number of folders.
MAX_BYTES = 8 << 30
MAX_FOLDERS = 16
_ALIAS = "alias."
_WEIGHTS, _RNG = "weights.safetensors", "random"


class WeightSource(Protocol):
    """Where initial weights come from: a file, an existing model, or the fills of a model.

    `names` are the names of the weights.
    """

    names: list[str]

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of a whole weight.

        Raises:
            KeyError: if there is no weight with this name.
        """
        ...

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of a weight on the CPU, in memory of its own.

        Args:
            fqn: the name of the weight.
            box: the part, as one slice for each dimension.
            dtype: the dtype of the result; None for that of the weight.

        Shapes:
            Returns the lengths of the slices.

        Raises:
            KeyError: if there is no weight with this name.
        """
        ...


@dataclass(frozen=True, slots=True)
class SeedCheckpoint:
    """The initial weights of a model, stored in a folder.

    Args:
        folder: the folder of the files.
        model: the model, which is on the meta device.
        rng: the random state after the model was made.
        is_kept: True if the folder is in the cache and stays for later runs. False if it can be removed.
    """

    folder: Path
    model: nn.Module
    rng: dict[str, Any]
    is_kept: bool


class SeedWeights:
    """The weights in a seed checkpoint, by name. The file stays open, so the folder may be removed.

    Args:
        folder: the folder of the seed checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._file = safe_open(folder / _WEIGHTS, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        found = dict(self._file.metadata() or {})
        self._aliases = {name.removeprefix(_ALIAS): of for name, of in found.items() if name.startswith(_ALIAS)}
        self._known = set(self._file.keys())
        self.names = sorted(self._known | set(self._aliases))

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of one weight, see `WeightSource`."""
        return torch.Size(self._file.get_slice(self._stored_name(fqn)).get_shape())

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of one weight, of which only this part is read; see `WeightSource`."""
        name = self._stored_name(fqn)
        # A scalar has no slices.
        found: Tensor = self._file.get_slice(name)[box] if box else self._file.get_tensor(name)
        return found.to(found.dtype if dtype is None else dtype, copy=True)

    def _stored_name(self, fqn: str) -> str:
        original: str = self._aliases.get(fqn, fqn)
        if original not in self._known:
            raise KeyError(fqn)
        return original

    def fits(self, model: nn.Module) -> bool:
        """Returns whether the weights are those of a model: the same names and shapes."""
        shapes = {fqn: tensor.shape for fqn, _, _, tensor in tensors_of(model) if is_plain(tensor)}
        return shapes == {fqn: self.shape(fqn) for fqn in self.names}


def seed_checkpoint(recipe: Recipe) -> SeedCheckpoint:
    """Returns the initial weights of a recipe, from the cache if an earlier run made them.

    Args:
        recipe: the recipe that makes the model.

    Raises:
        TrainingError: FG733 if the model does not fit into the memory of this machine.
    """
    key = recipe.model_key() if recipe.model_key is not None else None
    if key is not None:
        kept = _from_cache(recipe, key)
        if kept is not None:
            return kept
    model = _make_model(recipe)
    rng = _rng_state()
    folder = Path(tempfile.mkdtemp(prefix="forgather-initial-"))
    try:
        _write_weights(folder, model)
    except BaseException:
        # Also after an interrupt: the folder may be as large as the model, and nothing else removes it.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return SeedCheckpoint(folder, model, rng, is_kept=False)


def _from_cache(recipe: Recipe, key: str) -> SeedCheckpoint | None:
    """Returns the initial weights from the cache, and makes and caches them first if the cache does not have them.

    Returns None if the weights cannot be cached.
    """
    made: list[nn.Module] = []
    is_making = False
    before = capture_rng()

    def build(folder: Path) -> None:
        nonlocal is_making
        is_making = True
        made.append(_make_model(recipe, max_bytes=MAX_BYTES))
        is_making = False
        write_state(Draft(LocalStorage(), folder), _RNG, _rng_state())
        _write_weights(folder, made[0])

    try:
        folder = cached_folder(KIND, key, build)
        rng = read_state(folder, _RNG)
        model = made[0] if made else meta_model(recipe.make_model)
        if not SeedWeights(folder).fits(model):
            raise ValueError("the cached ones are those of another model")
    except _TooLarge:
        return None
    except (OSError, SafetensorError, CheckpointError, ValueError) as error:
        if is_making:  # an error of the model itself
            raise
        _log.warning("initial weights are not cached for later runs: %s", error)
        # The caller makes the model again, which must draw the same random numbers.
        restore_rng(before)
        return None
    prune(KIND, max_bytes=MAX_BYTES, max_folders=MAX_FOLDERS)
    return SeedCheckpoint(folder, model, rng, is_kept=default_cache_dir() in folder.parents)


class _Quantized(Exception):  # noqa: N818 - no error: every process loads the model
    """Raised if a model is quantized: its weights have parts that a file of tensors lacks.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class _TooLarge(Exception):  # noqa: N818 - no error: the model is made, and not kept
    """Raised if a model is too large for the cache."""


def _make_model(recipe: Recipe, *, max_bytes: int | None = None) -> nn.Module:
    needed = _size_of(recipe.make_model)
    if needed is not None:
        _refuse_too_large(needed)
        if max_bytes is not None and needed > max_bytes:
            raise _TooLarge
        if max_bytes is None and (lacks := lack_of_room(needed)) is not None:
            _log.warning("initial weights: %s", lacks)
    model = recipe.make_model()
    # Known only now: the files of a model may say that it is quantized, where the config does not.
    if is_quantized(model):
        raise _Quantized(model)
    return model


def _rng_state() -> dict[str, Any]:
    # The model is made on the CPU, which draws nothing from CUDA's generators.
    return {name: state for name, state in capture_rng().items() if name != "cuda"}


def _write_weights(folder: Path, model: nn.Module) -> None:
    """Writes the tensors of a model into a folder, and moves the model to the meta device."""
    tensors, aliases, _ = split_tensors(move_to_meta(model))
    write_tensors(Draft(LocalStorage(), folder), _WEIGHTS, tensors, {_ALIAS + name: of for name, of in aliases.items()})


def _size_of(make_model: Callable[[], nn.Module]) -> int | None:
    """Returns the memory that a model needs, or None if the model cannot be made without values.

    The random state is not changed.

    Units:
        bytes.
    """
    before = capture_rng()
    model = without_memory(make_model)
    restore_rng(before)
    if model is None:
        return None
    return sum(tensor.nbytes for tensor in {id(t): t for _, _, _, t in tensors_of(model)}.values())


def _refuse_too_large(needed: int) -> None:
    """Raises an error if a model would use up the memory of this machine while it is made.

    Args:
        needed: the memory that the model needs, in bytes.

    Raises:
        TrainingError: FG733 if the model needs more memory than is available.
    """
    # The system would kill the process without a message.
    available = available_bytes()
    if available is not None and needed > available:
        raise TrainingError(
            f"the model takes {format_bytes(needed)}, and this machine has {format_bytes(available)} of free memory",
            code="FG733",
            hint="set initial_weights: counter, by which each process computes its slices of the weights, start from a "
            "checkpoint (forgather.ml.models:from_pretrained), or set a smaller dtype",
        )


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


_shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Context manager in which models are built without memory for weights and without communication."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def has_shapes_only() -> bool:
    """Returns whether models are built without memory for weights and without communication."""
    return _shapes_only.get()


class _Shapes(InitialWeights):
    """The model of a recipe, with shapes but without values."""

    def __init__(self, recipe: Recipe, topology: Topology) -> None:
        model = meta_model(recipe.make_model)
        names = [fqn for fqn, *_ in tensors_of(model)]
        super().__init__(_ModelValues({}, names), lambda: model, topology.device)

    def fill(self, module: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Allocates the buffers, which are small. Parameters stay on the meta device, or become fake tensors."""
        if active_fake_mode() is not None:
            fill_with_fakes(module, device or self._device)
            return
        for _, owner, name, old in list(tensors_of(module)):
            if name in owner._buffers and is_plain(old) and old.is_meta:
                owner._buffers[name] = torch.zeros_like(old, device=device or self._device)


def fill_with_fakes(module: nn.Module, device: torch.device | str = "cpu") -> None:
    """Replaces the meta tensors of a module by fake ones, with which it can compute shapes without memory.

    It must be called in a `FakeTensorMode`. Tied weights stay tied.

    Args:
        module: the module, which is changed in place.
        device: the device that the fake tensors claim to be on.
    """
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for _, owner, name, old in list(tensors_of(module)):
        if not (isinstance(old, DTensor) or is_plain(old)) or not old.is_meta:
            continue
        if id(old) not in done:
            local = old.to_local() if isinstance(old, DTensor) else old
            new = torch.empty_strided(local.shape, local.stride(), dtype=old.dtype, device=device)
            if not (isinstance(old, nn.Parameter) or new.is_floating_point() or new.is_complex()):
                # A trace computes integers for real: positions and kinds of tokens are looked up in tables.
                new.zero_()
            if isinstance(old, DTensor):
                new = DTensor.from_local(
                    new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
                )
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                new.__dict__.update({key: value for key, value in vars(old).items() if key not in vars(new)})
            done[id(old)] = (old, new)
        set_tensor(owner, name, done[id(old)][1])


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
        except _Quantized as found:
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
        return made.pop() if made else _unpickled(mine["skeleton"]) or meta_model(recipe.make_model)

    return InitialWeights(weights, make_skeleton, topology.device)


def _pickled(model: nn.Module) -> bytes | None:
    """Returns a model without values as bytes for other ranks, or None if it cannot be pickled."""
    try:
        return pickle.dumps(model)
    except Exception as error:  # noqa: BLE001 - anything may be an attribute of a user's model
        _log.info("every rank builds the model itself: it cannot be pickled (%s)", error)
        return None


def _unpickled(sent: bytes | None) -> nn.Module | None:
    if sent is None:
        return None
    try:
        model: nn.Module = pickle.loads(sent)  # noqa: S301 - of a peer of this run, over the run's own group
    except Exception as error:  # noqa: BLE001 - anything may be an attribute of a user's model
        _log.info("this rank builds the model itself: the pickled model cannot be read (%s)", error, all_ranks=True)
        return None
    return model


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
    source = _ModelValues(values, list(values))

    def make_skeleton() -> nn.Module:
        source.values |= move_to_meta(model)
        return model

    return InitialWeights(source, make_skeleton, topology.device)


class _ModelValues:
    """The weights of an existing model.

    Args:
        values: the weights by name.
        names: their names.
    """

    def __init__(self, values: Mapping[str, Tensor], names: list[str]) -> None:
        self.values = dict(values)
        self.names = names

    def shape(self, fqn: str) -> torch.Size:
        return self.values[fqn].shape

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        value = self.values[fqn].detach()
        return value[box].to(device="cpu", dtype=value.dtype if dtype is None else dtype, copy=True)


@torch.no_grad()
def _broadcast(tensor: Tensor, device: torch.device) -> None:
    # On the device: NCCL cannot communicate CPU tensors.
    there = tensor.detach().to(device).contiguous()
    dist.broadcast(there, src=0)
    tensor.copy_(there)
