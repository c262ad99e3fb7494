"""What a rank holds while the model is saved.

Takes the peaks and the facts of a trace; gives the rows of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from forgather.ml.planner.allocations import Region
from forgather.ml.planner.host_activations import ON_THE_WAY
from forgather.ml.planner.offload import BUFFERS
from forgather.ml.planner.peaks import Peak
from forgather.ml.planner.trace_facts import TraceFacts
from forgather.planner.memory_plan import OPTIMIZER, PARAMETERS, MemoryRow, Source

_LASTING = (PARAMETERS, OPTIMIZER, BUFFERS)


def saving_rows(peaks: Mapping[Region, Peak], facts: TraceFacts) -> tuple[MemoryRow, ...]:
    """Returns the rows of the memory while the model is saved: what lasts, and the largest weight, if it is gathered.

    Such a weight is there twice: as it arrives, and as it is stored. There are no rows for a run that does not save.

    Args:
        peaks: the peak of each region of the step.
        facts: the sizes of the run.
    """
    updates = [peak for at, peak in peaks.items() if at.phase == "update"]
    if facts.settings.get("save_strategy") == "no" or not updates:
        return ()
    lasting = max(updates, key=lambda peak: peak.num_bytes).categories
    rows = [MemoryRow(name=use, num_bytes=lasting[use]) for use in _LASTING if lasting.get(use)]
    formulas = {**facts.untraced, ON_THE_WAY: 0, "gathered weights": 2 * facts.gathered_bytes}
    rows += [MemoryRow(name=use, num_bytes=size, source=Source.FORMULA) for use, size in formulas.items() if size]
    return tuple(sorted(rows, key=lambda row: -row.num_bytes))
