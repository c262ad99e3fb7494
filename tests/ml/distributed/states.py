"""States of strategies as tests look at them: whole, in memory, by way of the files of a checkpoint.

Every process calls each function.
"""

import tempfile
from pathlib import Path

from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.manifest import MANIFEST, Manifest
from forgather.ml.checkpoint.reader import CheckpointReader, StoredTensor
from forgather.ml.checkpoint.save_plan import LocalState, SavePlanner
from forgather.ml.checkpoint.state import file_chunks
from forgather.ml.checkpoint.storage import LocalStorage, write_file
from forgather.ml.distributed import collectives


def write(held, folder):
    """Writes what the processes hold into a folder; returns the files of this one."""
    collectives.run_on_main(lambda: Path(folder).mkdir(parents=True, exist_ok=True))
    shards = SavePlanner().plan(held)
    draft = Draft(LocalStorage(), Path(folder))
    for name, tensors in shards.tensors.items():
        draft.write(name, file_chunks(tensors))
    for name, content in shards.texts.items():
        draft.write(name, [content])
    files = {name: fact for part in collectives.all_gather(draft.files) for name, fact in part.items()}
    manifest = Manifest(0, files).to_bytes()
    collectives.run_on_main(lambda: write_file(draft.storage, draft.folder / MANIFEST, [manifest]))
    return draft.files


def read(folder):
    """Returns {"model": weights by all their names, "optimizer": {"state": ..., "param_groups": ...}}, whole."""

    made = {}

    def whole(value):
        if isinstance(value, StoredTensor):
            if value not in made:
                made[value] = saved.whole(value)
            return made[value]
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return type(value)(map(whole, value)) if isinstance(value, list | tuple) else value

    with CheckpointReader(Path(folder)) as saved:
        return {"model": whole(dict(sorted(saved.weights.items()))), "optimizer": whole(saved.optimizer)}


def _in_a_folder(act):
    folder = collectives.run_on_main(tempfile.mkdtemp)
    try:
        return act(folder)
    finally:
        collectives.all_gather(None)


def state_of(strategy):
    """Returns the state of a strategy, whole on every process."""

    def act(folder):
        write(strategy.capture(), folder)
        return read(folder)

    return _in_a_folder(act)


def give_state(strategy, state):
    """Restores a strategy from a whole state."""

    def act(folder):
        write(LocalState(weights=state["model"], optimizer=state.get("optimizer")), folder)
        restore(strategy, folder)

    _in_a_folder(act)


def restore(strategy, folder):
    """Restores a strategy from a checkpoint folder."""
    with CheckpointReader(Path(folder)) as saved:
        strategy.restore(saved)
        strategy.restore_optimizer(saved)
