"""Run Qwen3.5's fast forward pass in Triton's interpreter on host memory; a child of a test."""
import os

os.environ['TRITON_INTERPRET'] = '1'

from dataclasses import replace
import functools
import sys

from _qwen35 import fresh
from _qwen35 import stored_weights
import torch

from flashrt_core.kernels import decode_attention
from flashrt_core.kernels import fp8_rows
from flashrt_core.kernels import row_products
from flashrt_core.kernels._launch import close
from flashrt_core.nn import fp8
from flashrt_core.planners.memory import Branched
from flashrt_core.planners.memory import Live
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import products
from flashrt_core.planners.qwen3_5 import Qwen35Config

C = Qwen35Config(
    width=128, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=32, key_heads=2, value_heads=4,
    key_dim=16, value_dim=16, vocab=96, context=160, rotary=8, full_every=2, dtype='float32',
    tied=True)
PRECISION = sys.argv[1]
C = replace(C, precision=PRECISION, value_heads=8 if PRECISION in ('int4', 'nvfp4')
            else C.value_heads)
EXACT = 1e-4  # float32 in another order, through two layers
# An activation of a chunk that lies between two values of E4M3 may come out as either.
CHUNK = 1e-2 if PRECISION == 'fp8' else EXACT
KEY, START, TOKENS = 16, 21, [5, 9]


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def copied(b):
    return {**b, **{spec.name: b[spec.name].clone() for spec in model.state_specs(C)}}


def alike(one, two, tokens, tolerance=EXACT):
    """Say whether both states agree, KV up to the extent; no tokens are noted after START."""
    def valid(b, n):
        return b[n][:START if n == 'mtp.kv' else tokens] if 'kv' in n else b[n]

    return all(close(valid(one, n), valid(two, n), tolerance)
               for n in (spec.name for spec in model.state_specs(C)))


def equal(one, two, tokens):
    names = [spec.name for spec in model.state_specs(C) if spec.name != 'mtp.kv']
    return all(torch.equal(one[n][:tokens] if 'kv' in n else one[n],
                           two[n][:tokens] if 'kv' in n else two[n]) for n in names)


@functools.cache
def prefilled(few=KEY - 1):
    """Two chunks, the last one padded, through both forward passes; noted for MTP too.

    Of more than ``few`` tokens the products are the library's, and weights of 4 bits are widened.
    """
    products.FEW = few
    b = {**stored_weights(C), **fresh(C, float('nan'))}
    theirs, mine = copied(b), copied(b)
    tokens = torch.randint(0, C.vocab, (START,), generator=torch.Generator().manual_seed(2))
    for at, length in ((0, KEY), (KEY, START - KEY)):
        part = torch.full((KEY,), -3, dtype=torch.int32)
        part[:length] = tokens[at:at + length]
        given = (C, part, torch.tensor(at), torch.tensor(length))
        expected = model.chunk(given[0], theirs, *given[1:], C.context)
        hidden = fast.chunk(given[0], mine, *given[1:], C.context)
        assert close(hidden[:length], expected[:length], CHUNK)
        assert hidden.isfinite().all()
        positions = at + torch.arange(KEY)
        for forward, state in ((model, theirs), (fast, mine)):
            forward.mtp_note(C, state, part, expected, positions, torch.tensor(length))
    assert alike(mine, theirs, START, CHUNK)
    for spec in model.state_specs(C):  # from here on both begin with the same
        mine[spec.name].copy_(theirs[spec.name])
    return mine, theirs, expected[length - 1]


def check_prefill() -> None:
    """Hidden states, KV, recurrent, convolution and MTP state equal those of the plain layers."""
    prefilled()
    prefilled(KEY)


def check_rows() -> None:
    """One by one equals the plain layers; verified, accepted and branched have the same bits."""
    b, theirs = (copied(state) for state in prefilled()[:2])
    one_by_one, states, hidden = copied(b), [], []
    for t, token in enumerate(TOKENS):
        at = torch.tensor(START + t)
        hidden.append(fast.rows(C, one_by_one, ints([token]), at[None],
                                Live(C, one_by_one, at))[0])
        expected = model.rows(C, theirs, ints([token]), at[None], Live(C, theirs, at))[0]
        assert close(hidden[-1], expected, EXACT)
        states.append(copied(one_by_one))
    assert alike(one_by_one, theirs, START + len(TOKENS))

    at = torch.tensor(START)
    for count in range(1, len(TOKENS) + 1):
        verified = copied(b)
        memory = Verify(C, verified, at)
        found = fast.rows(C, verified, ints(TOKENS), at + torch.arange(len(TOKENS)), memory)
        assert torch.equal(found, torch.stack(hidden))
        assert equal(verified, b, START)
        memory.accept(C, verified, torch.tensor(count))
        assert equal(verified, states[count - 1], START + count)

    own = {n: torch.stack([b[n]] * 2) for n in ('recurrent.0', 'conv.0')}
    own['position'] = torch.tensor([START, START])
    own['tail.kv.1'] = torch.full((2, 8, *b['kv.1'].shape[1:]), torch.nan)
    trunk = copied(b)
    for t, token in enumerate(TOKENS):
        memory = Branched(C, b, own, at)
        found = fast.rows(C, b, ints([7 + t, token]), own['position'].clone(), memory)
        own['position'] += 1
        assert torch.equal(found[1], hidden[t])
    assert torch.equal(own['recurrent.0'][1], one_by_one['recurrent.0'])
    assert torch.equal(own['conv.0'][1], one_by_one['conv.0'])
    assert equal(b, trunk, START)


def check_head() -> None:
    """Logits and two drafts equal those of the plain layers."""
    b, theirs, hidden = prefilled()
    assert close(fast.head(C, b, hidden[None]), model.head(C, theirs, hidden[None]), EXACT)
    mine, plain, token = hidden, hidden, torch.tensor(5, dtype=torch.int32)
    for i in range(2):
        at = torch.tensor(START - 1 + i)
        logits, mine = fast.mtp_draft(C, b, token, mine, at)
        expected, plain = model.mtp_draft(C, theirs, token, plain, at)
        assert close(logits, expected, EXACT) and close(mine, plain, EXACT)
    assert close(b['mtp.kv'][:START + 1], theirs['mtp.kv'][:START + 1], EXACT)


if __name__ == '__main__':
    row_products.SPLITS = 1
    for kind, tile in row_products.TILES.items():
        row_products.TILES[kind] = tile._replace(columns=32, step=64)
    # The interpreter does not round to E4M3 as it should, and torch multiplies it for CUDA only.
    fp8_rows.STORED = torch.float32
    fp8.multiply = lambda q, scale, w: fp8.multiply_reference(q.to(fp8.E4M3), scale, w)
    decode_attention.SPLITS = 4
    with torch.no_grad():
        for check in (check_prefill, check_rows, check_head):
            check()
            print(check.__name__, 'passed')
