"""Loading: the model and the tokenizer in the folder of a checkpoint or of a saved model, for generation.

Takes a folder; gives the model on the accelerator, if there is one, and the tokenizer. The weights are those of the
folder. The class is one of transformers, which the configuration in the folder names; no other code is run. A folder
with an adapter names its base model, whose digest is compared with the one that was recorded when the adapter was
trained. If a folder does not say enough, `RecordNeeded` is raised: the record of the run can then build the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from forgather.errors import CheckpointError, ForgatherError, TrainingError, first_line
from forgather.ml.adapter_base import BaseModel, describe_base, read_base
from forgather.ml.adapters import Adapter
from forgather.ml.checkpoint.averaged_weights import warn_of_average
from forgather.ml.checkpoint.export import loadable_weights
from forgather.ml.checkpoint.files import ADAPTER_CONFIG, CONFIG, EXTRA_STATE, MODEL, TRAINING_ARGS
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.saved_model import read_saved_model
from forgather.ml.generation.encoder_decoder import has_encoder, obstacle
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.model_class import class_name, is_quantized
from forgather.ml.models import from_pretrained
from forgather.ml.random_state import forked_random
from forgather.ml.strategy.state import restore_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GENERATION_CONFIG = "generation_config.json"


class LoadingError(TrainingError):
    """Raised if a folder does not contain a model that generates text."""

    code = "FG923"


class RecordNeeded(LoadingError):
    """Raised if only the record of the run says how the model is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The folder of a model.

    Args:
        folder: the folder of a verified checkpoint, or of a saved model.
        is_checkpoint: whether it is a checkpoint.
        merged: whether an adapter is added to the weights of its base model before anything is generated.
        near: the folders in which a base model with a relative name is looked for.
        build: a function that builds the model, without the trainer's adapter, as the run did; None to build it from
            the files of the folder.
    """

    folder: Path
    is_checkpoint: bool
    merged: bool = False
    near: Sequence[Path] = ()
    build: Callable[[], nn.Module] | None = None

    @property
    def has_adapter(self) -> bool:
        """Whether the folder contains an adapter."""
        return (self.folder / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to generate.

    Args:
        model: the model, in evaluation mode.
        tokenizer: the tokenizer.
        base: the base model of the adapter; None without an adapter.
        is_base_verified: whether the digest of the base model is the one that was recorded.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    base: BaseModel | None = None
    is_base_verified: bool = False


def load_for_generation(source: Source) -> LoadedModel:
    """Returns the model and the tokenizer of a folder.

    Args:
        source: the folder.

    Raises:
        RecordNeeded: FG923 or FG926 if only the record of the run says how the model or its base model is built.
        LoadingError: FG923 if the model does not generate text; FG924 if there is no tokenizer; FG926 if the base model
            of the adapter cannot be loaded or is another one; FG929 if there is no adapter to merge, or if its base
            model is quantized.
        CheckpointError: FG603 to FG605 or FG611 if the checkpoint cannot be read.
    """
    if source.merged and not source.has_adapter:
        raise LoadingError(
            f"{str(source.folder)!r} has no adapter that could be merged", code="FG929", hint="leave out --merged"
        )
    if source.is_checkpoint:
        warn_of_average(source.folder)
    # First, because it takes less time than the model.
    tokenizer = _tokenizer(source.folder) if _has_tokenizer(source.folder) or not source.has_adapter else None
    base, is_verified = None, False
    if source.has_adapter:
        model, base, is_verified = _adapted(source)
        if tokenizer is None:
            tokenizer = _tokenizer_of_base(source, base)
    else:
        model = _whole(source)
    _refuse_silent(model)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    model = model.to(accelerator) if accelerator is not None and not is_quantized(model) else model
    model.eval()
    assert tokenizer is not None  # noqa: S101 - both ways give one, or raise
    return LoadedModel(model=model, tokenizer=tokenizer, base=base, is_base_verified=is_verified)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not _has_tokenizer(folder):
        raise LoadingError(
            f"{str(folder)!r} has no tokenizer",
            code="FG924",
            hint="give the trainer a processing_class, which is saved with the model, or copy its files there",
        )
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = first_line(error)[:200]
        raise LoadingError(
            f"the tokenizer in {str(folder)!r} cannot be loaded: {reason}", code="FG924", hint="save it again"
        ) from error
    return found


def _tokenizer_of_base(source: Source, base: BaseModel) -> PreTrainedTokenizerBase:
    folder = _located(base.name, source.near)
    return _tokenizer(folder if folder is not None else source.folder)


def _whole(source: Source) -> nn.Module:
    """Returns a model whose weights are all in the folder."""
    if source.build is not None:
        return _restored(source.build(), source)
    kind = _class_in(source.folder)
    if not source.is_checkpoint:
        return _saved(kind, source.folder)
    try:
        weights = loadable_weights(source.folder)
    except CheckpointError as error:
        if error.code not in ("FG611", "FG612"):
            raise
        raise RecordNeeded(_unreadable(source.folder, error.message), hint=error.hint) from error
    return _saved(kind, source.folder, weights)


def _class_in(folder: Path) -> type[PreTrainedModel]:
    """Returns the class that the configuration in a folder names."""
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        name = str((facts.get("architectures") or [""])[0])
    except FileNotFoundError:
        raise RecordNeeded(
            f"{str(folder)!r} has no {CONFIG}, so the class of its model is not known", hint=_WHAT_IS_LOADED
        ) from None
    except (OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError):
        raise LoadingError(_unreadable(folder, f"its {CONFIG} is not that of a model")) from None
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        what = f"{name!r:.80} is not a class of transformers" if name else f"its {CONFIG} names no class"
        raise RecordNeeded(_unreadable(folder, what), hint=_WHAT_IS_LOADED)
    if not kind.can_generate():
        raise _silent(name)
    return kind


_WHAT_IS_LOADED = (
    "name the run or its output folder, whose record builds the model; without a record, load the model in Python"
)


def _saved(
    kind: type[PreTrainedModel], folder: Path, weights: dict[str, Any] | None = None, dtype: Any = "auto"
) -> PreTrainedModel:
    """Returns a model of transformers.

    Args:
        kind: the class.
        folder: the folder with the configuration.
        weights: the weights under the names of the hub; None to read them from the folder.
        dtype: the type of the weights; "auto" for the one in which they are stored.

    Shapes:
        weights: any.
    """
    loader: Any = kind
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    if weights is not None:
        options |= {"state_dict": weights, "config": loader.config_class.from_pretrained(folder)}
    try:
        with without_progress_bars(), forked_random(0):
            model, facts = loader.from_pretrained(None if weights is not None else folder, **options)
            if weights is not None and (folder / _GENERATION_CONFIG).is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise LoadingError(_unreadable(folder, first_line(error)[:200])) from error
    # transformers fills weights that it does not find with random numbers.
    lacking = sorted([*facts["missing_keys"], *map(str, facts["mismatched_keys"])])
    if lacking:
        raise LoadingError(_unreadable(folder, f"{lacking[0]!r:.80} is missing, or has another shape"))
    return model  # type: ignore[no-any-return]


def _restored(model: nn.Module, source: Source) -> nn.Module:
    """Returns a model that was built from the record of its run, with the weights of the folder."""
    if source.is_checkpoint:
        with CheckpointReader(source.folder, sections=(MODEL, EXTRA_STATE)) as saved:
            restore_weights(model, model.state_dict(), [model], saved)
    else:
        with read_saved_model(source.folder, model) as held:
            restore_weights(model, model.state_dict(), [model], held)
    return model


def _adapted(source: Source) -> tuple[nn.Module, BaseModel, bool]:
    """Returns the model with its adapter, the base model, and whether its digest was compared."""
    if find_spec("peft") is None:
        raise LoadingError(
            f"{str(source.folder)!r} holds an adapter, and peft is not installed",
            code="FG926",
            hint="pip install 'forgather[finetune]'",
        )
    base, is_verified = _base(source)
    described = describe_base(base)
    if source.is_checkpoint:
        import peft

        config = peft.PeftConfig.from_pretrained(str(source.folder))
        config.inference_mode = False
        # The seed of the run: some initial weights, such as those of PiSSA, change the base model.
        adapted = Adapter(settings={}, config=config).apply(base, seed=_seed(source.folder))
        with CheckpointReader(source.folder, sections=(MODEL, EXTRA_STATE)) as saved:
            restore_weights(adapted, adapted.state_dict(), [adapted], saved)
    else:
        adapted = Adapter(settings={}, path=source.folder).apply(base, seed=0)
    if source.merged:
        _refuse_quantized(base)
        tuned: Any = adapted
        adapted = tuned.merge_and_unload(safe_merge=True)
    return adapted, described, is_verified


def _seed(folder: Path) -> int:
    try:
        seed = json.loads((folder / TRAINING_ARGS).read_text(encoding="utf-8")).get("seed")
    except (OSError, ValueError, AttributeError):
        return 0
    return seed if isinstance(seed, int) and seed >= 0 else 0


def _base(source: Source) -> tuple[nn.Module, bool]:
    """Returns the base model of an adapter, and whether its digest is the recorded one."""
    known = read_base(source.folder) or BaseModel(name=_name_in_config(source.folder))
    if source.build is not None:
        model = source.build()
        if not known.digest or describe_base(model).digest == known.digest:
            return model, bool(known.digest)
        raise _another_base(LoadingError, source, known, model)
    model = _named_base(known.name, source, "auto")
    if not known.digest or describe_base(model).digest == known.digest:
        return model, bool(known.digest)
    # The run may have loaded the same folder in another type, which is a part of the digest.
    for dtype in _DTYPES:
        other = _named_base(known.name, source, dtype)
        if describe_base(other).digest == known.digest:
            return other, True
    raise _another_base(RecordNeeded, source, known, model)


def _another_base(kind: type[LoadingError], source: Source, known: BaseModel, model: nn.Module) -> LoadingError:
    found = describe_base(model)
    return kind(
        f"the adapter in {str(source.folder)!r} was trained on {known}, and its base model is {found} now",
        code="FG926",
        hint="restore the base model as it was when the adapter was trained",
    )


def _name_in_config(folder: Path) -> str:
    try:
        return str(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"] or "")
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _located(name: str, near: Sequence[Path]) -> Path | None:
    """Returns the folder of a base model; None if it is a name of the Hub."""
    places = [Path(name).expanduser(), *(folder / name for folder in near)]
    return next((place for place in places if name and place.is_dir()), None)


def _named_base(name: str, source: Source, dtype: Any) -> nn.Module:
    """Returns the base model that an adapter names."""
    if not name:
        raise RecordNeeded(
            f"the adapter in {str(source.folder)!r} names no base model: the run built it without loading it",
            code="FG926",
            hint="name the run or its output folder, whose record builds the base model",
        )
    folder = _located(name, source.near)
    try:
        if folder is None:
            return from_pretrained(name, dtype=dtype)
        found = _saved(_class_in(folder), folder, dtype=dtype)
    except ForgatherError as error:
        raise RecordNeeded(
            f"the base model {name!r} of the adapter in {str(source.folder)!r} cannot be loaded: {error.message}",
            code="FG926",
            hint="put the base model where the adapter names it, or change base_model_name_or_path in "
            f"{ADAPTER_CONFIG}",
        ) from error
    # The name of the adapter, which may be relative to another folder: names are compared if digests are not known.
    found.config._name_or_path = name
    return found


def _refuse_quantized(base: nn.Module) -> None:
    if is_quantized(base):
        raise LoadingError(
            "the base model of the adapter is quantized, and a merge into its weights would lose a part of the adapter",
            code="FG929",
            hint="leave out --merged: the adapter is then computed beside the base model",
        )


def _refuse_silent(model: Any) -> None:
    can = getattr(model, "can_generate", None)
    writes = callable(getattr(model, "generate", None)) and (not callable(can) or can())
    if not writes:
        raise _silent(class_name(model))
    if has_encoder(model) and (reason := obstacle(model)) is not None:
        raise LoadingError(f"{class_name(model)} writes no text: {reason[0]}", hint=reason[1])


def _silent(name: str) -> LoadingError:
    return LoadingError(f"{name} is not a model that writes texts", hint="'fgcli eval' evaluates it")


def _unreadable(folder: Path, reason: str) -> str:
    return f"the model in {str(folder)!r} cannot be loaded: {reason}"
