"""Process facts: who this process is, and where it computes."""

from __future__ import annotations

from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed.env import DistributedEnvironment, process_facts

__all__ = ["DistributedEnvironment", "ProcessFacts", "process_facts"]
