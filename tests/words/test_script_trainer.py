"""`DistributedTrainer` as an object: recovery, resets, and what it refuses before anything is trained."""

import functools
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler  # noqa: E402

from forgather.distributed import DistributedDataLoader, DistributedTrainer, setup_distributed_training  # noqa: E402
from forgather.distributed.engine import constructor_text, read_engine  # noqa: E402
from forgather.distributed.optimizer import without_stage_0  # noqa: E402
from forgather.distributed.script_config import yaml_text  # noqa: E402
from forgather.distributed.words import read_words, with_defaults  # noqa: E402
from forgather.errors import DistributedError, ForgatherError, TrainingError  # noqa: E402
from tests.ml.distributed.gang import run_ranks  # noqa: E402
from tests.words import script_parts as parts  # noqa: E402

CONFIG = {"fp16": False, "use_cpu": True, "zero_stage": 0, "batch_size": 4, "save_interval": 2, "log_interval": 1}
CONFIG |= {"save_dir": "out", "loss_fn": torch.nn.CrossEntropyLoss(), "learning_rate": 1e-2}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def module(kind=parts.Classifier):
    torch.manual_seed(2)
    return kind()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class FailingAt(parts.Classifier):
    """A model that fails once, at a given call."""

    at = calls = 0

    def forward(self, x):
        FailingAt.calls += 1
        if FailingAt.calls == FailingAt.at:
            raise RuntimeError("the device is gone for a moment")
        return super().forward(x)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("uninterrupted"))
    trainer = DistributedTrainer(model := module(), optimizer_of(model), config={**CONFIG, "save_dir": out})
    trainer.train(2, parts.numbers())
    return parts.result_of(trainer.trainer, out)


def test_a_run_that_recovers_ends_as_one_that_does_not_fail(uninterrupted):
    FailingAt.calls, FailingAt.at = 0, 8
    trainer = DistributedTrainer(model := module(FailingAt), optimizer_of(model), config=CONFIG)
    with pytest.raises(RuntimeError, match="gone for a moment"):
        trainer.train(2, parts.numbers())
    with pytest.raises(TrainingError, match=r"last run has failed.*restore_from_checkpoint"):
        trainer.train(2)
    with pytest.raises(TrainingError, match=r"reset\(\) would lose 3 checkpoints") as raised:
        trainer.reset()
    assert "FG859" == raised.value.code
    assert trainer.has_checkpoint()
    assert trainer.restore_from_checkpoint().endswith("checkpoint-6")
    trainer.train(2)
    assert uninterrupted["weights"] == parts.result_of(trainer.trainer, "out")["weights"]


@pytest.mark.matrix
def test_a_run_whose_model_is_split_recovers(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    config = {**CONFIG, "zero_stage": 3}
    weights = []
    for at in (0, 8):
        FailingAt.calls, FailingAt.at = 0, at
        trainer = DistributedTrainer(
            model := module(FailingAt), optimizer_of(model), config={**config, "save_dir": f"{at}"}
        )
        trainer.enable_fault_tolerance(max_retry_attempts=1)
        trainer.train(2, parts.numbers())
        weights.append(parts.result_of(trainer.trainer, f"{at}")["weights"])
    assert weights[0] == weights[1]


def test_attempts_of_one_process_end_as_one_that_does_not_fail(uninterrupted, caplog):
    FailingAt.calls, FailingAt.at = 0, 8
    trainer = DistributedTrainer(model := module(FailingAt), optimizer_of(model), config=CONFIG)
    trainer.enable_fault_tolerance(max_retry_attempts=1, checkpoint_interval=2)
    trainer.train(2, parts.numbers())
    assert "gone for a moment; trying again, from " in caplog.text
    assert uninterrupted["weights"] == parts.result_of(trainer.trainer, "out")["weights"]


def test_a_reset_begins_with_the_initial_weights(uninterrupted):
    trainer = DistributedTrainer(model := module(), optimizer_of(model), config=CONFIG)
    trainer.train(1, parts.numbers())
    trainer.reset(discard_checkpoints=True)
    assert not trainer.has_checkpoint()
    trainer.train(2)
    found = parts.result_of(trainer.trainer, "out")
    assert (uninterrupted["losses"], uninterrupted["weights"]) == (found["losses"], found["weights"])


def attempts_of_a_gang():
    trainer = DistributedTrainer(parts.Classifier, config=CONFIG)
    with pytest.raises(TrainingError, match="max_retry_attempts is 3, and the launcher .* again 0 times") as raised:
        trainer.enable_fault_tolerance()
    return raised.value.hint


def test_the_launcher_of_several_processes_must_know_the_attempts():
    hints = run_ranks(2, attempts_of_a_gang)
    assert ["start it with: torchrun --max-restarts 3 --nproc-per-node 2 script.py"] * 2 == hints


LOADERS = {
    "sampler": lambda rows: {"sampler": WeightedRandomSampler([1.0] * len(rows), 4)},
    "generator": lambda rows: {"shuffle": True, "generator": torch.Generator()},
    "replacement": lambda rows: {"sampler": RandomSampler(rows, replacement=True)},
    "batch_sampler": lambda rows: {"batch_sampler": [[0, 1], [2, 3]]},
    "batch_size=None": lambda rows: {"batch_size": None},
    "timeout": lambda rows: {"num_workers": 1, "timeout": 3},
    "worker_init_fn": lambda rows: {"worker_init_fn": print},
}


@pytest.mark.parametrize("what", LOADERS)
def test_an_order_of_its_own_is_refused(what):
    rows = parts.numbers()
    given = LOADERS[what](rows)
    if "batch_sampler" not in given:
        given.setdefault("batch_size", 4)
    trainer = setup_distributed_training(parts.Classifier, CONFIG)
    with pytest.raises(TrainingError, match=f"the data loader's .*{what.split('=')[0]}") as raised:
        trainer.train(1, DataLoader(rows, **given))
    assert "FG811" == raised.value.code


def test_a_loader_becomes_settings():
    rows = parts.numbers()
    trainer = setup_distributed_training(parts.Classifier, {**CONFIG, "batch_size": None})
    sampler = DistributedSampler(rows, num_replicas=1, rank=0, shuffle=False)
    given = {"sampler": sampler, "drop_last": True, "collate_fn": torch.utils.data.default_collate}
    trainer.train(1, DataLoader(rows, batch_size=5, **given))
    text = trainer.to_config()
    for line in ("per_device_train_batch_size: 5", 'train_sampling_strategy: "sequential"', "drop_last: true"):
        assert line in text
    assert 4 == trainer.trainer.state.global_step
    with pytest.raises(
        TrainingError, match="batch_size: 4 contradicts per_device_train_batch_size: 5 of the DataLoader"
    ):
        setup_distributed_training(parts.Classifier, CONFIG).train(1, DataLoader(rows, batch_size=5))


class Recording(torch.utils.data.Dataset):
    """Rows that note the order in which they are read."""

    def __init__(self):
        self.rows, self.read = parts.numbers(), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.read.append(number)
        return self.rows[number]


def test_a_loader_of_ours_has_the_order_of_a_trainer():
    recording = Recording()
    given = {"batch_size": 4, "drop_last": True, "seed": 9}
    trainer = setup_distributed_training(parts.Classifier, {**CONFIG, "save_strategy": "no", "save_interval": None})
    trainer.train(2, DistributedDataLoader(recording, **given))
    loader = DistributedDataLoader(parts.numbers(), **given)
    expected = []
    for epoch in range(2):
        loader.get_sampler().set_epoch(epoch)
        expected += [number for batch in loader.get_sampler() for number in batch]
    assert expected == recording.read[-48:]
    assert "data_seed: 9" in loader.to_config()


WORDS = {
    "zero_stge": ({"zero_stge": 1}, "FG810", "did you mean 'zero_stage'"),
    "twice": ({"log_interval": 3, "steps_per_print": 4}, "FG812", "both set 'logging_steps'"),
    "offload": ({"activation_checkpointing": {"cpu_checkpointing": True}}, "FG811", "cpu_checkpointing is True"),
    "recompute": ({"activation_checkpointing": "yes"}, "FG813", "activation_checkpointing is 'yes'"),
    "flag": ({"save_logs": "no"}, "FG813", "save_logs is 'no'"),
    "tokenizer": ({"tokenizer": 1, "processing_class": 2}, "FG812", "both set 'tokenizer'"),
    "optimizer": ({"optimizer": 1}, "FG811", "DistributedTrainer(model, optimizer, config=config)"),
    "zero": ({"deepspeed": "auto", "zero_stage": 2}, "FG812", "deepspeed"),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_word_is_answered(name):
    words, code, said = WORDS[name]
    with pytest.raises(TrainingError) as raised:
        read_words(words)
    assert code == raised.value.code
    assert said in str(raised.value)


def test_the_defaults_are_those_of_the_table():
    table = {
        "batch_size": 1,
        "learning_rate": 1e-4,
        "zero_stage": 2,
        "fp16": True,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer": False,
        "offload_param": False,
        "activation_checkpointing": False,
        "save_interval": 1000,
        "log_interval": 10,
        "steps_per_print": 10,
    }
    written = with_defaults(read_words(table).settings)
    zero = written["deepspeed"]["zero_optimization"]
    assert {"stage": 2, "offload_optimizer": False, "offload_param": False} == zero
    zero.pop("offload_optimizer"), zero.pop("offload_param")
    assert False is written.pop("gradient_checkpointing")
    assert with_defaults({}) == written


def test_stage_0_needs_no_deepspeed():
    asked = {"deepspeed": {"zero_optimization": {"stage": 0, "offload_param": False}}, "strict": False, "seed": 1}
    assert {"seed": 1} == without_stage_0(asked)
    assert {"deepspeed": "zero.json"} == without_stage_0({"deepspeed": "zero.json"})
    with pytest.raises(TrainingError, match="communication_data_type is 'fp16', and zero_stage is 0") as raised:
        setup_distributed_training(parts.Classifier, {**CONFIG, "communication_data_type": "fp16"})
    assert "FG811" == raised.value.code


def test_a_strict_script_needs_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    trainer = setup_distributed_training(parts.Classifier, {**CONFIG, "zero_stage": 2, "strict": True})
    with pytest.raises(DistributedError, match="deepspeed, and it is not installed") as raised:
        trainer.train(1, parts.numbers())
    assert "FG740" == raised.value.code


def stepped():
    optimizer = optimizer_of(model := module())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def without_head():
    model = module()
    return model, torch.optim.SGD(model.layers.parameters(), lr=0.1)


class Odd(torch.optim.SGD):
    def __init__(self, params, factor):
        super().__init__(params, lr=factor * 2)


OPTIMIZERS = {
    "stepped": (stepped, "has stepped already"),
    "missing": (without_head, "lacks 2 trained weights"),
    "foreign": (lambda: (module(), optimizer_of(module())), "weights that are not those of the model"),
    "odd": (lambda: ((model := module()), Odd(model.parameters(), 2)), "cannot be made again"),
    "text": (lambda: (module(), "adamw"), "optimizer is a str"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_cannot_be_made_again_is_refused(name):
    make, said = OPTIMIZERS[name]
    model, optimizer = make()
    with pytest.raises(TrainingError, match=said) as raised:
        DistributedTrainer(model, optimizer, config={**CONFIG, "learning_rate": None})
    assert "FG819" == raised.value.code


def test_a_module_without_a_loss_is_refused():
    config = {**CONFIG, "loss_fn": None}
    with pytest.raises(TrainingError, match=r"a row has 2 items, and Classifier .* returns no loss") as raised:
        DistributedTrainer(module(), config=config).train(1, parts.numbers())
    assert "FG806" == raised.value.code
    for words, said in (({**CONFIG, "callbacks": 3}, "callbacks is 3"), ([1], "config is a list")):
        with pytest.raises(TrainingError, match=said):
            DistributedTrainer(module(), config=words)


def test_an_optimizer_and_a_learning_rate_must_agree():
    with pytest.raises(TrainingError, match=r"learning_rate is 0.5, and the optimizer has 0.01"):
        DistributedTrainer(model := module(), optimizer_of(model), config={**CONFIG, "learning_rate": 0.5})


def test_a_constructor_is_written_out():
    assert "!partial:tests.words.script_parts:make_llama\nlayers: 3" == constructor_text(
        functools.partial(parts.make_llama, 3)
    )
    assert [None, None] == [
        constructor_text(lambda: module()),
        constructor_text(functools.partial(parts.make_llama, layers=object())),
    ]
    wrapped = torch.nn.DataParallel(module())
    for engine, code in ((wrapped, "FG811"), (3, "FG801")):
        with pytest.raises(TrainingError) as raised:
            read_engine(engine)
        assert code == raised.value.code
    trainer = setup_distributed_training(module(), CONFIG)
    assert read_engine(trainer).model is trainer.model


def test_text_of_a_value_is_no_template():
    assert '{"a": "\\u007b{ x }} \\u007b% y"}' == yaml_text({"a": "{{ x }} {% y"}, "name")
    for value in (float("nan"), {1: 2}, object()):
        with pytest.raises(TrainingError, match="name is .*, which a config cannot contain"):
            yaml_text(value, "name")


def test_a_setting_that_no_config_can_contain_is_refused():
    with pytest.raises(ForgatherError, match="which a config cannot contain"):
        setup_distributed_training(parts.Classifier, {**CONFIG, "lr_scheduler_kwargs": {"x": object()}}).to_config()


def test_a_monitor_and_logs_are_both_kept(folder):
    from forgather.distributed.monitor import TrainingMonitor

    quiet, saving = TrainingMonitor(save_logs=False), TrainingMonitor(log_dir="mine")
    for monitor, words, expected in (
        (None, {"save_logs": True}, ["logs"]),
        (quiet, {"save_logs": True}, ["monitor", "logs"]),
        (saving, {"save_logs": True}, ["monitor"]),
        (saving, {"save_logs": True, "log_dir": "other"}, ["monitor", "logs"]),
        (quiet, {}, ["monitor"]),
    ):
        text = DistributedTrainer(parts.Classifier, None, monitor, {**CONFIG, **words}).to_config()
        assert expected == [name for name in ("monitor", "logs") if f"    {name}: " in text]
    saving.close()


@pytest.mark.parametrize("mapping_is_first", [True, False])
def test_a_word_and_a_mapping_of_deepspeed_are_one_mapping(mapping_is_first):
    mapping = {"zero_optimization": {"overlap_comm": True, "stage": 3}, "steps_per_print": 7}
    words = [("zero_stage", 3), ("deepspeed", mapping)]
    found = read_words(dict(reversed(words) if mapping_is_first else words)).settings["deepspeed"]
    assert mapping == found
    # The mapping of the script is its own.
    found["zero_optimization"]["stage"] = 1
    assert 3 == mapping["zero_optimization"]["stage"]


@pytest.mark.parametrize("mapping_is_first", [True, False])
def test_a_word_that_contradicts_a_mapping_of_deepspeed_is_an_error(mapping_is_first):
    words = [("zero_stage", 3), ("deepspeed", {"zero_optimization": {"stage": 2}})]
    with pytest.raises(
        TrainingError, match=r"FG812.*deepspeed.zero_optimization.stage is [23] by one word, and [23] by"
    ):
        read_words(dict(reversed(words) if mapping_is_first else words))


def test_a_trainer_of_a_trainer_has_its_words_and_its_optimizer():
    model = module()
    first = DistributedTrainer(model, optimizer_of(model), monitor=parts, config={**CONFIG, "batch_size": None})
    second = DistributedTrainer(first, config={"batch_size": 4})
    expected = DistributedTrainer(model, optimizer_of(model), config={**CONFIG, "callbacks": [parts]})
    assert expected.to_config() == second.to_config()
    with pytest.raises(TrainingError, match=r"FG812.*learning_rate"):
        DistributedTrainer(first, config={"learning_rate": 0.5})


def split_twice():
    from forgather.distributed import PipelineParallel, TensorParallel

    with pytest.raises(TrainingError, match=r"FG811.*the model of a TensorParallel is a PipelineParallel"):
        TensorParallel(PipelineParallel(module(), [0, 1]), [0, 1])


def test_a_model_that_is_split_is_not_split_again_in_silence():
    assert [None, None] == run_ranks(2, split_twice)


class Doubling(DataLoader):
    """A loader that changes its batches."""

    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"seed": 3}, "seed=3"),
        ({"drop_last": True}, "drop_last=True"),
        ({"num_replicas": 2}, "for 2 processes of 1"),
    ],
)
def test_what_a_distributed_sampler_says_else_is_refused(options, found):
    rows = parts.numbers()
    sampler = DistributedSampler(rows, **{"num_replicas": 1, "rank": 0, **options})
    with pytest.raises(TrainingError, match=rf"FG811.*sampler is .*{found}"):
        setup_distributed_training(parts.Classifier, {**CONFIG, "batch_size": None}).train(
            1, DataLoader(rows, sampler=sampler)
        )


def test_a_loader_that_changes_batches_or_leaves_rows_apart_is_not_a_plain_one():
    trainer = setup_distributed_training(parts.Classifier, {**CONFIG, "batch_size": None})
    with pytest.raises(TrainingError, match=r"FG811.*__iter__ is that of Doubling"):
        trainer.train(1, Doubling(parts.numbers()))
    convert = torch.utils.data.default_convert
    from forgather.ml.loader_facts import loader_facts

    assert convert is loader_facts(DataLoader(parts.numbers(), collate_fn=convert)).collate_fn
