"""Options and notes that `fgcli generate`, `chat` and `serve` have in common.

The functions add options to an argparse parser, load the model that they name, and say on the standard error stream
what was loaded and how tokens are chosen.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from forgather.cli.options import a_name, add_checkpoint
from forgather.cli.output import print_note
from forgather.cli.trusting import ask_trust
from forgather.errors import ProjectError
from forgather.launch.trained_model import (
    TrainedConversations,
    TrainedModel,
    find_model,
    load_model,
    trained_conversations,
)

_SEED_BITS = 31


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A loaded model, with what is known about its training.

    Args:
        trained: the folder of the model.
        loaded: the model and the tokenizer, a `LoadedModel` of `forgather.ml.generation.loading`.
        generator: the `Generator` of the model.
        conversations: what the run put into each conversation.
        is_merged: whether the adapter is merged.
    """

    trained: TrainedModel
    loaded: Any
    generator: Any
    conversations: TrainedConversations
    is_merged: bool

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.loaded.tokenizer, "chat_template", None))

    def described(self) -> list[str]:
        """Returns the lines that say which model was loaded."""
        base = self.loaded.base
        if base is None:
            return self.trained.described()
        how = "merged" if self.is_merged else "applied"
        trust = "" if self.loaded.is_base_verified else ", whose weights were not compared"
        return [*self.trained.described(), f"adapter     {how} to {base}{trust}"]


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name the model."""
    parser.add_argument(
        "folder",
        metavar="RUN",
        type=a_name,
        help="a run, an output folder, a checkpoint, or the folder of a saved model or adapter",
    )
    add_checkpoint(parser)
    parser.add_argument("--merged", action="store_true", help="merge the adapter into its base model first")


def add_longest(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Adds the option that limits the length of an answer, with its default in tokens."""
    what = f"longest answer in tokens (default: {tokens})"
    parser.add_argument("--max-new-tokens", type=int, default=tokens, metavar="N", help=what)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how tokens are chosen."""
    add_longest(parser, 256)
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="draw tokens at this temperature (default: the likeliest token)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens of this probability")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the draws (default: another one each time)")


def sampling_of(options: argparse.Namespace) -> Any:
    """Returns the `Sampling` of the command line; without `--seed`, the seed is a random one.

    Raises:
        SamplingError: FG925 if a setting is not allowed.
    """
    seed = random.getrandbits(_SEED_BITS) if options.seed is None else options.seed
    return import_module("forgather.ml.generation.generator").Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=seed,
        max_new_tokens=options.max_new_tokens,
    )


def sampling_line(sampling: Any) -> str:
    """Returns the line that says how tokens are chosen."""
    if sampling.is_greedy:
        return "tokens      the most likely one each time"
    parts = {
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "top-p": sampling.top_p,
        "top-k": sampling.top_k,
        "seed": sampling.seed,
    }
    return "tokens      drawn, " + ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def load_speaker(options: argparse.Namespace) -> Speaker:
    """Returns the model that the command line names, loaded; asks for trust if code of the project has to run.

    Raises:
        ForgatherError: if there is no such model, or if it cannot be loaded.
    """
    trained = find_model(options.folder, options.checkpoint)
    # Nothing but answers goes to the standard output.
    with redirect_stdout(sys.stderr):
        loaded = load_model(trained, merged=options.merged, allow=lambda project, target: ask_trust(project, [target]))
        generator = import_module("forgather.ml.generation.generator").Generator(loaded.model, loaded.tokenizer)
    return Speaker(
        trained=trained,
        loaded=loaded,
        generator=generator,
        conversations=trained_conversations(trained.run),
        is_merged=options.merged,
    )


def source_form(speaker: Speaker, system: str | None) -> Any:
    """Returns the `PromptForm` of sources, which an encoder reads.

    Args:
        speaker: the loaded model.
        system: the value of `--system`.

    Raises:
        PromptError: FG920 if there is a system message.
    """
    prompts = import_module("forgather.ml.generation.prompt")
    return prompts.PromptForm(
        tokenizer=speaker.loaded.tokenizer,
        form=prompts.SOURCE,
        system=system,
        prefix=speaker.conversations.source_prefix,
    )


def refuse_encoder(speaker: Speaker, command: str) -> None:
    """Raises an error if an encoder reads the prompts of a model, which then has no turns.

    Args:
        speaker: the loaded model.
        command: the word of the command.

    Raises:
        ProjectError: FG989.
    """
    if speaker.generator.has_encoder:
        raise ProjectError(
            f"'fgcli {command}' is for models that continue texts, and this one writes one text from another",
            code="FG989",
            hint="'fgcli generate' gives it a text",
        )


def chat_form(speaker: Speaker, system: str | None) -> Any:
    """Returns the `PromptForm` of conversations.

    Args:
        speaker: the loaded model.
        system: the value of `--system`: None for the system message of the training, "" for none.

    Raises:
        PromptError: FG922 if the tokenizer has no chat template.
    """
    prompts = import_module("forgather.ml.generation.prompt")
    return prompts.PromptForm(
        tokenizer=speaker.loaded.tokenizer,
        form=prompts.CHAT,
        system=speaker.conversations.system if system is None else system or None,
        options=speaker.conversations.options,
    )


def form_lines(form: Any, speaker: Speaker) -> list[str]:
    """Returns the lines that say how prompts are rendered."""
    if form.form == "source":
        begin = f", after {form.prefix!r} as in training" if form.prefix else ""
        return [f"prompt      the source, which the encoder reads{begin}"]
    if form.form != "chat":
        why = "" if speaker.has_chat_template else " (the tokenizer has no chat template)"
        return [f"prompt      continued as it is{why}"]
    lines = ["prompt      a message of the user, rendered by the chat template"]
    if form.system is not None:
        is_trained = form.system == speaker.conversations.system
        how = " (as in training; --system '' leaves it out)" if is_trained else ""
        lines.append(f"system      {form.system!r:.100}{how}")
    if form.options:
        lines.append("template    " + ", ".join(f"{name}: {value!r}" for name, value in form.options.items()))
    return lines


def print_notes(lines: list[str]) -> None:
    """Prints lines on the standard error stream."""
    for line in lines:
        print_note(line)


def control_note(form: Any, question: Any) -> None:
    """Prints a note if a question contains text that the tokenizer reads as special tokens."""
    found = form.control_tokens(question)
    if found:
        print_note(f"note: the tokenizer reads {', '.join(map(repr, found))} in the prompt as special tokens")
