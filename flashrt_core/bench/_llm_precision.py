"""What a stored precision does to the logits: the same weights and tokens, quantised and not."""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashrt_core.bench._llm_setup import Bench
from flashrt_core.bench._llm_setup import GREEDY
from flashrt_core.planners.sampling import mask_words

CONTEXTS = 4
Logits = dict[str, list[Tensor]]


def collect(kept: Logits, bench: Bench) -> None:
    """Put the logits of a few contexts into ``kept``: after a prefill, an append, a fed token."""
    session, length = bench.session, min(bench.arguments.lengths)
    for i in range(CONTEXTS):
        session.prefill(bench.tokens(length, 5000 + i)).result()
        kept.setdefault('prefill', []).append(bench.logits())
        session.append(bench.suffix).result()
        kept.setdefault('append', []).append(bench.logits())
        for token in bench.tokens(2, 6000 + i):  # the first is sampled, then fed by a step
            session.decode(GREEDY, mask=_only(token, bench.c.vocab)).result()
        kept.setdefault('decode', []).append(bench.logits())


def compare(precision: str, kept: Logits, bench: Bench) -> None:
    """Add a row for each way to a token; ``bench`` runs the same weights unquantised."""
    expected: Logits = {}
    bench.attempt('precision', {'precision': precision}, partial(collect, expected, bench))
    for path, found in expected.items():
        pairs = [(a.double(), b.double()) for a, b in zip(kept[path], found, strict=True)]
        cosines = sorted(float(torch.dot(a, b) / a.norm() / b.norm()) for a, b in pairs)
        bench.report.add(
            table='precision', precision=precision, against=bench.c.precision, path=path,
            contexts=len(pairs), cosine_worst=cosines[0], cosine_median=cosines[len(cosines) // 2],
            logit_max_difference=max(float((a - b).abs().max()) for a, b in pairs),
            same_choice=sum(int(a.argmax()) == int(b.argmax()) for a, b in pairs) / len(pairs))


def _only(token: int, vocab: int) -> Tensor:
    """Return the mask that allows one id."""
    words = torch.zeros(mask_words(vocab), dtype=torch.int64)
    words[token // 32] = 1 << token % 32
    return torch.where(words >= 2**31, words - 2**32, words).int()
