"""GRPO and RLOO: prompts and reward functions, what is refused, and runs that equal those of plain TRL."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from forgather.errors import TrainingError
from forgather.ml.data import as_chats, rollout_prompts
from forgather.ml.data.data_errors import DataError
from forgather.ml.models import refuse_missing_reference
from forgather.ml.reward_function import RewardError, reward_functions
from forgather.ml.trainer import argument_checks
from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.rules import shipped_rules
from tests.matrix import thinned
from tests.ml.fixtures import tiny_llama

ROOT = Path(__file__).parents[2]
RECORD = json.loads((Path(__file__).parent / "recorded" / "rewarded_runs.json").read_text())
PREFERENCES = ROOT / "projects/preferences"
IGNORED = "ignore::FutureWarning"  # TRL uses names that transformers will remove


@pytest.fixture(scope="module")
def oracle():
    spec = importlib.util.spec_from_file_location("rewarded_runs", ROOT / "scripts/oracles/rewarded_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    made = tmp_path_factory.mktemp("rewarded")
    oracle.make_folder(made)
    return made


def chat(*turns, **more):
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


def test_the_prompt_of_a_conversation_is_what_comes_before_its_last_answer():
    rows = [
        chat(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
        chat(("system", "s"), ("user", "a")),
    ]
    found = rollout_prompts(as_chats(Dataset.from_list(rows)))

    texts = [[message["content"] for message in row["prompt"]] for row in found]
    assert [["s", "a", "b", "c"], ["s", "a"]] == texts
    assert ["d", None] == found["answer"][:]


def test_the_completion_of_a_row_is_called_answer_and_other_columns_stay():
    rows = [{"question": "1 + 1", "completion": "2", "level": 3}]

    found = rollout_prompts(Dataset.from_list(rows), prompt_column="question")

    assert [{"prompt": "1 + 1", "answer": "2", "level": 3}] == found.to_list()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": "  "}], "row 1 of the data set has '  '"),
        ([{"prompt": 3}], "row 0 of the data set has 3"),
        ([{"prompt": [{"role": "assistant", "content": "b"}]}], "which is not a prompt"),
        ([{"prompt": "a", "completions": "b"}], "a column 'completions', the name of an argument"),
    ],
)
def test_rows_without_a_prompt_are_refused(rows, message):
    with pytest.raises(DataError, match=message) as caught:
        rollout_prompts(Dataset.from_list(rows))
    assert "FG984" == caught.value.code


def test_a_column_prompt_cannot_take_the_place_of_the_prompts():
    rows = Dataset.from_list([{"prompt": "a template", "question": "1 + 1?"}])
    with pytest.raises(DataError, match="a column 'prompt' beside the prompts in 'question'") as caught:
        rollout_prompts(rows, prompt_column="question")
    assert "FG984" == caught.value.code
    assert [{"prompt": "1 + 1?"}] == rollout_prompts(rows.remove_columns("prompt"), prompt_column="question").to_list()


def test_a_conversation_with_tools_is_refused_as_they_would_not_be_called():
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    with pytest.raises(DataError, match="has tools") as caught:
        rollout_prompts(as_chats(Dataset.from_list([chat(("user", "a"), ("assistant", "b"), tools=[tool])])))
    assert "FG984" == caught.value.code


def length(completions, **others):
    return [len(text) for text in completions]


def test_reward_functions_with_one_name_are_logged_under_two():
    first, second = reward_functions([length, length], ["answer"])

    assert ["length", "length_2"] == [first.__name__, second.__name__]
    assert [1.0, 2.0] == first(completions=["a", "bb"])
    assert [None, 0.5] == reward_functions(lambda completions, **others: [None, 0.5], [])[0](completions=["a", "b"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "there is no reward function"),
        ([3], "is a int"),
        (lambda completions: [0.0], "cannot be called: got an unexpected keyword"),
        (lambda completions, **others: 1.0, "returned 1.0 for 1 answer "),
        (lambda completions, **others: [1.0, 2.0], "returned 2 rewards for 1 answer "),
        (lambda completions, **others: torch.tensor([float("nan")]), "returned nan for answer 0 of 1 answer, to"),
        (lambda completions, **others: [10**400], "returned a whole number that no float can hold for answer 0"),
        (lambda completions, **others: [-(10**5000)], "returned a whole number that no float can hold for answer 0"),
        (lambda completions, **others: torch.ones(1, 1), "returned a list for answer 0"),
        (lambda completions, **others: ["high"], "returned 'high' for answer 0 of 1 answer, to the prompt 'Hi' "),
    ],
)
def test_a_reward_function_that_gives_no_rewards_is_refused(given, message):
    with pytest.raises(RewardError, match=message) as caught:
        reward_functions(given, ["answer"])[0](prompts=["Hi"], completions=["a"])
    assert ("FG986", "reward_funcs") == (caught.value.code, caught.value.argument)


@pytest.mark.parametrize(
    ("constructor", "settings", "argument"),
    [
        ("forgather.ml.trainer.rl:GRPOTrainer", {"loss_fn": print}, "loss_fn"),
        ("forgather.ml.trainer.rl:RLOOTrainer", {"compute_metrics": print}, "compute_metrics"),
        ("forgather.ml.trainer.rl:GRPOTrainer", {"args.fsdp": "full_shard"}, "args.fsdp"),
        ("forgather.ml.trainer.rl:GRPOTrainer", {"args.deepspeed": {"zero_optimization": {}}}, "args.deepspeed"),
        ("trl:GRPOConfig", {"schedule_class": "Schedule1F1B"}, "schedule_class"),
        ("trl:RLOOConfig", {"tp_plan": "auto"}, "tensor_parallel_size"),
    ],
)
def test_strategies_and_settings_of_other_trainers_are_refused_by_name(constructor, settings, argument):
    rules = shipped_rules()[constructor][0]
    nothing = dict.fromkeys(("loss_fn", "compute_metrics", "args.fsdp", "args.deepspeed"))

    [found] = rules.broken({**nothing, **settings}, settings)

    assert ("FG985", argument) == (found.code, found.argument)
    assert [] == list(rules.broken(nothing, ()))
    with pytest.raises(argument_checks.SettingError, match=r".") as caught:
        argument_checks.raise_first_error([found])
    assert "FG985" == caught.value.code


def test_a_reference_that_cannot_be_loaded_is_refused(tmp_path):
    model = tiny_llama()
    refuse_missing_reference(model, 0.0)
    with pytest.raises(TrainingError, match="there is no reference to load") as caught:
        refuse_missing_reference(model, 0.05)
    assert "FG987" == caught.value.code
    model.config._name_or_path = str(tmp_path)
    refuse_missing_reference(model, 0.05)


def test_the_check_says_what_a_config_of_grpo_needs():
    found = {finding.code for finding in check_project(Project("grpo.yaml", PREFERENCES)).errors}

    assert (set() if importlib.util.find_spec("trl") else {"FG882"}) == found


@pytest.mark.parametrize("case", RECORD["figures"])
def test_recorded_weights_are_those_of_trl(case):
    assert 0.0 == RECORD["figures"][case]["difference"] < 0.01 < RECORD["figures"][case]["another seed"]


def test_recorded_weights_of_two_processes_are_those_of_one_for_the_same_answers():
    found = RECORD["two processes and one"]
    assert found["difference"] < 1e-5 < 0.01 < found["half of the rows"]


ALGORITHMS = [(algorithm, adapter) for algorithm in ("GRPO", "RLOO") for adapter in ("all weights", "LoRA")]


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize(
    ("algorithm", "adapter", "processes"), thinned([(*one, n) for one in ALGORITHMS for n in (1, 2)], lambda *_: 0)
)
def test_weights_are_those_of_trl(algorithm, adapter, processes, oracle, folder, monkeypatch, record_property):
    pytest.importorskip("trl")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as a launcher does; Accelerate would warn
    found = oracle.figures(folder, algorithm, adapter, processes)
    record_property("difference", found["difference"])
    assert 0.0 == found["difference"] < 0.01 < found["another seed"]


@pytest.mark.matrix
@pytest.mark.filterwarnings(IGNORED)
def test_weights_of_two_processes_are_those_of_one_for_the_same_answers(oracle, folder, monkeypatch, record_property):
    """Each process draws answers from a seed of its own, so a function of the prompt gives them here."""
    pytest.importorskip("trl")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func`
    found = oracle.figures_of_processes(folder)
    record_property("difference", found["difference"])
    assert found["difference"] < 1e-5 < 0.01 < found["half of the rows"]


@pytest.mark.matrix
@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize(("algorithm", "adapter"), ALGORITHMS)
def test_a_resumed_run_ends_with_the_same_bits(algorithm, adapter, oracle, folder, tmp_path):
    pytest.importorskip("trl")
    out, saved, steps = tmp_path / "out", [], []
    changes = [
        ("trainer_args.max_steps", "4"),
        ("trainer_args.save_strategy", "steps"),
        ("+trainer_args.save_steps", "2"),
    ]

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            steps.append(state.global_step)

    for resumed in ([], [("+trainer_args.resume_from_checkpoint", str(out / "checkpoint-2"))]):
        config = oracle.config_name(algorithm, adapter)
        trainer = Project(config, folder, output_dir=str(out), overrides=[*changes, *resumed])()
        trainer.add_callback(Steps())
        trainer.train()
        [file] = (out / "checkpoint-4").glob("*.safetensors")
        saved.append(load_file(file))

    assert [0, 1, 2, 3, 2, 3] == steps
    assert all(torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())


@pytest.mark.matrix
@pytest.mark.parametrize("setting", ["fsdp=full_shard", "schedule_class=Schedule1F1B", "deepspeed={stage: 1}"])
def test_the_check_refuses_other_strategies(setting):
    pytest.importorskip("trl")
    name, value = setting.split("=")
    checked = check_project(Project("grpo.yaml", PREFERENCES, overrides=[(f"+trainer_args.{name}", value)]))
    assert "FG985" in {finding.code for finding in checked.errors}
