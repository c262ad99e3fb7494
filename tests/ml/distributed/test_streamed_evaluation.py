"""Evaluation of streamed rows on several processes: each row once, and the metrics of one process."""

import pytest
import torch
from datasets import Dataset

from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data.row_stream import RowStream
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_row_dispatch import KINDS, LENGTHS, Counted, collate
from tests.ml.fixtures import tiny_llama


class Plain(torch.utils.data.IterableDataset):
    """A stream without shards, of rows that are divided among workers by themselves."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        part = slice(None) if worker is None else slice(worker.id, None, worker.num_workers)
        return iter([row for shard in range(len(LENGTHS)) for row in Counted().open(shard)][part])


def hub():
    rows = [{name: ids.tolist() for name, ids in row.items()} for row in Plain()]
    return Dataset.from_list(rows).with_format("torch").to_iterable_dataset(num_shards=3)


SETS = {
    "in order": lambda: RowStream.of_shards(Counted(), buffer_size=0, seed=3),
    "shuffled": lambda: RowStream.of_shards(Counted(), buffer_size=16, seed=3),
    "plain": Plain,
    "datasets": hub,
}


def first_tokens(prediction):
    """Metrics that show which rows were evaluated, how often, and in which order."""
    first = torch.as_tensor(prediction.label_ids)[:, 0].double()
    places = torch.arange(1, len(first) + 1)
    return {"rows": float(len(first)), "sum": float(first.sum()), "order": float((first * places).sum())}


def evaluated(folder, kind, rows, workers, with_metrics=True):
    torch.manual_seed(0)
    trainer_class, arguments, settings = KINDS[kind]
    args = arguments(
        str(folder / "out"),
        per_device_eval_batch_size=rows,
        use_cpu=True,
        report_to="none",
        dataloader_num_workers=workers,
        **settings,
    )
    data = Plain()
    trainer = trainer_class(
        tiny_llama(vocab_size=96, num_hidden_layers=2),
        args,
        eval_dataset=data,
        data_collator=collate,
        **({"compute_metrics": first_tokens} if with_metrics else {}),
    )
    found = {}
    for name, make in SETS.items():
        metrics = trainer.evaluate(make())
        found[name] = {key: value for key, value in metrics.items() if "second" not in key and "runtime" not in key}
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("alone"), "single", 8, 0)


CASES = [
    # 97 rows: the last batch has one, also for 2 processes.
    ("DDP", 2, 4, 0),
    pytest.param("DDP", 4, 2, 0, marks=pytest.mark.matrix),
    pytest.param("DDP", 3, 5, 0, marks=pytest.mark.matrix),
    pytest.param("pipeline", 4, 4, 0, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("kind", "ranks", "rows", "workers"), CASES)
def test_each_streamed_row_is_evaluated_once_with_the_metrics_of_one_process(
    alone, tmp_path, kind, ranks, rows, workers
):
    for name, metrics in alone.items():
        assert sum(LENGTHS) == metrics["eval_rows"], name
    for found in run_ranks(ranks, evaluated, tmp_path, kind, rows, workers):
        for name, metrics in found.items():
            assert alone[name] == pytest.approx(metrics, rel=1e-5), name


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_do_not_change_how_often_a_row_is_evaluated(alone, tmp_path):
    for found in run_ranks(2, evaluated, tmp_path, "DDP", 4, 2):
        for name, metrics in found.items():
            assert alone[name]["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5), name
            assert (alone[name]["eval_rows"], alone[name]["eval_sum"]) == (metrics["eval_rows"], metrics["eval_sum"])


def test_the_trainer_of_one_process_evaluates_the_rows_that_the_stream_gives(alone, tmp_path):
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=97, use_cpu=True, report_to="none")
    torch.manual_seed(0)
    trainer = Trainer(tiny_llama(vocab_size=96, num_hidden_layers=2), args, data_collator=collate)
    stored = list(Plain())
    assert alone["in order"]["eval_loss"] == pytest.approx(trainer.evaluate(stored)["eval_loss"], rel=1e-5)
