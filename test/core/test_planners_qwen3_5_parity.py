"""Qwen3.5 in float32 against transformers with the same random weights."""
from __future__ import annotations

from collections.abc import Iterator

from _qwen35 import config
from _qwen35 import fresh
from _qwen35 import reference
from _qwen35 import SHAPES
from _qwen35 import take
from _qwen35 import transformers_config
from _qwen35 import weights
import pytest
import torch
from torch import Tensor

from flashrt_core.planners.memory import Live
from flashrt_core.planners.qwen3_5 import model

PROMPT = 90
CLOSE = 1e-4


@pytest.fixture(autouse=True)
def plain_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def prompt(vocab: int, count: int = PROMPT) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.mark.parametrize('name', SHAPES)
def test_logits_and_64_greedy_tokens_are_those_of_transformers(name: str) -> None:
    c = config(name)
    w = weights(c)
    theirs, tokens = reference(c, w), prompt(c.vocab)
    b = {**w, **fresh(c, float('nan'))}
    hidden = take(c, b, tokens, [64, PROMPT - 64])
    expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.head(c, b, hidden), expected, rtol=0, atol=CLOSE)

    generated = theirs.generate(torch.tensor([tokens]), max_new_tokens=64, do_sample=False,
                                eos_token_id=None, pad_token_id=0)[0, PROMPT:].tolist()
    found, last = [], hidden[-1:]
    for position in range(PROMPT, PROMPT + 64):
        found.append(int(model.head(c, b, last)[0].argmax()))
        at = torch.tensor(position)
        token = torch.tensor(found[-1:], dtype=torch.int32)
        last = model.rows(c, b, token, at[None], Live(c, b, at))
    assert found == generated and len(set(found)) > 8


def test_equal_cuts_are_bit_equal_and_any_other_cut_is_close() -> None:
    c = config()
    w, tokens = weights(c), prompt(config().vocab)

    def run(cuts: list[int], key: int = 64) -> tuple[Tensor, dict[str, Tensor]]:
        state = fresh(c)
        return take(c, {**w, **state}, tokens, cuts, key), state

    whole, state = run([64, 26])
    again, same = run([64, 26])
    assert torch.equal(whole, again) and all(torch.equal(state[n], same[n]) for n in state)
    for cuts in ([26, 64], [1, 2, 3, 60, 24], [16] * 5 + [10], [1] * 90):
        found, other = run(cuts)
        torch.testing.assert_close(found, whole, rtol=0, atol=CLOSE)
        for name in state:
            torch.testing.assert_close(other[name], state[name], rtol=0, atol=CLOSE)


@pytest.mark.parametrize('length', [1, 3, 17, 63])
def test_padding_and_dead_keys_change_no_bit(length: int) -> None:
    c = config()
    w, tokens = weights(c), prompt(config().vocab, length)
    found = []
    for garbage, dead in ((7, 0.0), (511, float('nan')), (-5, 1e30), (2**31 - 1, -1e30)):
        state = fresh(c, dead)
        padded = torch.full((64,), garbage, dtype=torch.int32)
        padded[:length] = torch.tensor(tokens, dtype=torch.int32)
        b = {**w, **state}
        hidden = model.chunk(c, b, padded, torch.tensor(0), torch.tensor(length), 128)
        assert bool(hidden.isfinite().all())
        kv = [state[n][length:] for n in state if n.startswith('kv')]
        assert all(bool((k.isnan() if dead != dead else k == dead).all()) for k in kv)
        found.append([hidden[:length], *(state[n] for n in state if 'kv' not in n),
                      *(state[n][:length] for n in state if n.startswith('kv'))])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_mtp_head_is_transformers_mtp_layer() -> None:
    from transformers.modeling_layers import MtpLayer
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    c, T = config(), 21
    w = weights(c)
    full = transformers_config(c)
    full.layer_types = ['full_attention'] * c.layers
    full._attn_implementation = 'sdpa'
    layer = MtpLayer(full, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, 0).eval()
    at = 'mtp.layer'
    q, k, v = w[f'{at}.qkv'].split([2 * c.q_dim, c.kv_dim, c.kv_dim])
    gate, up = w[f'{at}.gate_up'].chunk(2)
    block = {
        'input_layernorm.weight': w[f'{at}.norm1'], 'self_attn.q_proj.weight': q,
        'self_attn.k_proj.weight': k, 'self_attn.v_proj.weight': v,
        'self_attn.q_norm.weight': w[f'{at}.q_norm'], 'self_attn.k_norm.weight': w[f'{at}.k_norm'],
        'self_attn.o_proj.weight': w[f'{at}.out'], 'post_attention_layernorm.weight':
        w[f'{at}.norm2'], 'mlp.gate_proj.weight': gate, 'mlp.up_proj.weight': up,
        'mlp.down_proj.weight': w[f'{at}.down']}
    layer.load_state_dict({
        'enorm.weight': w['mtp.norm_embed'], 'hnorm.weight': w['mtp.norm_hidden'],
        'eh_proj.weight': w['mtp.fc'], 'post_norm.weight': w['mtp.norm'],
        **{f'mtp_block.{name}': tensor for name, tensor in block.items()}})

    tokens = torch.tensor(prompt(c.vocab, T), dtype=torch.int32)
    hidden = torch.randn(T, c.width, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(T)
    embedded = w['embed'][tokens.long()]
    rope = Qwen3_5TextRotaryEmbedding(full)(embedded[None], positions.expand(3, 1, T))
    expected = layer(embedded[None], hidden[None], rope, None, positions[None], None)[0]

    b = {**w, **fresh(c, float('nan'))}
    for t in range(T):
        logits, found = model.mtp_draft(c, b, tokens[t], hidden[t], torch.tensor(t))
        torch.testing.assert_close(found, expected[t], rtol=0, atol=CLOSE)
        torch.testing.assert_close(logits, expected[t] @ w['head'].t(), rtol=0, atol=CLOSE)
    # Notes are what the drafts stored, without any attention.
    noted = {**w, **fresh(c, float('nan'))}
    model.mtp_note(c, noted, tokens, hidden, positions, torch.tensor(T - 2))
    torch.testing.assert_close(noted['mtp.kv'][:T - 2], b['mtp.kv'][:T - 2], rtol=0, atol=1e-6)
    assert bool(noted['mtp.kv'][T - 2:].isnan().all())
