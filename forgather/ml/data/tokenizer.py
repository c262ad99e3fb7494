"""Tokenizers: functions that train a byte-level BPE, load an existing tokenizer, and compute a tokenizer's digest.

The input is a data set with text, or a folder or name on the Hub; the output is a tokenizer of transformers. A trained
tokenizer is cached. Equal rows and settings give an equal tokenizer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tokenizers
import transformers
import xxhash
from datasets import Dataset, DatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forgather.errors import first_line
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.chat_template import set_chat_template
from forgather.ml.data.data_errors import DataError, DataFileError, missing_column
from forgather.ml.data.json_rows import is_utf8
from forgather.ml.data.progress_bar import show_progress
from forgather.ml.data.row_stream import refuse_stream
from forgather.ml.hub import folder_problem, hub_access, lookup_hint
from forgather.ml.log import get_logger

logger = get_logger(__name__)

_FILE = "tokenizer.json"
_FEW_TOKENS = "the tokenizer learned %d tokens: the texts are too short for more (vocab_size: %d is a limit)"
_NUM_BYTES = 256
# What a fast tokenizer keeps beside its serialized form.
_SETTINGS = ("split_special_tokens", "truncation_side")
_NO_LIMIT = int(1e30)  # transformers' own number for "no longest input"


def train_bpe(
    dataset: Dataset | DatasetDict,
    vocab_size: int = 4096,
    *,
    text_column: str = "text",
    bos_token: str = "<|endoftext|>",
    eos_token: str = "<|endoftext|>",
    pad_token: str = "<|pad|>",
    special_tokens: Sequence[str] = (),
    min_frequency: int = 2,
    add_prefix_space: bool = False,
    model_max_length: int | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer that is trained on a data set.

    Every byte is a token, so the tokenizer encodes every text without loss. `bos_token` and `eos_token` are the same
    token by default: packed training data has only the end-of-text token between documents, so a prompt that starts
    with the end-of-text token looks to the model like the start of a document.

    Args:
        dataset: the data set with the training text. The "train" split of a `DatasetDict` is used.
        vocab_size: the number of tokens, including special tokens.
        text_column: the name of the column with the text.
        bos_token: the begin-of-text token.
        eos_token: the end-of-text token.
        pad_token: the padding token.
        special_tokens: further tokens that are never split.
        min_frequency: the minimum count of a pair of tokens that is merged.
        add_prefix_space: True to encode the first word of a text as if a blank was before it. Words of a list, as for
            token classification, are then encoded as they are in a text.
        model_max_length: the maximum length of an input in tokens, or None for no limit.
        chat_template: a chat template as for `load_tokenizer`, whose tokens `special_tokens` must contain, or None.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Raises:
        DataError: FG831 if the column is missing, FG838 if `vocab_size` is too small for all bytes and special tokens.
    """
    refuse_wrong_values("data:train_bpe", locals())
    rows = _training_rows(dataset, text_column)
    specials = list(dict.fromkeys([bos_token, eos_token, pad_token, *special_tokens]))
    _check_room(vocab_size, len(specials))
    settings: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": specials, "min_frequency": min_frequency}
    # Only if it is set, so that the keys of tokenizers without it stay as they are.
    settings |= {"add_prefix_space": True} if add_prefix_space else {}

    def build(folder: Path) -> None:
        _train(rows, text_column, **settings).save(str(folder / _FILE))

    # With the version of the library: a newer one may train other merges.
    key = content_key(rows=rows._fingerprint, text_column=text_column, library=tokenizers.__version__, **settings)
    folder = cached_folder("tokenizer", key, build, cache_dir)
    backend = Tokenizer.from_file(str(folder / _FILE))
    if backend.get_vocab_size() < vocab_size:
        logger.warning_once(_FEW_TOKENS, backend.get_vocab_size(), vocab_size)
    tokens = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
    return _tokenizer(backend, chat_template, model_max_length=model_max_length or _NO_LIMIT, **tokens)


def _training_rows(dataset: Any, text_column: str) -> Dataset:
    rows: Dataset = dataset["train"] if isinstance(dataset, Mapping) and "train" in dataset else dataset
    refuse_stream(rows, "train_bpe")
    if text_column not in rows.column_names:
        raise missing_column(text_column, rows.column_names, "text_column")
    return rows


def _tokenizer(
    backend: Tokenizer, chat_template: str | os.PathLike[str] | None, **options: Any
) -> PreTrainedTokenizerFast:
    options["clean_up_tokenization_spaces"] = False
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **options)  # type: ignore[no-untyped-call]
    if chat_template is not None:
        set_chat_template(made, chat_template)
    return made


def load_tokenizer(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    add_tokens: Sequence[str] = (),
    chat_template: str | os.PathLike[str] | None = None,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Returns a tokenizer from a folder or the Hub.

    If the tokenizer has no padding token, its end-of-text token becomes the padding token; with a `chat_template`,
    another special token is preferred if there is one.

    Args:
        pretrained_model_name_or_path: a folder, or the name of a model on the Hub.
        add_tokens: further tokens that are never split, such as those of a chat template. Tokens that the tokenizer has
            already are not added. The model that is built with this tokenizer gets a row for each.
        chat_template: the name of a packaged chat template ("chatml", "llama3", ...), the path of a file or the text of
            a template, which replaces the tokenizer's own and is saved with it. None keeps the tokenizer's own.
        **options: further arguments for `AutoTokenizer.from_pretrained`.

    Raises:
        DataFileError: FG844 if the tokenizer cannot be loaded, FG893 if there is no such chat template.
        DataError: FG884 if `add_tokens` is not a list of texts, or one is blank; FG894 if the chat template does not
            mark the answers, FG898 if the tokenizer does not have the token that ends an answer.
    """
    _refuse_no_tokens(add_tokens)
    name, source = str(pretrained_model_name_or_path), os.path.expanduser(pretrained_model_name_or_path)
    if wrong := folder_problem(name):
        raise _not_loaded(name, wrong)
    try:
        with nullcontext() if os.path.isdir(source) else hub_access():
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
    # Damaged files give errors of other classes, too.
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = first_line(error).rstrip(": ")
        raise _not_loaded(name, reason) from error
    known = tokenizer.get_vocab()
    if added := [token for token in dict.fromkeys(add_tokens) if token not in known]:
        tokenizer.add_tokens(
            [AddedToken(token, special=True, normalized=False) for token in added], special_tokens=True
        )
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    # Padding needs some token; mask and labels hide it, whichever it is.
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _refuse_no_tokens(tokens: Any) -> None:
    # The library takes a text for a list of letters, and leaves out what is empty or no text.
    is_list = isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes)
    wrong = [token for token in tokens if not isinstance(token, str) or not is_utf8(token)] if is_list else [tokens]
    blank = [token for token in tokens if not token.strip()] if is_list and not wrong else []
    if wrong or blank:
        what = f"has the blank text {blank[0]!r}" if blank else f"{'has' if is_list else 'is'} {wrong[0]!r:.60}"
        raise DataError(
            f"add_tokens {what}, and takes a list of texts",
            code="FG884",
            hint='as in add_tokens: ["<|user|>", "<|end|>"]',
        ).about("add_tokens")


def _not_loaded(name: str, reason: str) -> DataFileError:
    hint = "give a folder that holds 'tokenizer.json'" if os.path.isdir(os.path.expanduser(name)) else lookup_hint(name)
    found: DataFileError = DataFileError(f"tokenizer {name!r} could not be loaded: {reason}", code="FG844", hint=hint)
    found.argument = "pretrained_model_name_or_path"
    return found


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of what determines the token ids of a text: settings, and the version of the library.

    The padding and truncation settings of a fast tokenizer are not included.
    """
    if tokenizer.is_fast:
        facts = json.loads(tokenizer.backend_tokenizer.to_str())
        # Calling a fast tokenizer changes these settings, which would change the key of the cache.
        facts.pop("padding", None)
        facts.pop("truncation", None)
        settings = {name: getattr(tokenizer, name, None) for name in _SETTINGS}
        library = tokenizers.__version__  # another one may tokenize differently
        special_tokens = _plain(tokenizer.special_tokens_map)
        return content_key(tokenizer=facts, special_tokens=special_tokens, library=library, **settings)
    # A slow tokenizer has no serialized form in memory.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {file.name: xxhash.xxh3_64_hexdigest(file.read_bytes()) for file in Path(folder).iterdir()}
    return content_key(kind=type(tokenizer).__name__, files=files, library=transformers.__version__)


def _check_room(vocab_size: int, num_special: int) -> None:
    # Every byte is a token of its own, so that any text can be encoded.
    if vocab_size < _NUM_BYTES + num_special:
        raise DataError(
            f"vocab_size {vocab_size} is smaller than {_NUM_BYTES} bytes and {num_special} special tokens",
            code="FG838",
            hint=f"at least {_NUM_BYTES + num_special}",
            found=vocab_size,
        )


def _plain(special_tokens: dict[str, Any]) -> dict[str, str]:
    return {name: str(token) for name, token in special_tokens.items()}


def _train(
    rows: Dataset,
    column: str,
    *,
    vocab_size: int,
    special_tokens: list[str],
    min_frequency: int,
    add_prefix_space: bool = False,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[list[str]]:
        for batch in rows.select_columns([column]).iter(batch_size=256):
            yield [text for text in batch[column] if text]

    batches = show_progress(texts(), total=len(rows), what="training the tokenizer", logger=logger)
    tokenizer.train_from_iterator(batches, trainer, length=len(rows))
    return tokenizer
