"""A compiler that lets each compiled unit keep a part of its activations, and recompute the rest in the backward pass.

torch divides the operations of a compiled unit into a forward and a backward pass. Between them it keeps the tensors
that are cheapest in sum: with a budget of 1 those that need least time, with less those that fit into this part of the
memory. `Budgeted` is a back end of `torch.compile` with such a budget. The setting holds while it compiles, so other
models of the process keep torch's own.

Source:
    `torch._functorch.config.activation_memory_budget`, which is read by `min_cut_rematerialization_partition`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A back end of `torch.compile` whose units keep a part of their activations.

    torch compiles equal code of two units once if their back ends are equal.

    Args:
        backend: the name of the back end that compiles.
        mode: the `mode` of `torch.compile`, which "inductor" has.
        budget: the part that may be kept, from 0 to 1.
    """

    backend: str
    mode: str | None
    budget: float

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Any:
        """Compiles a graph.

        Args:
            graph: the graph that torch has captured.
            inputs: examples of its inputs.

        Shapes:
            inputs: any shapes.
        """
        with torch._functorch.config.patch(activation_memory_budget=self.budget):
            if self.backend == "inductor":
                options = torch._inductor.list_mode_options(self.mode) if self.mode else {}
                return torch._inductor.compile(graph, inputs, options=options)
            return torch._dynamo.lookup_backend(self.backend)(graph, inputs)
