"""What few rows read and write: a verification and branches have the bits of one live row."""
from __future__ import annotations

from collections.abc import Iterator

from _qwen35 import config
from _qwen35 import fresh
from _qwen35 import SHAPES
from _qwen35 import take
from _qwen35 import weights
import pytest
import torch
from torch import Tensor

from flashrt_core.planners.memory import Branched
from flashrt_core.planners.memory import Live
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import Qwen35Config

# Name of the shape, tokens in the state before, dtype. 254: the rows go over a step of keys.
CASES = [*((name, 37, 'float32') for name in SHAPES),
         *(('tiny', start, dtype) for start in (2, 254) for dtype in ('float32', 'bfloat16'))]
CONTEXT = 600


@pytest.fixture(autouse=True)
def plain_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def prefilled(c: Qwen35Config, count: int) -> dict[str, Tensor]:
    b = {**weights(c), **fresh(c, float('nan'))}
    tokens = torch.randint(0, c.vocab, (count,), generator=torch.Generator().manual_seed(2))
    take(c, b, tokens.tolist(), [count], key=256)
    return b


def copied(c: Qwen35Config, b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**b, **{spec.name: b[spec.name].clone() for spec in model.state_specs(c)}}


def live(c: Qwen35Config, b: dict[str, Tensor], token: int, position: int) -> Tensor:
    at = torch.tensor(position)
    tokens = torch.tensor([token], dtype=torch.int32)
    return model.rows(c, b, tokens, at[None], Live(c, b, at))[0]


def same_state(c: Qwen35Config, one: dict[str, Tensor], two: dict[str, Tensor],
               tokens: int) -> bool:
    """Equal bits, KV up to the extent; the MTP cache belongs to the session."""
    names = [spec.name for spec in model.state_specs(c) if spec.name != 'mtp.kv']
    return all(torch.equal(one[n][:tokens] if 'kv' in n else one[n],
                           two[n][:tokens] if 'kv' in n else two[n]) for n in names)


@pytest.mark.parametrize('name, start, dtype', CASES)
def test_a_verification_has_the_bits_of_tokens_fed_one_by_one(
        name: str, start: int, dtype: str) -> None:
    c = config(name, dtype=dtype, context=CONTEXT)
    b, tokens = prefilled(c, start), [5, 9, 301, 44, 5]
    one_by_one = copied(c, b)
    states, hidden = [copied(c, one_by_one)], []
    for t, token in enumerate(tokens):
        hidden.append(live(c, one_by_one, token, start + t))
        states.append(copied(c, one_by_one))
    for count in range(len(tokens) + 1):
        at, verified = torch.tensor(start), copied(c, b)
        memory = Verify(c, verified, at)
        given = torch.tensor(tokens, dtype=torch.int32)
        found = model.rows(c, verified, given, at + torch.arange(len(tokens)), memory)
        assert torch.equal(found, torch.stack(hidden))
        # The verification alone wrote no recurrent state ...
        assert same_state(c, verified, b, start)
        # ... and what is accepted gives the state of that many tokens.
        memory.accept(c, verified, torch.tensor(count))
        assert same_state(c, verified, states[count], start + count)
        assert not same_state(c, verified, states[count - 1], start)


@pytest.mark.parametrize('name, start, dtype', CASES)
def test_branches_have_the_bits_of_a_session_of_their_own(
        name: str, start: int, dtype: str) -> None:
    c = config(name, dtype=dtype, context=CONTEXT)
    b, rows, steps = prefilled(c, start), 3, 4
    tokens = torch.randint(0, c.vocab, (steps, rows), dtype=torch.int32,
                           generator=torch.Generator().manual_seed(3))
    own: dict[str, Tensor] = {'position': torch.full((rows,), start)}
    for spec in model.state_specs(c):
        shape = (rows, 16, *spec.shape[1:]) if 'kv' in spec.name else (rows, *spec.shape)
        key = f'tail.{spec.name}' if 'kv' in spec.name else spec.name
        own[key] = (torch.full(shape, torch.nan, dtype=spec.dtype) if 'kv' in spec.name
                    else b[spec.name].expand(shape).clone())
    trunk, before = b, copied(c, b)
    found = []
    for step in range(steps):
        memory = Branched(c, trunk, own, torch.tensor(start))
        found.append(model.rows(c, trunk, tokens[step], own['position'].clone(), memory))
        own['position'] += 1
    assert same_state(c, trunk, before, start)  # the trunk is only read
    for row in range(rows):
        alone = copied(c, before)
        for step in range(steps):
            expected = live(c, alone, int(tokens[step, row]), start + step)
            assert torch.equal(found[step][row], expected)
        for spec in model.state_specs(c):
            if spec.name.startswith(('recurrent', 'conv')):
                assert torch.equal(own[spec.name][row], alone[spec.name])
            elif spec.name != 'mtp.kv':
                tail = own[f'tail.{spec.name}'][row]
                assert torch.equal(tail[:steps], alone[spec.name][start:start + steps])
                assert bool(tail[steps:].isnan().all())
