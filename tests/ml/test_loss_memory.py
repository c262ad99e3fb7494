"""The peak of live bytes of a token loss, per logit: small without logits, and twelve bytes with them."""

import torch
from torch.nn import functional as F
from torch.profiler import record_function

from forgather.ml.linear_loss import linear_cross_entropy
from forgather.ml.loss_terms import LossTerms
from tests.ml.distributed.gang import run_ranks
from tests.ml.planner.live_bytes import profiled

TOKENS, WIDTH, WORDS, CHUNK = 2048, 32, 4096, 128


def bytes_per_logit(loss):
    """Returns the peak of forward and backward pass, with all gradients, in a new process."""
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, requires_grad=True)
    targets = torch.randint(0, WORDS, (TOKENS,))
    with profiled(["step"]) as found:
        torch.zeros(1)
        with record_function("step"):
            (loss(hidden, weight, targets) / TOKENS).backward()
    return found.num_bytes / (TOKENS * WORDS)


def of_logits(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


def without_logits(hidden, weight, targets):
    return linear_cross_entropy(hidden, weight, None, targets, terms=LossTerms(), chunk_size=CHUNK)


def test_the_peak_is_at_most_two_bytes_a_logit_where_logits_take_twelve(record_property):
    (without,), (with_logits,) = (run_ranks(1, bytes_per_logit, loss) for loss in (without_logits, of_logits))
    record_property("bytes_per_logit", without)
    record_property("with_logits", with_logits)
    assert without <= 2.0
    # One chunk in float32, the gradients, and little else.
    gradients = 4 * WIDTH * (TOKENS + WORDS) / (TOKENS * WORDS)
    assert without <= 1.1 * (4 * CHUNK / TOKENS + gradients)
    assert with_logits > 11.0
