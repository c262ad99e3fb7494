"""Fewer streams than replicas: one process of a machine reads, the others get their rows, and errors reach all."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from forgather.ml import AccelTrainer, PipelineTrainer, Trainer, TrainingArguments
from forgather.ml.data.row_stream import RowStream
from forgather.ml.trainer.bad_rows import BadRows
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments, PipelineTrainingArguments
from forgather.ml.trainer.read_retries import Retries
from forgather.ml.trainer.stream_batches import StreamBatches
from tests.ml.distributed.gang import RankFailed, run_ranks
from tests.ml.fixtures import StopAt, tiny_llama

LENGTHS = (37, 31, 29)
KINDS = {
    "single": (Trainer, TrainingArguments, {}),
    "DDP": (AccelTrainer, AccelTrainingArguments, {}),
    "pipeline": (
        PipelineTrainer,
        PipelineTrainingArguments,
        {"split_spec": "auto", "schedule_class": "Schedule1F1B", "pipeline_parallel_size": 2, "pipeline_chunks": 2},
    ),
}


class Counted:
    """Shards of token rows, which count the rows that this process reads. A row of `bad` cannot be collated or read."""

    def __init__(self, bad=None, dies_at=None):
        self.bad, self.dies_at, self.num_read = bad, dies_at, 0

    num_shards = len(LENGTHS)

    def shard_size(self, shard):
        return LENGTHS[shard]

    def shard_name(self, shard):
        return f"counted {shard}"

    def open(self, shard, offset=None):
        return CountedReader(self, shard, offset or 0)


class CountedReader:
    goes_on = True

    def __init__(self, owner, shard, offset):
        self.owner, self.shard, self.offset = owner, shard, offset

    def __iter__(self):
        return self

    def __next__(self):
        place = (self.shard, self.offset)
        if self.offset == LENGTHS[self.shard]:
            raise StopIteration
        self.offset += 1
        if place == self.owner.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if place == self.owner.bad:
            raise ValueError("a broken row")
        self.owner.num_read += 1
        ids = torch.arange(8).add(7 * self.offset + 31 * self.shard).remainder(96)
        row = {"input_ids": ids, "labels": ids}
        return row | {"fault": lambda: 1} if self.owner.bad == (*place, "unsendable") else row


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def trained(folder, kind, rows, *, per_host=None, bad=None, dies_at=None, stop=None, **given):
    """Returns the loss of each step, the metrics, and the number of rows that this process read and used."""
    if per_host:
        os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % per_host), "LOCAL_WORLD_SIZE": str(per_host)}
    torch.manual_seed(0)
    trainer_class, arguments, settings = KINDS[kind]
    shards = Counted(bad, dies_at)
    data = RowStream.of_shards(shards, buffer_size=16, seed=3)
    shards.num_read = 0
    args = arguments(
        str(folder / "out"),
        **{
            "per_device_train_batch_size": rows,
            "max_steps": 16,
            "data_streams": 1,
            "use_cpu": True,
            "save_strategy": "steps" if stop else "no",
            "save_steps": 1,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "report_to": "none",
            "gradient_accumulation_steps": 1,
            **settings,
            **given,
        },
    )
    model = tiny_llama(vocab_size=96, num_hidden_layers=2)
    trainer = trainer_class(
        model, args, train_dataset=data, data_collator=collate, callbacks=[StopAt(stop)] if stop else []
    )
    output = trainer.train(resume_from_checkpoint=given.get("resume_from_checkpoint"))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, output.metrics, shards.num_read


def of_rank(folder, kind, rows, options):
    return trained(folder, kind, rows, **options)


def ranks_of(count, folder, kind, rows, **options):
    return run_ranks(count, of_rank, folder, kind, rows, options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone"), "single", 8)


CASES = [
    pytest.param("DDP", 2, 4, {}, marks=pytest.mark.matrix),
    pytest.param("DDP", 4, 2, {}, marks=pytest.mark.matrix),
    pytest.param("DDP", 4, 1, {"gradient_accumulation_steps": 2, "per_host": 2}, marks=pytest.mark.matrix),
    pytest.param("DDP", 2, 4, {"dataloader_num_workers": 1}, marks=pytest.mark.matrix),
    # The ranks of a replica do not follow one another.
    ("pipeline", 4, 4, {}),
    pytest.param("pipeline", 4, 4, {"per_host": 2}, marks=pytest.mark.matrix),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("kind", "ranks", "rows", "options"), CASES)
def test_each_machine_reads_a_row_once_and_the_steps_are_those_of_one_process(
    alone, kind, ranks, rows, options, tmp_path, record_property
):
    expected, _, num_read = alone
    found = ranks_of(ranks, tmp_path, kind, rows, **options)
    per_host = options.get("per_host", ranks)
    for losses, _, _ in found:
        assert expected == pytest.approx(losses, rel=2e-5)
    for host in range(0, ranks, per_host):
        reads = [read for _, _, read in found[host : host + per_host]]
        if options.get("dataloader_num_workers"):
            assert [0] * per_host == reads
            continue
        assert [num_read, *[0] * (per_host - 1)] == reads
        record_property("read_per_used_on_a_host", reads[0] / num_read)


@pytest.mark.matrix
def test_without_it_each_replica_reads_all_rows(alone, tmp_path):
    expected, _, num_read = alone
    for losses, _, read in ranks_of(2, tmp_path, "DDP", 4, dispatch_rows=False):
        assert expected == pytest.approx(losses, rel=2e-5)
        assert num_read == read


@pytest.mark.matrix
def test_a_resume_with_other_processes_goes_on_in_the_stream(alone, tmp_path):
    ranks_of(2, tmp_path, "DDP", 4, stop=5)
    for losses, _, read in ranks_of(4, tmp_path, "DDP", 2, per_host=2, resume_from_checkpoint=True):
        assert alone[0] == pytest.approx(losses, rel=2e-5)
        assert read < alone[2]


@pytest.mark.parametrize("policy", [pytest.param("skip", marks=pytest.mark.matrix), 2])
def test_a_bad_row_counts_once_where_several_replicas_need_its_stream(tmp_path, policy):
    expected, one, _ = trained(tmp_path, "single", 8, bad=(1, 3), bad_rows=policy, max_steps=10)
    assert 1 == one["bad_rows"]
    for options in ({},) if policy == 2 else ({"per_host": 1}, {"dispatch_rows": False}):
        for losses, metrics, _ in ranks_of(2, tmp_path, "DDP", 4, bad=(1, 3), bad_rows=policy, max_steps=10, **options):
            assert expected == pytest.approx(losses, rel=2e-5)
            assert 1 == metrics["bad_rows"]


class ReadMeanwhile:
    """A part of a row. When it is sent, a row is left out, as by a worker that reads ahead."""

    def __init__(self, guard):
        self.guard = guard

    def __reduce__(self):
        self.guard.preparing(ValueError("a broken row"), "counted 1")
        return int, ()


class Sends(Counted):
    def __init__(self, guard):
        super().__init__()
        self.guard = guard

    def open(self, shard, offset=None):
        return SendingReader(self, shard, offset or 0)


class SendingReader(CountedReader):
    def __next__(self):
        return super().__next__() | {"sent": ReadMeanwhile(self.owner.guard)}


def counted_on_rank():
    guard, rank = BadRows("skip", Retries(0)), dist.get_rank()
    rows = RowStream.of_shards(Sends(guard), buffer_size=1, seed=3)
    options = {"num_workers": 0}
    settings = {"num_streams": 1, "guard": guard, "generator": torch.Generator(), "inner": rows, "dispatch": (True, 0)}
    batches = StreamBatches(rows, RankShare(2, rank, 2), collate, options, **settings)
    next(batches.read(seed=0, epoch=0, start=0, sizes=iter([1])))
    return guard.num_read


def test_rows_that_are_left_out_while_others_are_sent_stay_counted():
    # Four rows are sent. What the reader did not know when it sent them, the other process learns with the next step.
    assert [4, 0] == run_ranks(2, counted_on_rank, start_group=True)


def failures(folder, options):
    try:
        trained(folder, "DDP", 2, max_steps=10, **options)
    except Exception as error:  # noqa: BLE001 - the test compares what each rank raises
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.matrix
@pytest.mark.parametrize("per_host", [4, 2])
def test_an_error_of_the_reader_is_raised_by_every_process(tmp_path, per_host):
    found = run_ranks(4, failures, tmp_path, {"bad": (1, 3), "per_host": per_host})
    assert all("a broken row" in one for one in found), found


def test_rows_that_cannot_be_sent_are_refused_by_name(tmp_path):
    found = run_ranks(2, failures, tmp_path, {"bad": (1, 3, "unsendable")})
    assert all("FG749" in one and "dispatch_rows: false" in one for one in found), found


@pytest.mark.matrix
def test_an_error_of_one_process_alone_is_raised_by_every_process(tmp_path):
    """Also within a step of several micro-batches, and without rows that are dealt out."""
    for options in ({"gradient_accumulation_steps": 2}, {"data_streams": 2, "dispatch_rows": False}):
        found = run_ranks(2, collate_failures, tmp_path, options)
        assert all("only here" in one for one in found), found


def collate_failures(folder, options):
    global collate
    made = 0
    before = collate

    def fails(rows):
        nonlocal made
        made += 1
        if os.environ["RANK"] == "1" and made == 3:
            raise ValueError("only here")
        return before(rows)

    collate = fails
    try:
        return failures(folder, options)
    finally:
        collate = before


@pytest.mark.matrix
def test_a_reader_that_dies_ends_the_others(tmp_path):
    with pytest.raises(RankFailed, match="rank 0 died with exit code -9"):
        ranks_of(2, tmp_path, "DDP", 4, dies_at=(1, 3))
