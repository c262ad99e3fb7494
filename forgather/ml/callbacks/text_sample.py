"""Text samples: continuations of prompts that the model generates during training."""

from __future__ import annotations

import logging
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn
from transformers import GenerationConfig

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.callbacks.base import ExportableState, TrainerCallback
from forgather.ml.callbacks.output_target import report_only, run_folder, shared_console
from forgather.ml.data.chat_template import stop_token_ids
from forgather.ml.generation.prompt import chat_ids
from forgather.ml.metrics import LineWriter, end_of_lines, read_records, resume_lines
from forgather.ml.model_class import class_name
from forgather.ml.report.run_data import SAMPLES_FILE
from forgather.ml.train_mode import sampling_mode

_log = logging.getLogger(__name__)

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""


class TextSampleCallback(TrainerCallback, ExportableState):
    """A callback that generates continuations of prompts, prints them and appends them to `samples.jsonl`.

    The file is in the run's folder. With `predict_with_generate`, the answers to the first rows of each evaluation set
    are appended, too, with the expected answer as `reference`. Sampling does not affect training: the random states and
    the train or eval mode of each module are restored. If the model cannot generate text, one warning is logged.

    Args:
        prompts: a prompt or a list of prompts. A text is continued as it is; "" is the start of a document. A list of
            messages, such as `[{role: user, content: Hello}]`, is rendered by the chat template of the tokenizer and
            answered.
        tokenizer: the tokenizer, or None for the trainer's `processing_class`.
        max_new_tokens: the maximum number of new tokens. A sample ends earlier at the end-of-text token, or at the last
            position of the model.
        every_steps: the number of optimizer steps between two samples, or None to sample after each evaluation. A
            sample is taken at the end of training in both cases.
        do_sample: True to draw from the model's distribution, False for greedy decoding.
        temperature: the temperature of the distribution, if `do_sample` is True.
        top_k: the number of most likely tokens from which a token is drawn, if `do_sample` is True; 0 for all tokens.
        seed: the seed of the random draws. Equal models give equal samples.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.
        console: the console that is printed to, or None for standard output.

    Raises:
        ArgumentValueError: FG813 if a number is out of range.
    """

    def __init__(
        self,
        prompts: Prompt | Sequence[Prompt] = ("",),
        tokenizer: Any = None,
        max_new_tokens: int = 64,
        *,
        every_steps: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        seed: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
        console: Console | None = None,
    ) -> None:
        refuse_wrong_values("callbacks:TextSampleCallback", locals())
        # The messages of one conversation are one prompt.
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))
        self.prompts: list[Prompt] = [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.every_steps = every_steps
        self.drawing: dict[str, Any] = {"do_sample": do_sample}
        if do_sample:
            self.drawing |= {"temperature": temperature, "top_k": top_k}
        self.seed = seed
        self.run_dir = run_dir
        self.console = console
        self._writer: LineWriter | None = None
        self._last_step: int | None = None
        self._last_answers: int | None = None
        self._file: str | None = None
        self._begin = 0
        self._can_sample: bool | None = None

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Truncates or fills the file of a resumed run, so that the file ends at the step of the checkpoint."""
        if not self._samples_at_all(state, kwargs) or not state.is_world_process_zero:
            return
        before, begin, file = self._file, self._begin, self._samples(args)
        self._file, self._begin = str(file), end_of_lines(file)
        if state.global_step > 0 and before is not None and Path(before).is_file():
            records = read_records(before, strict=False, begin=begin)
            last = max(self._last_step or 0, self._last_answers or 0)
            done = [record for record in records if record["step"] <= last]
            self._begin = resume_lines(file, done, begin if before == self._file else None)

    def on_rewind(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Truncates the file to the step of the checkpoint to which the run was rewound."""
        self.on_train_begin(args, state, control, **kwargs)

    @report_only
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Generates samples after every `every_steps` optimizer steps."""
        if self.every_steps is not None and state.global_step % self.every_steps == 0:
            self._sample(args, state, kwargs)

    @report_only
    def on_evaluate(
        self, args: Any, state: Any, control: Any, answers: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> None:
        """Writes the answers that the evaluation generated; generates samples, unless `every_steps` is set."""
        if answers and state.is_world_process_zero and self._last_answers != state.global_step:
            self._write(args, state, answers)
        self._last_answers = state.global_step if answers else self._last_answers
        if self.every_steps is None:
            self._sample(args, state, kwargs)

    @report_only
    def on_train_end(
        self, args: Any, state: Any, control: Any, error: BaseException | None = None, **kwargs: Any
    ) -> None:
        """Generates samples with the final model, unless the run ended with an error."""
        if error is None:
            self._sample(args, state, kwargs)
        if self._writer is not None:
            self._writer.close()

    def _sample(self, args: Any, state: Any, scene: dict[str, Any]) -> None:
        # An evaluation at the last step and the end of training would give the same sample twice.
        if self._last_step == state.global_step or not self.prompts or not self._samples_at_all(state, scene):
            return
        tokenizer = self.tokenizer or scene.get("processing_class")
        self._last_step = state.global_step
        model = unwrap_model(scene["model"])
        # Every rank generates: the forward pass of a sharded model is a collective.
        with sampling_mode(model, self.seed):
            samples = self._made(model, tokenizer)
        if not state.is_world_process_zero:
            return
        self._write(args, state, self._kept(samples, args, state.global_step))

    def _made(self, model: Any, tokenizer: Any) -> list[Any]:
        """Returns what the model makes of each prompt."""
        return [self._continue(model, tokenizer, prompt) for prompt in self.prompts]

    def _kept(self, samples: list[Any], args: Any, step: int) -> list[dict[str, Any]]:
        """Shows the samples, and returns the line that the file of samples gets for each of them."""
        self._show(step, samples)
        return [{"prompt": prompt, "text": text} for prompt, text in samples]

    def _write(self, args: Any, state: Any, records: Sequence[Mapping[str, Any]]) -> None:
        if self._writer is None:
            self._writer = LineWriter(self._samples(args))
        now = round(time.time(), 3)
        for record in records:
            self._writer.write({"step": state.global_step, "time": now, **record})

    def _samples_at_all(self, state: Any, scene: dict[str, Any]) -> bool:
        """Returns True if the model can generate text; otherwise the main process logs the reason once."""
        # Without prompts, nothing is asked of the model: the file gets the answers of evaluations.
        if "model" not in scene or not self.prompts:
            return True
        if self._can_sample is None:
            reason = self._reason_for_no_samples(scene["model"], self.tokenizer or scene.get("processing_class"))
            self._can_sample = reason is None
            if reason is not None and state.is_world_process_zero:
                _log.warning("no text is sampled: %s", reason)
        return self._can_sample

    def _samples(self, args: Any) -> Path:
        return run_folder(args, self.run_dir) / SAMPLES_FILE

    def state(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint: the last steps, the file, and where its samples begin."""
        attributes: dict[str, Any] = {"_last_step": self._last_step, "_last_answers": self._last_answers}
        attributes |= {"_file": self._file, "_begin": self._begin}
        return {"args": {}, "attributes": attributes}

    def _continue(self, model: Any, tokenizer: Any, prompt: Prompt) -> tuple[str, str]:
        """Returns the prompt as a text, and its continuation."""
        if isinstance(prompt, str):
            shown, prompt_ids = prompt, tokenizer(prompt)["input_ids"] or [start_token(tokenizer)]
        else:
            prompt_ids = chat_ids(tokenizer, prompt)
            shown = str(tokenizer.decode(prompt_ids))
        longest = getattr(model.config, "max_position_embeddings", None) or len(prompt_ids) + self.max_new_tokens
        # The end of a prompt that is too long is kept, with room for at least one new token.
        prompt_ids = prompt_ids[-(longest - 1) :]
        inputs = torch.tensor([prompt_ids], device=next(model.parameters()).device)
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            use_cache=True,
            max_new_tokens=min(self.max_new_tokens, longest - len(prompt_ids)),
            eos_token_id=stop_token_ids(tokenizer) or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **self.drawing,
        )
        # A mask of ones, because transformers otherwise guesses it from the padding id, which may be a real token here.
        written = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
        return shown, str(tokenizer.decode(written[0, len(prompt_ids) :], skip_special_tokens=True))

    def _show(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        console = self.console or shared_console()
        console.print(Text(f"sample at step {step}", style="bold"))
        for number, (prompt, text) in enumerate(samples):
            if number:
                console.print()
            console.print(quote_sample(prompt + text), markup=False, highlight=False, soft_wrap=True)

    def _reason_for_no_samples(self, model: Any, tokenizer: Any) -> str | None:
        reason = _reason_for_no_samples(model, tokenizer)
        has_messages = any(not isinstance(prompt, str) for prompt in self.prompts)
        if reason is None and has_messages and not getattr(tokenizer, "chat_template", None):
            return "a prompt consists of messages, and the tokenizer has no chat template"
        return reason


def _reason_for_no_samples(model: Any, tokenizer: Any) -> str | None:
    """Returns the reason why a model cannot continue a text, or None if the model can."""
    model = unwrap_model(model)
    whole = getattr(model, "stands_for", model)
    # `can_generate` is False for models whose head is not a language model.
    can = getattr(whole, "can_generate", None)
    config: Any = getattr(whole, "config", None)
    writes = callable(getattr(whole, "generate", None)) and (can is None or can())
    if not writes or getattr(config, "is_encoder_decoder", False):
        return f"{class_name(whole)} is not a language model that can continue a text"
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        return "there is no tokenizer; give `tokenizer`, or `processing_class` to the trainer"
    return None


def quote_sample(text: str) -> str:
    """Returns `text` with a vertical bar before each line.

    Control characters, which could move a terminal's cursor, are replaced.
    """
    visible = "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return textwrap.indent(visible, "  | ", lambda line: True)


def unwrap_model(model: Any) -> Any:
    """Returns the model without the wrappers of `torch.compile` and data parallelism."""
    # Wrappers can be nested, for example a compiled model in DDP.
    while (inner := getattr(model, "_orig_mod", None) or _module(model)) is not None:
        model = inner
    return model


def start_token(tokenizer: Any) -> int:
    """Returns the id of the token with which a text starts.

    Raises:
        ValueError: if the tokenizer has neither a begin-of-text nor an end-of-text token.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("an empty prompt needs a tokenizer with a token for the begin or the end of text")


def _module(model: Any) -> Any:
    """Returns the model inside a wrapper such as DDP, or None if `model` is not a wrapper.

    A model whose own submodule is called `module` is not a wrapper.
    """
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) and hasattr(inner, "generate") else None
