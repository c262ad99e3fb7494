"""The batches that a plan is made for: the first ones of the run, and those that need most memory.

Rows of different lengths are padded to the longest row of their micro-batch, so that no micro-batch is larger than one
of the longest row alone. Takes a trainer; gives windows and evaluation batches that its strategy can compute.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from forgather.errors import PlanError
from forgather.ml.generation.generator import Generator
from forgather.ml.losses import LossRule
from forgather.ml.number_format import plural
from forgather.ml.planner.masked_rows import Masking, document_length, is_divided, masked
from forgather.ml.planner.row_length import ResizedRows, num_tokens
from forgather.ml.planner.window_shape import WindowShape, reshaped
from forgather.ml.trainer.answers import AnswerGenerator
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.data_rng import IsolatedRNG
from forgather.ml.trainer.evaluation import eval_batches
from forgather.ml.trainer.length_groups import stored_lengths
from forgather.ml.trainer.stream_choice import is_iterable
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.types import Window

MOST_READ = 1000
"""The number of rows that are read for their length, of a data set that does not store lengths."""
_MOST_ROWS = 1_048_576
"""The largest number of rows for which the training data is repeated: each of them is read and collated."""
_MOST_MICRO_BATCHES = 2
_STREAMED = 64  # rows of a stream that are taken for another length
# A function of a data set, the lengths of its rows, numbers of rows, a name and notes, which gives other rows.
_RowsOf = Callable[[Any, "_Lengths", tuple[int, int], str, list[str]], Any]


class PromptBatch(NamedTuple):
    """Prompts that are answered at once.

    Args:
        input_ids: the tokens of the prompts, padded before their beginning.
        attention_mask: 0 where they are padded.
        num_new_tokens: the length of the longest answer.

    Shapes:
        input_ids, attention_mask: (B, T); B: prompts, T: tokens of the longest prompt.
    """

    input_ids: Tensor
    attention_mask: Tensor
    num_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class PlannedBatches:
    """The batches that a plan is made for.

    Args:
        first: the first window of the run; where the accumulation changes, the first of the largest ones.
        longest: a window of the longest rows, as large as any window of the run.
        evaluation: a batch of each evaluation set, of its longest rows; none of a run that does not evaluate.
        prompts: a batch of each evaluation set that the model answers, of its longest prompts.
        notes: what is not known about longer rows, one sentence each.
        rows: the number of rows of a micro-batch of the first window.
        masking: what masks attention in some micro-batch of the training data.
        most_rows: the largest number of rows of a micro-batch for which the data suffices; None for a stream.
        document_length: of packed rows, the length of the document of a token, as a mean over the tokens of the first
            rows; None for other rows.
        of_length: the same for rows of some lengths, where they are asked for.
    """

    first: Window
    longest: Window
    evaluation: tuple[Any, ...]
    prompts: tuple[PromptBatch, ...]
    notes: tuple[str, ...]
    rows: int
    masking: Masking = Masking()
    most_rows: int | None = None
    document_length: float | None = None
    of_length: Mapping[int, PlannedBatches] = field(default_factory=dict)

    def at_length(self, length: int | None) -> PlannedBatches:
        """Returns the batches of a length, one of `of_length`; None gives those of the run."""
        return self if length is None else self.of_length[length]

    def window(self, shape: WindowShape) -> Window:
        """Returns a window of a size, see `reshaped`, with the masks that some window of the run has."""
        window = reshaped(self.longest if shape.longest else self.first, shape, self.rows)
        return replace(window, batches=[masked(batch, self.masking) for batch in window.batches])


def planned_batches(trainer: Trainer, lengths: Iterable[int] = ()) -> PlannedBatches:
    """Returns the batches of a trainer that a plan is made for.

    Args:
        trainer: the trainer of the config. Its strategy was built.
        lengths: the numbers of tokens for which the rows of the data are repeated or cut as well.

    Raises:
        PlanError: FG997 if the rows have no tokens, although lengths are given; FG804 if an update takes more rows than
            the data has and a plan makes.
    """
    dataset, replicas = trainer.train_dataset, trainer.strategy.topology.dp_size
    most_rows = None if dataset is None or is_iterable(dataset) else len(dataset) // replicas
    notes = _with_rows_of_an_update(trainer)
    first = _largest_window(trainer._train_batches(), trainer.strategy.rule)
    of_length = {}
    for length in lengths:
        resized = _planned(trainer, first, functools.partial(_rows_of_length, length), notes)
        of_length[length] = replace(resized, first=resized.longest)
    return replace(_planned(trainer, first, _longest_rows, notes), of_length=of_length, most_rows=most_rows)


def _with_rows_of_an_update(trainer: Trainer) -> tuple[str, ...]:
    """Repeats the training data of a trainer if it has fewer rows than an update takes; returns a note that says so.

    The data may be a sample, and the devices those of a later machine: a plan is for full updates in any case.
    """
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None or is_iterable(dataset) or not len(dataset):
        return ()
    least = RankShare.for_topology(trainer.strategy.topology, args.per_device_train_batch_size).all_rows
    update = least * args.accumulation.largest
    present = len(dataset)
    if present >= update:
        return ()
    if update > _MOST_ROWS:
        raise PlanError(
            f"an update takes {update:,} rows, and the training data has {plural(present, 'row')}, of which a plan "
            f"makes at most {_MOST_ROWS:,}",
            code="FG804",
            hint="lower per_device_train_batch_size, gradient_accumulation_steps or the number of processes",
        )
    trainer.train_dataset = _copies(dataset, [*range(present)], update)
    refused = f"; 'fgcli train' needs {least:,} at least (FG804)" if present < least else ""
    return (
        f"the training data has {plural(present, 'row')}, fewer than the {update:,} of an update, for which the plan "
        f"repeats them{refused}",
    )


def _planned(trainer: Trainer, first: Window, rows_of: _RowsOf, known: Iterable[str]) -> PlannedBatches:
    notes = [*known]
    rule, args, topology = trainer.strategy.rule, trainer.args, trainer.strategy.topology
    longest = first
    dataset, collate = trainer._inputs(trainer.train_dataset)
    lengths = _lengths(dataset)
    masking = Masking(lengths.are_uneven, is_divided(dataset))
    of_documents = document_length(dataset) if masking.is_divided else None
    share = RankShare.for_topology(topology, args.per_device_train_batch_size)
    count = share.all_rows * min(len(first.batches), _MOST_MICRO_BATCHES)
    if (rows := rows_of(dataset, lengths, (count, count), "training", notes)) is not None:
        longest = _largest_window(TrainBatches(rows, args, collate, topology=topology), rule)
    evaluation, prompts = [], []
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {"": trainer.eval_dataset}
    evaluates = args.eval_on_start or args.eval_strategy != "no"
    for name, given in sets.items() if evaluates else ():
        if given is None:
            continue
        dataset, collate = trainer._inputs(given)
        lengths = _lengths(dataset)
        of_set = Masking(lengths.are_uneven, is_divided(dataset))
        count = args.per_device_eval_batch_size * topology.dp_size
        counts = (count if is_iterable(dataset) else min(len(dataset), count), count)
        title = f"evaluation ({name})" if name else "evaluation"
        if (rows := rows_of(dataset, lengths, counts, title, notes)) is not None:
            dataset = rows
        read = eval_batches(dataset, args, collate, topology).read(rule)
        evaluation.append(masked(next(read).batch, of_set))
        if (generator := trainer.answer_generator) is not None:
            if Generator(trainer.strategy.model, generator.tokenizer).has_encoder:
                notes.append("answers of a model with an encoder are not planned: their cache needs memory as well")
            else:
                prompts.append(_longest_prompts(generator, given, args.per_device_eval_batch_size))
    return PlannedBatches(
        first=first,
        longest=longest,
        evaluation=tuple(evaluation),
        prompts=tuple(prompts),
        notes=tuple(notes),
        rows=args.per_device_train_batch_size,
        masking=masking,
        document_length=of_documents,
    )


class _Lengths(NamedTuple):
    """The lengths of rows.

    Args:
        columns: the lengths in each column of lists.
        are_all: whether they are those of all rows.
    """

    columns: Mapping[str, Sequence[int]]
    are_all: bool

    @property
    def uneven(self) -> list[Sequence[int]]:
        """The columns whose rows are of several lengths."""
        return [column for column in self.columns.values() if len(set(column)) > 1]

    @property
    def are_uneven(self) -> bool:
        """Whether the rows are of several lengths."""
        return bool(self.uneven)


def _lengths(dataset: Any) -> _Lengths:
    if is_iterable(dataset):
        return _Lengths({}, are_all=False)
    stored = stored_lengths(dataset)
    return _Lengths(_read_lengths(dataset), len(dataset) <= MOST_READ) if stored is None else _Lengths(stored, True)


def _longest_rows(dataset: Any, lengths: _Lengths, counts: tuple[int, int], name: str, notes: list[str]) -> Any:
    """Returns the longest rows of a data set; None if all are equally long, or if their lengths are not known.

    Args:
        dataset: the data set.
        lengths: the lengths of its rows.
        counts: the number of rows, and the number of them if a text is cut into rows: there are more of them if they
            are shorter.
        name: the name of the data set.
        notes: what is not known about longer rows, which is added.
    """
    rows = _longest(dataset, lengths, name, notes)
    return None if rows is None else _copies(dataset, rows, counts[0])


def _rows_of_length(
    length: int, dataset: Any, lengths: _Lengths, counts: tuple[int, int], name: str, notes: list[str]
) -> Any:
    """Returns the longest rows of a data set, repeated or cut to a number of tokens; see `_longest_rows`."""
    if is_iterable(dataset):
        dataset = list(itertools.islice(dataset, _STREAMED))
        lengths = _lengths(dataset)
    longest = _longest_rows(dataset, lengths, counts, name, notes)
    rows = dataset if longest is None else longest
    present = _present(rows, counts[0], name)
    if longest is None and length != present and len(rows) < counts[1]:
        rows = _copies(rows, [*range(len(rows))], counts[1])
    return ResizedRows(rows, length - present)


def _present(dataset: Any, count: int, name: str) -> int:
    """Returns the number of tokens of the longest of the first rows."""
    try:
        with IsolatedRNG().seeded(0):
            return max(num_tokens(dataset[number]) for number in range(min(len(dataset), count)))
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"the {name} rows have no 'input_ids', whose number could be changed",
            code="FG997",
            hint="plan without --grid and --longest: the size of such rows is no setting",
        ) from error


def _longest_prompts(generator: AnswerGenerator, dataset: Any, most_rows: int) -> PromptBatch:
    """Returns the longest prompt of an evaluation set as often as a batch has rows, the last one padded if any is."""
    lengths = sorted(len(row.prompt) for row in generator.rows(dataset))
    longest, rows = lengths[-1], min(most_rows, len(lengths))
    mask = torch.ones(rows, longest, dtype=torch.long)
    if rows > 1:
        mask[-1, : longest - lengths[0]] = 0
    room = generator.room(longest)
    return PromptBatch(torch.ones_like(mask), mask, room)


def _largest_window(data: TrainBatches, rule: LossRule) -> Window:
    """Returns the first window that has as many micro-batches as any of the run."""
    data.epoch, step = data.accumulation.largest_from
    return next(data.windows(rule, step=step))


def _longest(dataset: Any, lengths: _Lengths, name: str, notes: list[str]) -> list[int] | None:
    """Returns the numbers of the rows that are longest in some column, the longest in all columns together first.

    None if all rows are of equal length, or their lengths are unknown; adds to `notes` what is not known.
    """
    if is_iterable(dataset):
        notes.append(
            f"the {name} rows are streamed: the plan is for the first ones; longer ones need more, and so do padded "
            "ones and rows of several documents if the first are neither"
        )
        return None
    if lengths.columns and not lengths.are_all:
        notes.append(f"the plan is for the longest of the first {MOST_READ:,} {name} rows: longer ones need more")
    uneven = lengths.uneven
    if not uneven:
        return None
    longest = {max(range(len(column)), key=column.__getitem__) for column in uneven}
    return sorted(longest, key=lambda row: -sum(column[row] for column in uneven))


def _read_lengths(dataset: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with IsolatedRNG().seeded(0):
        for number in range(min(len(dataset), MOST_READ)):
            row = dataset[number]
            sizes = (
                {name: len(item) for name, item in row.items() if _is_list(item)} if isinstance(row, Mapping) else {}
            )
            if number == 0:
                found = {name: [] for name in sizes}
            # Columns that only some rows have are padded by nobody.
            found = {name: [*column, sizes[name]] for name, column in found.items() if name in sizes}
    return found


def _is_list(item: Any) -> bool:
    is_number = getattr(item, "shape", None) == ()
    return isinstance(item, Sized) and not isinstance(item, str | bytes | Mapping) and not is_number


def _copies(dataset: Any, rows: list[int], count: int) -> Any:
    numbers = [rows[number % len(rows)] for number in range(count)]
    return dataset.select(numbers) if hasattr(dataset, "select") else Subset(dataset, numbers)
