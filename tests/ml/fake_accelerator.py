"""An accelerator that holds no values: every read of one of its tensors raises, at the line that reads.

Takes the arguments of a trainer; does optimizer steps of the whole `Run` on it, and gives their number. Keeps true: rows
are real until they are moved; what is moved, weights included, are FakeTensors on torch's Python private-use device; an
asynchronous copy to the host never arrives. It registers a device for the whole Python process: use it in a new one.
"""

import contextlib
import dataclasses
import tempfile

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import forgather.ml
from forgather.ml.strategy import model_strategy
from forgather.ml.trainer import loop, meter
from forgather.ml.trainer.run import Run

NAME = "valueless"


class _Module:
    """What torch asks of the module of a device."""

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def manual_seed_all(seed):
        pass


class NotThere:
    """An asynchronous copy that does not arrive while the run goes on."""

    is_there = False

    def __init__(self, values):
        self.values = values

    def read(self):
        raise AssertionError("the host waits for a copy")


class _Done(Exception):
    pass


def steps_without_values(make_model, rows, count=3, **settings):
    """Returns how many optimizer steps of a `Trainer` were done on the device.

    Args:
        make_model: a function that returns the model.
        rows: the training data.
        count: after how many steps to end.
        **settings: training arguments.

    Raises:
        DataDependentOutputException: at the line of the step that reads a value.
    """
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # Autocast itself casts nothing here: what it adds to a step besides is the same.
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # Inputs of a step are real: moving them makes them fake.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    done = 0

    def in_mode(function):
        def inner(*args, **kwargs):
            with mode:
                return function(*args, **kwargs)

        return inner

    def train_window(run, window, inner=loop.train_window):
        with mode:
            return inner(run, dataclasses.replace(window, batches=tree_map(valueless, window.batches)))

    def valueless(value):
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    def model_on_device():
        with unset_fake_temporarily():
            model = make_model()
        for module in model.modules():
            for name, value in module.named_parameters(recurse=False):
                there = valueless(value.detach()).to(NAME)
                setattr(module, name, nn.Parameter(there, requires_grad=value.requires_grad))
            for name, value in module.named_buffers(recurse=False):
                setattr(module, name, valueless(value).to(NAME))
        # torch moves a FakeTensor that has weak references to another device only, and these are there.
        model.to = lambda *args: model
        return model

    def finish(run, *args, inner=Run.finish_step):
        nonlocal done
        with mode:
            inner(run, *args)
        done += 1
        if done == count:
            raise _Done

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for owner, name, value in (
            (loop, "train_window", train_window),
            (Run, "finish_step", finish),
            (model_strategy.ModelStrategy, "build", in_mode(model_strategy.ModelStrategy.build)),
            (model_strategy.ModelStrategy, "build_optimizer", in_mode(model_strategy.ModelStrategy.build_optimizer)),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        # The device has no memory that is shared with the host, and no events.
        for module in _users_of_copies():
            stack.callback(setattr, module, "AsyncHostCopy", module.AsyncHostCopy)
            module.AsyncHostCopy = NotThere
        args = forgather.ml.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            logging_steps=100,
            save_strategy="no",
            max_steps=count + 1,
            **settings,
        )
        trainer = forgather.ml.Trainer(model_init=model_on_device, args=args, train_dataset=rows)
        assert NAME == trainer.strategy.topology.device.type
        with contextlib.suppress(_Done):
            trainer.train()
    return done


def _users_of_copies():
    from forgather.ml.trainer import step_clock, step_guard, synchronization

    return meter, step_clock, step_guard, synchronization
