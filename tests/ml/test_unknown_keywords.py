"""A keyword that a trainer lacks is an error that names what to write, and the check still knows the signature."""

import inspect

import pytest

from forgather.ml import AccelTrainer, PipelineTrainer, Trainer
from forgather.signatures import Reader
from forgather.signatures.results import Callee
from tests.project.workbench import ROOT


@pytest.mark.parametrize("kind", [Trainer, AccelTrainer, PipelineTrainer])
@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("tokenizer", "did you mean 'processing_class'?"),
        ("compute_loss_func", "did you mean 'loss_fn'?"),
        ("optimizers", "did you mean 'optimizer_factory'?"),
        ("optimizer_cls_and_kwargs", "in the block [optimizer]"),
    ],
)
def test_a_keyword_of_transformers_is_answered(kind, word, hint):
    with pytest.raises(TypeError, match=f"no argument '{word}'") as caught:
        kind(**{word: object()})
    assert "FG204" == caught.value.code
    assert hint in caught.value.hint


def test_the_signature_stays_known():
    assert "processing_class" in inspect.signature(Trainer).parameters
    found = Reader(str(ROOT)).read("forgather.ml:Trainer")
    assert isinstance(found, Callee)
    (signature,) = found.signatures
    assert "processing_class" in signature.parameters
    assert "tokenizer" not in signature.parameters
