"""From logits to tokens on static shapes, in plain torch; a CUDA graph can hold all of it.

Every value that a request may change is device data: penalties, temperature, top-k, top-p, seed,
mask. A row's token depends on that row alone: sums that decide a cut are integer sums, so no order
of addition shows, and the noise of an element is a function of (seed, branch, position, element).
Order of the steps: repetition, frequency, presence, mask, temperature, top-k, top-p, Gumbel-max.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.planners.options import PARAMETERS
from flashrt_core.runtime.gumbel import gumbel_torch

NOTHING = -1           # token of a row in which nothing can be chosen
WEIGHT_SCALE = 2.0**40  # of integer probabilities; 2**18 of them stay far below 2**63


def mask_words(vocab: int) -> int:
    """Return how many int32 words the mask of a vocabulary has; bit ``i % 32`` of ``i // 32``."""
    return -(-vocab // 32)


def open_mask(vocab: int, known: int | None = None) -> Tensor:
    """Return the mask that allows the first ``known`` ids (all by default), int32 on the CPU.

    A model's vocabulary may be padded beyond its tokenizer's: ``known`` keeps those ids out.
    """
    bits = torch.zeros(mask_words(vocab) * 32, dtype=torch.int64)
    bits[: vocab if known is None else min(known, vocab)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def check_mask(mask: Tensor, vocab: int, what: str) -> None:
    """Raise ConfigError if the mask ``[words]`` (on the CPU) allows no id below ``vocab``."""
    if not bool(allowed(mask, vocab).any()):
        raise ConfigError(
            f'{what} allows none of the {vocab} tokens at this point; end the stream, or give a '
            'grammar whose texts the vocabulary can spell'
        )


def check_sampled(tokens: list[int], position: int) -> None:
    """Raise ContractError for a token NOTHING among those sampled from ``position`` on."""
    if NOTHING in tokens:
        raise ContractError(
            f'no token could be sampled at position {position + tokens.index(NOTHING)}: its '
            'logits are not finite, or its mask allows nothing; restore an earlier capsule'
        )


def allowed(mask: Tensor, vocab: int) -> Tensor:
    """Return bool ``[..., vocab]`` of the packed int32 mask ``[..., words]``."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[..., None] >> bits & 1).flatten(-2)[..., :vocab].bool()


def counts_before(counts: Tensor, drafts: Tensor) -> Tensor:
    """Return int32 ``[K + 1, vocab]``: ``counts [vocab]`` and the drafts before each verify row.

    Row i has counted ``drafts[:i]``, int32 ``[K]``; negative drafts are not counted.
    """
    K = len(drafts)
    rows = counts.expand(K + 1, -1).clone()
    one = (drafts >= 0).int()
    index = drafts.clamp(min=0).long()
    for i in range(K):
        rows[i + 1 :].index_add_(1, index[i : i + 1], one[i : i + 1].expand(K - i, 1))
    return rows


def count_tokens(counts: Tensor, tokens: Tensor, number: Tensor) -> None:
    """Add the first ``number`` (int64 []) of ``tokens`` int32 ``[N]`` to int32 counts ``[vocab]``.

    Negative tokens are not counted.
    """
    place = torch.arange(len(tokens), device=tokens.device)
    valid = (place < number) & (tokens >= 0)
    counts.index_add_(0, tokens.clamp(min=0).long(), valid.to(counts.dtype))


def penalised(logits: Tensor, counts: Tensor, mask: Tensor, parameters: Tensor) -> Tensor:
    """Return float32 ``[M, vocab]``: logits after penalties, minus infinity where masked.

    With neutral parameters and an open mask these are the bits of ``logits``.
    """
    presence, frequency, repetition = (
        parameters[..., PARAMETERS.index(name), None]
        for name in ('presence', 'frequency', 'repetition')
    )
    seen = counts > 0
    divided = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, divided, logits)
    logits = logits - frequency * counts
    logits = logits - presence * seen
    return logits.masked_fill(~allowed(mask, logits.shape[-1]), float('-inf'))


def greedy(logits: Tensor) -> Tensor:
    """Return int32 ``[M]``: the highest of each row ``[M, vocab]``, the lowest id of equals.

    NOTHING where the highest is not finite: all masked, or the logits hold NaN or infinity.
    """
    best, token = logits.max(-1)
    return torch.where(best.isfinite(), token, NOTHING).int()


def kept(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return which of the descending int64 weights ``[M, vocab]`` top-k, then top-p, keep.

    :param top_k: float32 ``[M or 1, 1]``, 0 keeps all.
    :param top_p: float32 ``[M or 1, 1]``: the fewest whose share of those that top-k keeps reaches
        it, at least one; 1 keeps all.
    """
    vocab = weights.shape[-1]
    rank = torch.arange(vocab, device=weights.device)
    by_rank = rank < torch.where(top_k > 0, top_k, float(vocab))
    total = (weights * by_rank).cumsum(-1)  # exact, whatever the order of the additions
    before, whole = (total - weights).double(), total[:, -1:].double()
    return by_rank & ((before < top_p.double() * whole) | (top_p >= 1) | (rank == 0))


def drawn(
    logits: Tensor, parameters: Tensor, seed: Tensor, branch: Tensor, position: Tensor
) -> Tensor:
    """Return int32 ``[M]`` drawn from penalised logits ``[M, vocab]``; arguments as ``sample``."""
    temperature, top_k, top_p = (
        parameters[..., PARAMETERS.index(name), None].reshape(-1, 1)
        for name in ('temperature', 'top_k', 'top_p')
    )
    noise = gumbel_torch(seed, branch, position, logits.shape[-1])
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / temperature.clamp(min=1e-6)
    weights = (_exp(ordered) * WEIGHT_SCALE).to(torch.int64)
    score = ordered + noise.gather(-1, order)
    score = score.masked_fill(~kept(weights, top_k, top_p), float('-inf'))
    return order.gather(-1, score.argmax(-1, keepdim=True))[:, 0].int()


def _exp(x: Tensor) -> Tensor:
    """Return exp(x), each row as if alone: a CPU gives a tensor's last elements other bits."""
    return x.exp() if x.is_cuda else torch.stack([row.exp() for row in x])


def sample(
    logits: Tensor,
    *,
    counts: Tensor,
    mask: Tensor,
    parameters: Tensor,
    seed: Tensor,
    branch: Tensor,
    position: Tensor,
    only_greedy: bool = False,
) -> Tensor:
    """Return the token of every row, int32 ``[M]``; NOTHING (-1) where none can be chosen.

    :param logits: float32 ``[M, vocab]``.
    :param counts: int32 ``[vocab]`` or ``[M, vocab]``, how often each token was sampled before.
    :param mask: int32 ``[words]`` or ``[M, words]``, see ``mask_words``.
    :param parameters: float32 ``[6]`` or ``[M, 6]``, see ``options.PARAMETERS``.
    :param seed: int64 ``[]`` or ``[M]``, as is ``branch``.
    :param position: int64 ``[M]``, where each token will stand; keys its noise.
    :param only_greedy: leaves the draw out of a graph for requests of temperature 0; the same
        tokens as without.
    :raises ContractError: shapes or dtypes that do not fit, when called or captured.
    """
    _check(logits, counts, mask, parameters, position)
    logits = penalised(logits, counts, mask, parameters)
    highest = greedy(logits)
    temperature = parameters[..., PARAMETERS.index('temperature')]
    eager = logits.device.type == 'cpu'  # a replay runs this anew, so a value may decide
    if only_greedy or (eager and not bool((temperature > 0).any())):
        return highest
    M = len(logits)
    token = drawn(logits, parameters, seed.expand(M), branch.expand(M), position)
    return torch.where((temperature > 0) & (highest != NOTHING), token, highest)


def _check(
    logits: Tensor, counts: Tensor, mask: Tensor, parameters: Tensor, position: Tensor
) -> None:
    if logits.ndim != 2:
        raise ContractError(f'logits are {list(logits.shape)}; give [rows, vocab]')
    M, vocab = logits.shape
    for name, tensor, dtype, last in (
        ('logits', logits, torch.float32, vocab),
        ('counts', counts, torch.int32, vocab),
        ('mask', mask, torch.int32, mask_words(vocab)),
        ('parameters', parameters, torch.float32, len(PARAMETERS)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) not in ((last,), (M, last)):
            raise ContractError(
                f'sampler {name} are {tensor.dtype} {list(tensor.shape)}; they must be {dtype} '
                f'[{last}] or [{M}, {last}]'
            )
    if position.dtype != torch.int64 or tuple(position.shape) != (M,):
        raise ContractError(
            f'sampler position is {position.dtype} {list(position.shape)}; it must be int64 [{M}]'
        )
