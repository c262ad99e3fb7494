"""Save plan of a distributed checkpoint: which rank writes which chunk of which tensor, and the index of all chunks.

Each rank passes its local state (whole tensors and DTensor shards) and gets the files that it must write. The main
process also gets the JSON files that describe the whole checkpoint. State that is replicated on several ranks is
written once, by the rank that has the least to write. Nothing is pickled into a file. Planning is collective, and
writing is not. The main process plans, and keeps the index; another rank gets its own part. A state of the same names,
shapes, types and placements as before is not planned again.

The planners of `torch.distributed.checkpoint` determine which rank writes which chunk.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from forgather.ml.checkpoint.files import EXTRA_STATE, INDEX, MODEL, OPTIMIZER, SLICES, WEIGHTS_INDEX, json_bytes
from forgather.ml.checkpoint.state import DTYPES, pack_tree, refuse_unknown_type
from forgather.ml.distributed import collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """The part of a model's and an optimizer's state that is in the memory of one rank.

    Args:
        weights: the parameters and buffers of this rank by their first names, as whole tensors or DTensors.
        aliases: a mapping from each further name of a tied weight to its first name.
        extra: the entries of the model's state dict that are not tensors, by name.
        optimizer: the optimizer state as {"state": {parameter name: tensors and numbers}, "param_groups": [{"params":
            parameter names, ...settings}]}, possibly with further entries. None if there is no optimizer.

    Shapes:
        weights: any. The shape of a DTensor is its global shape.
    """

    weights: Mapping[str, Tensor]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files that one rank writes.

    Args:
        tensors: the tensors by file name and key. For a DTensor, this is the local shard.
        texts: the contents of the JSON files, by name; empty except on the main process.

    Shapes:
        tensors: any.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class _Structure:
    """What the plan of a save depends on, of one rank.

    Args:
        plan: the local plan of the rank.
        aliases: the aliases of tied weights, see `LocalState`.
        sections: the names of the trees of state without tensors.
    """

    plan: SavePlan
    aliases: Mapping[str, str]
    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk that this rank writes.

    Args:
        index: where the chunk is in the state of the rank.
        file: the name of its file.
        key: its key in the file.
    """

    index: MetadataIndex
    file: str
    key: str


class _Planner(DefaultSavePlanner):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(tensors))

    def create_local_plan(self) -> SavePlan:
        """Returns the local plan of this rank, without write items for empty local shards.

        torch also plans write items for empty shards. The index would then list chunks of size zero that no file
        contains.
        """
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if not _is_empty(item)])
        return self.plan


def _is_empty(item: WriteItem) -> bool:
    assert item.tensor_data is not None and item.tensor_data.chunk is not None  # noqa: S101 - tensors alone are planned
    return not math.prod(item.tensor_data.chunk.sizes) and bool(math.prod(item.tensor_data.size))


class SavePlanner:
    """Plans the saves of a run. A plan holds until the structure of the state changes on some rank."""

    def __init__(self) -> None:
        self._structure: _Structure | None = None
        self._parts: list[_Part] = []
        # The files that the plan determines, on the main process.
        self._texts: dict[str, bytes] = {}

    def plan(self, local_state: LocalState) -> RankFiles:
        """Returns the files that this rank must write. Collective: every rank must call it.

        Args:
            local_state: the local state of this rank.

        Raises:
            CheckpointError: FG606, on every rank, if one rank has a value that cannot be stored.
        """
        # Runs as a collective so that a rank that fails here does not leave the others waiting in the gather below.
        planner, local, trees = collectives.run_collectively(lambda: _local_plan_of(local_state))
        structure = _Structure(local, dict(local_state.aliases), tuple(trees))
        # The largest of all ranks, so that every rank takes the same branch.
        if collectives.all_max(float(structure != self._structure)):
            self._plan_again(planner, structure)
        mine: dict[str, dict[str, Tensor]] = {}
        for part in self._parts:
            data = planner.lookup_object(part.index)
            assert isinstance(data, Tensor)  # noqa: S101 - tensors alone are planned
            mine.setdefault(part.file, {})[part.key] = data.detach()
        # Of replicated state, all ranks have the same tree, and a large one.
        distinct = collectives.gather_distinct_on_main(json.dumps(trees).encode())
        merged = _merged_texts([json.loads(tree) for tree in distinct])
        return RankFiles(mine, self._texts | merged if collectives.rank() == 0 else {})

    def _plan_again(self, planner: _Planner, structure: _Structure) -> None:
        structures = collectives.gather_on_main(structure)

        def planned() -> list[list[_Part]]:
            plans, metadata = planner.create_global_plan([one.plan for one in structures])
            names = _file_names(plans, metadata)
            aliases = {name: of for one in structures for name, of in one.aliases.items()}
            sections = dict.fromkeys(section for one in structures for section in one.sections)
            self._texts = _planned_texts(list(sections), aliases, plans, metadata, names)
            return [_parts(rank, plan, metadata, names) for rank, plan in enumerate(plans)]

        self._parts = collectives.scatter_from_main(planned)
        self._structure = structure


def _parts(rank: int, plan: SavePlan, metadata: Metadata, names: Mapping[tuple[int, str], str]) -> list[_Part]:
    found = []
    for item in plan.items:
        section, name = item.index.fqn.split("/", 1)
        found.append(_Part(item.index, names[rank, section], _key(name, item, metadata)))
    return found


def _local_plan_of(local_state: LocalState) -> tuple[_Planner, SavePlan, dict[str, Any]]:
    """Returns a planner for the local state, its local plan, and the state without tensors by section.

    In the plan, tensors are named "<section>/<name>", so that one plan covers the weights and the optimizer state.
    """
    tensors = {f"{MODEL}/{name}": tensor for name, tensor in local_state.weights.items()}
    trees: dict[str, Any] = {}
    # Non-tensor entries are packed per section; their tensors join the weights in one plan.
    for section, tree in ((EXTRA_STATE, local_state.extra), (OPTIMIZER, local_state.optimizer)):
        if tree:
            trees[section], found = pack_tree(tree, section)
            tensors |= {f"{section}/{name}": tensor for name, tensor in found.items()}
    for name, tensor in tensors.items():
        refuse_unknown_type(name, tensor)
    planner = _Planner(tensors)
    return planner, planner.create_local_plan(), trees


def _file_names(plans: Sequence[SavePlan], metadata: Metadata) -> dict[tuple[int, str], str]:
    """Returns the file name for each (rank, section). Whole weights get the names that `from_pretrained` expects."""
    writers: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        for section in dict.fromkeys(item.index.fqn.split("/", 1)[0] for item in plan.items):
            writers.setdefault(section, []).append(rank)
    names = {}
    for section, ranks in writers.items():
        # Chunks of weights under the name model.safetensors would look loadable to `from_pretrained`.
        stem = SLICES if section == MODEL and not _is_whole(metadata) else section
        for number, rank in enumerate(ranks, 1):
            # The names of Hugging Face shards, so that whole weights in several files need no conversion.
            suffix = f"-{number:05d}-of-{len(ranks):05d}" if len(ranks) > 1 else ""
            names[rank, section] = f"{stem}{suffix}.safetensors"
    return names


def _is_whole(metadata: Metadata) -> bool:
    """Returns whether every weight is stored as a single chunk."""
    facts: Mapping[str, Any] = metadata.state_dict_metadata
    return all(len(fact.chunks) == 1 for name, fact in facts.items() if name.startswith(f"{MODEL}/"))


def _key(name: str, item: WriteItem, metadata: Metadata) -> str:
    """Returns the key of a chunk in its file: the name of the tensor, with offsets if the tensor has several chunks."""
    facts: Any = metadata.state_dict_metadata[item.index.fqn]
    if len(facts.chunks) == 1:
        return name
    return f"{name}@{','.join(map(str, item.index.offset or ()))}"


def _planned_texts(
    sections: Sequence[str],
    aliases: Mapping[str, str],
    plans: Sequence[SavePlan],
    metadata: Metadata,
    names: Mapping[tuple[int, str], str],
) -> dict[str, bytes]:
    """Returns the JSON files that only the plan determines: the index, and that of `from_pretrained`."""
    index: dict[str, dict[str, Any]] = {MODEL: {}, **{section: {} for section in sections}}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            section, name = item.index.fqn.split("/", 1)
            assert item.tensor_data is not None and item.tensor_data.chunk is not None  # noqa: S101 - see _is_empty
            chunk = {
                "offsets": list(item.tensor_data.chunk.offsets),
                "sizes": list(item.tensor_data.chunk.sizes),
                "file": names[rank, section],
                "key": _key(name, item, metadata),
            }
            dtype, shape = DTYPES[item.tensor_data.properties.dtype], list(item.tensor_data.size)
            facts = index.setdefault(section, {}).setdefault(name, {"dtype": dtype, "shape": shape, "chunks": []})
            facts["chunks"].append(chunk)
    # Without indentation: the index of a large model that is sharded over many ranks has hundreds of thousands of
    # chunks.
    texts = {INDEX: json.dumps({"tensors": index, "aliases": aliases}).encode() + b"\n"}
    # A single file of whole weights needs no index for `from_pretrained`.
    if len(files := {names[key] for key in names if key[1] == MODEL}) > 1 and _is_whole(metadata):
        texts[WEIGHTS_INDEX] = json_bytes(_hf_index(index[MODEL], plans))
        assert all(file.startswith(MODEL) for file in files)  # noqa: S101 - see _file_names
    return texts


def _merged_texts(trees: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Returns the JSON files of the state without tensors, merged from the trees of all ranks."""
    texts = {}
    for section, merge in ((EXTRA_STATE, _merged_extra), (OPTIMIZER, merged_optimizers)):
        found = [tree[section] for tree in trees if section in tree]
        if found:
            texts[f"{section}.json"] = json_bytes(merge(found))
    return texts


def _hf_index(weights: Mapping[str, Any], plans: Sequence[SavePlan]) -> dict[str, Any]:
    items = (item for plan in plans for item in plan.items if item.index.fqn.startswith(f"{MODEL}/"))
    where = {name: facts["chunks"][0]["file"] for name, facts in sorted(weights.items())}
    return {"metadata": {"total_size": sum(item.tensor_storage_size() or 0 for item in items)}, "weight_map": where}


def _merged_extra(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # Reversed, so that the lowest rank wins where several have an entry.
    return {name: value for tree in reversed(trees) for name, value in tree.items()}


def merged_optimizers(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the optimizer state of the whole model, merged from the optimizer states of all ranks.

    With pipeline parallelism each rank has different parameters. Parameters are added to the parameter group that has
    equal settings.

    Args:
        trees: the optimizer state of each rank, in the form of `LocalState.optimizer`.
    """
    first = trees[0]
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in first["param_groups"]]
    known: set[str] = set()
    for number, tree in enumerate(trees):
        state = {**tree["state"], **state}
        for place, group in enumerate(tree["param_groups"]):
            new = [name for name in group["params"] if name not in known]
            known.update(new)
            if number == 0:
                groups[place]["params"] += new
            elif new:
                _group_of(group, groups)["params"] += new
    # Torch refuses an optimizer state without groups, so empty groups are kept when all of them are empty.
    filled = [group for group in groups if group["params"]]
    return {**first, "state": dict(sorted(state.items())), "param_groups": filled or groups}


def _group_of(group: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the parameter group that has the same settings as `group`; appends an empty one if there is none."""
    for other in groups:
        if {**other, "params": None} == {**group, "params": None}:
            return other
    groups.append({**group, "params": []})
    return groups[-1]
