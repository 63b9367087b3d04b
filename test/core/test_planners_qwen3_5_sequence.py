"""The differentiable whole-sequence form equals the model that runs, and has gradients."""
from __future__ import annotations

from _qwen35 import config
from _qwen35 import fresh
from _qwen35 import SHAPES
from _qwen35 import take
from _qwen35 import weights
import pytest
import torch

from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import sequence


@pytest.mark.parametrize('name', SHAPES)
def test_a_whole_sequence_gives_what_chunks_give(name: str) -> None:
    c = config(name)
    w = weights(c)
    tokens = torch.randint(0, c.vocab, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = torch.func.vmap(lambda t: sequence.forward(c, w, t))(tokens)
        for row, found in zip(tokens, together):
            expected = take(c, {**w, **fresh(c)}, row.tolist(), [64, 6])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            torch.testing.assert_close(sequence.logits(c, w, found),
                                       model.head(c, w, expected), rtol=0, atol=1e-4)


def test_the_mtp_head_over_a_sequence_is_its_drafts() -> None:
    c = config()
    w = weights(c)
    tokens = torch.randint(0, c.vocab, (9,), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(9, c.width, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = sequence.mtp_forward(c, w, tokens, hidden)
        b = {**w, **fresh(c)}
        for t in range(9):
            _, expected = model.mtp_draft(c, b, tokens[t].int(), hidden[t], torch.tensor(t))
            torch.testing.assert_close(found[t], expected, rtol=0, atol=1e-4)


def test_every_weight_gets_a_gradient() -> None:
    c = config()
    w = {name: tensor.clone().requires_grad_(not name.startswith('table'))
         for name, tensor in weights(c).items()}
    tokens = torch.randint(0, c.vocab, (2, 20), generator=torch.Generator().manual_seed(1))

    def loss(t: torch.Tensor) -> torch.Tensor:
        hidden = sequence.forward(c, w, t)
        drafted = sequence.mtp_forward(c, w, t[1:], hidden[:-1])
        return sequence.logits(c, w, hidden).square().mean() + sequence.logits(
            c, w, drafted).square().mean()

    torch.func.vmap(loss)(tokens).sum().backward()
    for name, tensor in w.items():
        if tensor.requires_grad:
            assert tensor.grad is not None and float(tensor.grad.abs().sum()) > 0, name
