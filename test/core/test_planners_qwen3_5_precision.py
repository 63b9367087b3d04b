"""Qwen3.5 in FP8, int4, NVFP4: what is stored, how near its logits are, and a row's own bits."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import SMALL
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import unequal
from _qwen35 import config
from _qwen35 import damped_weights
from _qwen35 import fresh
from _qwen35 import stored
from _qwen35 import stored_weights
from _qwen35 import take
from _qwen35 import weights
import pytest
from safetensors.torch import save_file
import torch
from torch import Tensor

from flashrt_core.capsule import CapsuleStore
from flashrt_core.checkpoints.keymap import split_sources
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.errors import ConfigError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.nn.attention import store_rows
from flashrt_core.nn.rows import put_rows
from flashrt_core.planners import Options
from flashrt_core.planners.memory import Live
from flashrt_core.planners.qwen3_5 import load
from flashrt_core.planners.qwen3_5 import load_config
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5 import QWEN3_5
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.weights import weight_specs
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import cpu_backend

# Sizes that int4's groups of 128 divide.
WHOLE = {'width': 128, 'mlp': 256, 'value_heads': 8}
# The error of NVFP4 over int4's where weights are drawn evenly, as these are: see test_nn_nvfp4. A
# cosine falls by the square.
COARSER = 1.5
NARROW = ['fp8', 'int4', 'nvfp4']
OTHER = {'fp8': 'bf16', 'nvfp4': 'int4'}  # of a session that may not take a capsule; else fp8


@pytest.fixture(autouse=True)
def plain_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def loaded(c: Qwen35Config) -> dict[str, Tensor]:
    buffers = BufferSet(cpu_backend(), weight_specs(c), name='test')
    load.load_constants(c, buffers, lambda fraction: None)
    return {buffer.name: buffer.tensor for buffer in buffers}


def logits(c: Qwen35Config, w: dict[str, Tensor], path: str) -> Tensor:
    """Logits of 48 tokens, of one chunk or fed one by one."""
    b = {**w, **fresh(c)}
    tokens = torch.randint(0, c.vocab, (48,), generator=torch.Generator().manual_seed(3))
    if path == 'chunk':
        return model.head(c, b, take(c, b, tokens.tolist(), [48]))
    found = []
    for t, token in enumerate(tokens):
        at = torch.tensor(t)
        hidden = model.rows(c, b, token[None].int(), at[None], Live(c, b, at))
        found.append(model.head(c, b, hidden)[0])
    return torch.stack(found)


@pytest.mark.parametrize('path', ['chunk', 'rows'])
@pytest.mark.parametrize('tied', [False, True], ids=['untied', 'tied'])
@pytest.mark.parametrize('precision, kv, least', [
    ('fp8', 'bf16', 0.995), ('bf16', 'fp8', 0.995), ('fp8', 'fp8', 0.995),
    ('int4', 'bf16', 0.98), ('nvfp4', 'bf16', 1 - 0.02 * COARSER**2)])
def test_every_token_has_logits_that_point_where_those_of_float32_do(
        precision: str, kv: str, least: float, tied: bool, path: str) -> None:
    plain = config(tied=tied, **WHOLE)
    c = replace(plain, precision=precision, kv_precision=kv)
    w = damped_weights(plain)
    expected = logits(plain, w, path)
    cosine = torch.cosine_similarity(logits(c, stored_weights(c, w), path), expected)
    assert float(cosine.min()) > least
    layers = logits(plain, {k: t * 0 if k.endswith(('.out', '.down')) else t
                            for k, t in w.items()}, path)
    assert float(torch.cosine_similarity(layers, expected).mean()) < 0.9  # they do contribute


@pytest.mark.parametrize('precision, bits', [
    ('fp8', 8 + 32 / 5120), ('int4', 4 + 32 / 128), ('nvfp4', 4 + 8 / 16 + 32 / 5120)])
def test_the_27b_takes_the_bytes_of_its_precision_and_no_second_copy(
        precision: str, bits: float) -> None:
    def nbytes(precision: str) -> int:
        c = replace(NAMED['27b'][0], precision=precision, mtp=False)
        return sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in weight_specs(c))

    embed = 248320 * 5120 * 2
    assert nbytes('bf16') == pytest.approx(53.8e9, rel=0.01)
    expected = embed + (nbytes('bf16') - embed) * bits / 16
    assert nbytes(precision) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize('precision', NARROW)
@pytest.mark.parametrize('packed', [False, True], ids=['one below the other', 'packed by head'])
def test_a_checkpoint_read_in_pieces_is_stored_as_its_whole_tensors_are(
        precision: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = config(precision=precision, **WHOLE)
    expected = stored_weights(c)
    monkeypatch.setattr(load, 'PIECE_BYTES', 10_000)
    assert all(torch.equal(bits(tensor), bits(expected[name])) for name, tensor
               in loaded(c).items())
    given = stored(c, weights(c))
    if packed:
        given = {}
        for target in qwen3_5_targets(c, packed=True):
            given |= split_sources(target, weights(c)[target.name])
    monkeypatch.setattr('flashrt_core.checkpoints.reader.PIECE_BYTES', 10_000)
    save_file(given, tmp_path / 'model.safetensors')
    found = loaded(replace(c, weights=str(tmp_path)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(bits(found[name]), bits(expected[name])) for name in expected)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_norms_decays_and_an_embedding_that_is_only_looked_up_stay_as_they_are() -> None:
    plain, tied = config(**WHOLE), config(tied=True, **WHOLE)
    for precision, narrow in (('fp8', torch.float8_e4m3fn), ('int4', torch.uint8),
                              ('nvfp4', torch.uint8)):
        found = stored_weights(replace(plain, precision=precision))
        kept = {name for name, tensor in found.items()
                if tensor.dtype == torch.float32 and not name.endswith(('.scale', '.whole'))}
        assert kept == {name for name in weights(plain) if name == 'embed' or name.endswith(
            ('norm', 'norm1', 'norm2', '.conv', '.a_log', '.dt_bias', 'norm_embed',
             'norm_hidden', 'table.rope'))}
        assert found['head'].dtype == found['mtp.fc'].dtype == narrow
        embed = stored_weights(replace(tied, precision=precision))['embed']
        assert embed.dtype == (narrow if precision == 'fp8' else torch.float32)


def small(precision: str, kv: str = 'bf16') -> Qwen35Config:
    return replace(SMALL, precision=precision, kv_precision=kv, width=128, mlp=128, heads=2,
                   head_dim=64, value_heads=2, value_dim=64)


@pytest.fixture(scope='module', params=[
    ('fp8', 'bf16'), ('int4', 'bf16'), ('nvfp4', 'bf16'), ('fp8', 'fp8')],
                ids='-'.join)
def session(request: pytest.FixtureRequest) -> Iterator[PlannerSession]:
    with bound(cpu_backend(), small(*request.param)) as made:
        yield made


@pytest.mark.parametrize('options', [GREEDY, DRAWN], ids=['greedy', 'drawn'])
def test_with_drafts_the_tokens_and_every_state_bit_are_those_without(
        session: PlannerSession, options: Options) -> None:
    session.prefill(PROMPT).result(20)
    tokens, state = run(session, 24, options), state_of(session)
    for K in range(1, 5):
        session.prefill(PROMPT).result(20)
        assert run(session, 24, replace(options, draft_tokens=K)) == tokens
        assert unequal(state_of(session), state) == []
        session.prefill(PROMPT).result(20)
        run(session, 1, options)
        wrong = [*tokens[1:K], (tokens[K] + 1) % 48]  # the last draft is refused
        assert session.decode(options, drafts=wrong).result(20).tokens == tuple(tokens[1:K + 1])


def test_a_branch_has_the_tokens_and_every_bit_of_a_single_session(
        session: PlannerSession) -> None:
    drawn = [replace(DRAWN, seed=seed) for seed in (11, 12, 13)]
    singles = []
    for options in drawn:
        session.prefill(PROMPT).result(20)
        singles.append((run(session, 8, options), state_of(session)))
    for row in range(3):
        session.prefill(PROMPT).result(20)
        branches = session.fork([11, 12, 13])
        steps = [branches.step(DRAWN).result(20).tokens for _ in range(8)]
        assert [list(given) for given in zip(*steps)] == [tokens for tokens, _ in singles]
        branches.commit(row).result(20)
        assert unequal(state_of(session), singles[row][1]) == []


def test_equal_cuts_give_equal_bits_and_a_capsule_goes_on_with_them(
        session: PlannerSession) -> None:
    session.prefill(PROMPT).result(20)
    session.append(SUFFIX).result(20)
    state, tokens = state_of(session), run(session, 6)
    store = CapsuleStore(session.lane.backend, 8 * MIB, 8 * MIB, page_bytes=MIB // 16)
    try:
        session.prefill(PROMPT).result(20)
        snapshot(session, store)
        session.prefill(SUFFIX).result(20)
        restore(session, store)
        session.append(SUFFIX).result(20)
        assert unequal(state_of(session), state) == [] and run(session, 6) == tokens
        c = session.config
        for key in ('precision', 'kv_precision'):
            other = replace(c, **{key: OTHER.get(getattr(c, key), 'fp8')})
            with bound(cpu_backend(), other) as stranger:
                with pytest.raises(IdentityMismatch, match=rf'config\.{key}'):
                    restore(stranger, store)
    finally:
        store.close()


@pytest.mark.parametrize('key, remedy', [
    ('precision', 'precision nvfp4, int4 or bf16'), ('kv_precision', 'kv_precision bf16')])
def test_fp8_on_a_gpu_that_does_not_know_it_is_refused_with_what_to_give(
        key: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (8, 7))
    c = replace(NAMED['27b'][0], **{key: 'fp8'})
    with pytest.raises(ConfigError, match=rf'8\.9 or later.*has 8\.7; give {remedy}'):
        QWEN3_5.forward_of(c, torch.device('cuda'))


def test_keys_and_values_in_fp8_take_half_the_bytes_and_saturate() -> None:
    plain = config(dtype='bfloat16', **WHOLE)
    c = replace(plain, kv_precision='fp8')

    def nbytes(c: Qwen35Config) -> int:
        return sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in model.state_specs(c)
                   if 'kv' in s.name)

    assert 2 * nbytes(c) == nbytes(plain)
    kv = torch.zeros((4, 2, 1, 8), dtype=torch.float8_e4m3fn)
    put_rows(kv, torch.tensor([2]), torch.full((1, 2, 1, 8), -1e5))
    assert kv.float()[2].unique().tolist() == [-448.0] and not kv.float()[[0, 1, 3]].any()
    store_rows(kv, torch.full((2, 2, 1, 8), 1e5), torch.tensor(1), torch.tensor(1))
    assert kv.float()[:, 0, 0, 0].tolist() == [0.0, 448.0, -448.0, 0.0]


@pytest.mark.parametrize('record, message', [
    ({'precision': 'fp4'},
     "precision 'fp4' is unknown; choose from .'bf16', 'fp8', 'int4', 'nvfp4'"),
    ({'kv_precision': 'int4'}, "kv_precision 'int4' is unknown; choose from .'bf16', 'fp8'"),
    ({'precision': 'int4'}, 'width 64 is no multiple of 128.*choose fp8 or bf16'),
    ({'precision': 'int4', **WHOLE, 'mlp': 200}, 'mlp 200 is no multiple of 128'),
    ({'precision': 'nvfp4', 'width': 72}, 'width 72 is no multiple of 16.*nvfp4.*fp8 or bf16'),
    ({'precision': 'nvfp4', 'mlp': 168}, 'mlp 168 is no multiple of 16'),
])
def test_a_precision_that_does_not_fit_is_refused_by_name(
        record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(record)
    for fits in ('fp8', 'nvfp4'):
        assert load_config({'precision': fits})[0].precision == fits
