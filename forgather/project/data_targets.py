"""The data of a config: its data sets, its collator and its tokenizer, found without constructing anything.

The input is a graph; the output is nodes. The arguments of the call that trains come first, because they decide what a
run uses; a config whose `main` does not train has the targets with the usual names. A node that would build the model
is refused, so that data can be looked at without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from forgather.config.graph import Call, Entry, Graph, Mapped, Node, is_null
from forgather.config.traverse import roots, walk
from forgather.errors import ProjectError, nearest
from forgather.project.trainer_arguments import keyword, trainer_arguments
from forgather.source import Span

TRAINED_ON = {"train": "train_dataset", "eval": "eval_dataset"}
"""The data sets of a trainer: the name for `--set`, and the argument of the trainer."""

_CLASS_NAMES = "forgather.ml.data:class_names"
_MODELS = ("model", "model_init")
_TOKENIZERS = ("processing_class", "tokenizer")
# The labels of these models are shifted: the logits of a token are compared with the label of the next token.
_CAUSAL = re.compile(r"(ForCausalLM|LMHeadModel)(\.\w+)?$|^forgather\.ml(\.models)?:from_(config|pretrained)$")
_USUAL_BATCH_ROWS = 8  # the default of transformers and of our trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSet:
    """The data set that the command line names.

    Args:
        name: the name for messages, such as "train_dataset" or "dataset.eval".
        node: the node to build.
        keys: the keys that lead from the built object to the data set, as in `eval_dataset.news`.
        role: "train" or "eval" for a data set of the trainer; "" for any other target.
    """

    name: str
    node: Node
    keys: tuple[str, ...] = ()
    role: str = ""

    @property
    def base(self) -> str:
        """The name without the keys."""
        return self.name.removesuffix("".join(f".{key}" for key in self.keys))

    @property
    def span(self) -> Span | None:
        """The place of the data set in the user's file."""
        return self.node.span


class DataTargets:
    """The data sets, the collator and the tokenizer of a config.

    Args:
        graph: the graph of the config.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._trainer = next(_calls_with(graph, TRAINED_ON["train"]), None)

    @property
    def collator(self) -> Node | None:
        """The node of the data collator; None if the trainer uses its default."""
        return self._node("data_collator")

    @property
    def tokenizer(self) -> Node | None:
        """The node of the tokenizer; None if the config has none."""
        found = (self._node(name) for name in _TOKENIZERS)
        return next((node for node in found if node is not None), None)

    @property
    def loss(self) -> Node | None:
        """The node of the loss; None if the model's own is used, or if the loss is made from the model."""
        found = self._node("loss_fn")
        return None if found is None or self._needs_model(found) else found

    @property
    def class_names(self) -> Node | None:
        """The node of the names of the classes, which the model gets, too; None if the config has none."""
        calls = (node for _, node in walk(roots(self._graph)) if isinstance(node, Call))
        return next((node for node in calls if node.constructor == _CLASS_NAMES), None)

    @property
    def is_causal(self) -> bool:
        """Whether the model is a causal language model, as far as the names of its constructors say."""
        below = walk([((), node) for node in self._models()])
        return any(isinstance(node, Call) and _CAUSAL.search(node.constructor) for _, node in below)

    @property
    def removes_columns(self) -> bool:
        """Whether the trainer removes the columns that the model does not take."""
        arguments = trainer_arguments(self._graph)
        return arguments is None or arguments.plain("remove_unused_columns") is not False

    def batch_rows(self, role: str) -> int:
        """Returns the number of rows of a micro-batch, or the usual number if it is known only after construction."""
        arguments = trainer_arguments(self._graph)
        name = f"per_device_{'eval' if role == 'eval' else 'train'}_batch_size"
        value = arguments.plain(name) if arguments else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else _USUAL_BATCH_ROWS

    def chosen(self, name: str) -> ChosenSet:
        """Returns the data set of a name.

        Args:
            name: "train", "eval" or the name of a target, with the keys of a mapping after it (`eval.news`).

        Raises:
            ProjectError: FG480 if the config has no data set of that name.
        """
        first, *keys = name.split(".")
        role = next((role for role, argument in TRAINED_ON.items() if first in (role, argument)), "")
        node = self._node(TRAINED_ON[role]) if role else self._target(first)
        if node is None:
            raise self._unknown(first, role)
        shown = ".".join([TRAINED_ON.get(role, first), *keys])
        # Of several evaluation sets, only the one that is shown is built.
        while keys and isinstance(node, Mapped) and (found := _child(node, keys[0])) is not None:
            node, keys = found, keys[1:]
        return ChosenSet(name=shown, node=node, keys=tuple(keys), role=role)

    def refuse_model(self, node: Node, name: str) -> None:
        """Raises an error if building a node would build the model.

        Args:
            node: the node.
            name: the name of the node for the message.

        Raises:
            ProjectError: FG483 if the model is below the node.
        """
        if self._needs_model(node):
            hint = "'--no-collator' shows the rows as the data set gives them"
            verb = "is" if any(node is model for model in self._models()) else "needs"
            raise ProjectError(
                f"{name} {verb} the model, which 'fgcli data show' does not build",
                code="FG483",
                span=node.span,
                hint=hint if node is self.collator else "show the data set that it is made from: 'fgcli targets'",
            )

    def _needs_model(self, node: Node) -> bool:
        models = {id(model) for model in self._models()}
        return any(id(found) in models for _, found in walk([((), node)]))

    def _unknown(self, name: str, role: str) -> ProjectError:
        known = [one for one, argument in TRAINED_ON.items() if self._node(argument) is not None]
        main = self._graph.targets.get("main")
        if role or not known:
            what = f"the config has no {TRAINED_ON[role] if role else 'data set of a trainer'}"
            if role and not known:
                what += ", and no other data set of a trainer"
            hint = f"'--set NAME' shows another target; {_listed([*known, *self._graph.targets])}"
        else:
            what, names = f"there is no data set {name!r}", [*known, *self._graph.targets]
            close = nearest(name, names)
            hint = close if close and close.startswith("did") else _listed(names)
        return ProjectError(what, code="FG480", span=main.span if main else None, hint=hint)

    def _target(self, name: str) -> Node | None:
        entry = self._graph.targets.get(name)
        return None if entry is None or is_null(entry.value) else entry.value

    def _node(self, name: str) -> Node | None:
        """Returns the node of an argument of the trainer or of a target; None if it is missing or null."""
        given = keyword(self._trainer, name)
        if given is None and self._trainer is None:
            return self._target(name)
        return None if given is None or is_null(given) else given

    def _models(self) -> Iterator[Node]:
        named = [keyword(self._trainer, name) for name in _MODELS] + [self._target("model")]
        return (node for node in named if node is not None and not is_null(node))


def with_targets(graph: Graph, nodes: Mapping[str, Node]) -> tuple[Graph, dict[str, str]]:
    """Returns a graph in which the given nodes are targets, so that they can be built, and the target of each name.

    Args:
        graph: the graph of the config.
        nodes: nodes of the graph, by a name that is used if a node is no target yet.
    """
    known = {id(entry.value): name for name, entry in graph.targets.items()}
    names = {name: known.get(id(node), name) for name, node in nodes.items()}
    added = {name: Entry(name, node) for name, node in nodes.items() if id(node) not in known}
    return replace(graph, targets={**graph.targets, **added}), names


def _child(node: Mapped, key: str) -> Node | None:
    return next((entry.value for entry in node.entries if entry.key == key), None)


def _calls_with(graph: Graph, argument: str) -> Iterator[Call]:
    """Yields the calls that have an argument, those below `main` first."""
    main = graph.targets.get("main")
    tops = [((), main.value)] if main else []
    for _, node in walk([*tops, *roots(graph)]):
        if isinstance(node, Call) and keyword(node, argument) is not None:
            yield node


def _listed(names: list[str], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"there are: {', '.join(dict.fromkeys(names[:limit]))}{more}"
