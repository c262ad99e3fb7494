"""The memory of a training by phase and by module, and a snapshot for torch's viewer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.callbacks.output_target import report_only, run_folder
from forgather.ml.log import get_logger
from forgather.ml.memory import local_tensor, memory_facts, peak_since_last
from forgather.ml.number_format import format_bytes
from forgather.replaced_file import replace_file

_log = get_logger(__name__)

MEMORY_FILE, SNAPSHOT_FILE = "memory.json", "memory_snapshot.pickle"
_MOST_EVENTS = 200_000
_SHOWN_MODULES = 20
_BETWEEN = "between steps"


class MemoryReport(dict[str, Any]):
    """What was measured: `device`, `measured` (what the numbers are), `phases`, `modules`, `snapshot`, `not_measured`.

    `phases` has the peak of each phase, and `modules` a row for each module that has memory of its own: weights,
    gradients, optimizer state, and the tensors that its forward pass saves for the backward pass.

    Units:
        bytes of this rank.
    """

    def __str__(self) -> str:
        lines = [f"memory of {self['device']} ({self['measured']})"]
        lines += [f"  {format_bytes(peak):>10}  peak of {phase}" for phase, peak in self["phases"].items()]
        for row in self["modules"][:_SHOWN_MODULES]:
            parts = ", ".join(
                f"{format_bytes(size)} {name.removesuffix('_bytes').replace('_', ' ')}"
                for name, size in row.items()
                if name.endswith("_bytes") and size and name != "total_bytes"
            )
            lines.append(f"  {format_bytes(row['total_bytes']):>10}  {row['name'] or row['class']} ({parts})")
        if self["snapshot"]:
            lines.append(f"  snapshot: {self['snapshot']}, which https://pytorch.org/memory_viz shows")
        return "\n".join([*lines, *(f"  not measured: {what}" for what in self["not_measured"])])


class MemoryProfiler(TrainerCallback):
    """Measures the memory of a training: as a callback of a trainer, or around a training loop.

    As a callback, it writes `memory.json` into the run folder, and on CUDA a snapshot of all allocations for torch's
    viewer. Around a loop, `profile_training` begins, `phase` names what follows, and `get_memory_report` gives the
    result. The weights are the same as without it.

    Args:
        modules_at_step: the step of the run, counted from its start or resume, in which modules are measured. It is
            slower than the others.
        snapshot: whether allocations are recorded on CUDA, which costs some microseconds for each.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.

    Example:
        >>> profiler = MemoryProfiler()
        >>> profiler.profile_training()
        >>> sorted(profiler.get_memory_report())
        ['device', 'measured', 'modules', 'not_measured', 'phases', 'snapshot']
    """

    def __init__(
        self, modules_at_step: int = 2, *, snapshot: bool = True, run_dir: str | os.PathLike[str] | None = None
    ) -> None:
        refuse_wrong_values("callbacks:MemoryProfiler", locals())
        self.modules_at_step = modules_at_step
        self.snapshot = snapshot
        self.run_dir = run_dir
        self._device = torch.device("cpu")
        self._phase: str | None = None
        self._phases: dict[str, int] = {}
        self._modules: list[dict[str, Any]] = []
        self._missing: dict[str, None] = {}
        self._saved: _SavedTensors | None = None
        self._open = ExitStack()
        self._steps = 0
        self._snapshot_file: Path | None = None
        self._records = False

    def profile_training(self, device: torch.device | str | None = None) -> None:
        """Begins to measure, and forgets what was measured before.

        Args:
            device: the device of the model; by default the current CUDA device, or the CPU without one.
        """
        usual = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._device = usual if device is None else torch.device(device)
        self._phases, self._modules, self._missing, self._steps = {}, [], {}, 0
        self._snapshot_file = None
        if self._device.type == "cuda":
            if self.snapshot:
                torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
                self._records = True
        else:
            self._missing["a snapshot of allocations, which only CUDA has"] = None
        peak_since_last(self._device)
        self._phase = "training"

    @contextmanager
    def phase(self, name: str) -> Iterator[Self]:
        """Context manager for a phase of a training loop, such as "forward", whose peak is measured by itself."""
        before = self._phase
        self._enter(name)
        try:
            yield self
        finally:
            self._enter(before)

    def _enter(self, name: str | None) -> None:
        if self._phase is not None:
            peak = peak_since_last(self._device)
            if peak is None:
                self._missing["peaks, which this system does not report"] = None
                peak = int(memory_facts(self._device)["memory_bytes"])
            self._phases[self._phase] = max(peak, self._phases.get(self._phase, 0))
        self._phase = name

    def get_memory_report(self) -> MemoryReport:
        """Returns what was measured so far."""
        self._enter(self._phase)
        on_cuda = self._device.type == "cuda"
        return MemoryReport(
            device=str(self._device),
            measured="allocated by torch" if on_cuda else "resident memory of the process",
            phases=dict(self._phases),
            modules=self._modules,
            snapshot=None if self._snapshot_file is None else str(self._snapshot_file),
            not_measured=list(self._missing),
        )

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begins to measure."""
        self.profile_training(next(model.parameters()).device)
        self._phase = _BETWEEN

    @report_only
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begins the phase of the forward and backward passes, and to measure modules if this is the step for it."""
        self._enter("forward and backward")
        self._steps += 1
        if self._steps == self.modules_at_step:
            if getattr(args, "torch_compile", False):
                self._missing["modules, because the model is compiled"] = None
            else:
                self._saved = self._open.enter_context(_SavedTensors(model))

    @report_only
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends a micro-batch, whose saved tensors are free now."""
        if self._saved is not None:
            self._saved.end_batch()

    @report_only
    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begins the phase of the update."""
        self._enter("update")
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._open.close()
            saved.end_batch()
            self._modules = module_table(model, optimizer, saved.bytes)

    @report_only
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins the phase between two steps: data, log lines, evaluations and saves."""
        self._enter(_BETWEEN)

    @report_only
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the report and, on CUDA, the snapshot. After an error, they show the memory at the error."""
        self._open.close()
        rank = int(args.process_index)
        folder, suffix = run_folder(args, self.run_dir), f".rank{rank}" if rank else ""
        folder.mkdir(parents=True, exist_ok=True)
        if self._records:
            self._snapshot_file = _with_suffix(folder / SNAPSHOT_FILE, suffix)
            torch.cuda.memory._dump_snapshot(str(self._snapshot_file))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records = False
        text = json.dumps(self.get_memory_report(), indent=1)
        replace_file(_with_suffix(folder / MEMORY_FILE, suffix), f"{text}\n".encode())


def _with_suffix(file: Path, suffix: str) -> Path:
    return file.with_name(f"{file.stem}{suffix}{file.suffix}")


class _SavedTensors:
    """Context manager that adds up the tensors that each module saves for the backward pass.

    Args:
        model: the model. Tensors that its parameters have are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self._seen: set[int] = set()
        weights = map(local_tensor, model.parameters())
        self._weights = {local.untyped_storage().data_ptr() for local in weights if local is not None}
        self._inside: list[str] = []
        self._model = model
        self._handles: list[Any] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            before = module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
            after = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            self._handles += [before, after]
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._hooks.__exit__(*failure)
        for handle in self._handles:
            handle.remove()

    def _leave(self) -> None:
        if self._inside:
            self._inside.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        local = local_tensor(tensor)
        if local is None:
            return tensor
        pointer = local.untyped_storage().data_ptr()
        # A tensor that several operations save is stored once.
        if pointer not in self._seen and pointer not in self._weights:
            self._seen.add(pointer)
            name = self._inside[-1] if self._inside else ""
            self._now[name] = self._now.get(name, 0) + local.untyped_storage().nbytes()
        return tensor

    def end_batch(self) -> None:
        """Keeps the larger sums of this micro-batch and of earlier ones."""
        self.bytes = {name: max(size, self.bytes.get(name, 0)) for name, size in {**self.bytes, **self._now}.items()}
        self._now, self._seen = {}, set()


def module_table(model: nn.Module, optimizer: Any, saved: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the memory of each module on this rank, without that of the modules inside it; the largest first.

    Args:
        model: the model, with its gradients.
        optimizer: the optimizer; its state may be empty before the first step.
        saved: the bytes that each module saves for the backward pass, by name.

    Units:
        bytes.
    """
    states = getattr(optimizer, "state", {})
    rows, seen = [], set[int]()
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
        seen.update(map(id, own))
        row = {
            "weight_bytes": sum(map(_size, own)),
            "gradient_bytes": sum(_size(one.grad) for one in own if one.grad is not None),
            "optimizer_bytes": sum(
                _size(value) for one in own for value in states.get(one, {}).values() if isinstance(value, Tensor)
            ),
            "saved_activation_bytes": saved.get(name, 0),
        }
        if total := sum(row.values()):
            rows.append({"name": name, "class": type(module).__name__, **row, "total_bytes": total})
    return sorted(rows, key=lambda row: -row["total_bytes"])


def _size(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return 0 if local is None else local.numel() * local.element_size()
