"""Process facts: who this process is, and where it computes."""

from __future__ import annotations

from forgather.ml.distributed.env import DistributedEnvironment, process_facts
from forgather.processes import ProcessFacts

__all__ = ["DistributedEnvironment", "ProcessFacts", "process_facts"]
