"""Quantised checkpoints: each format gives the values it stands for; others are refused."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from _qwen35 import config
from _qwen35 import stored
from _qwen35 import weights
import pytest
from safetensors.torch import save_file
import torch
from torch import Tensor

from flashrt_core.checkpoints import QuantisedReader
from flashrt_core.checkpoints import reader
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.checkpoints.keymap import split_sources
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.errors import ConfigError
from flashrt_core.nn.nvfp4 import quantise
from flashrt_core.planners.qwen3_5 import load_config
from flashrt_core.planners.qwen3_5 import QWEN3_5
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.load import load_constants
from flashrt_core.planners.qwen3_5.precision import weight
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.planners.qwen3_5.weights import weight_specs
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import cpu_backend

E4M3 = torch.float8_e4m3fn
Files = dict[str, Tensor]


def drawn(N: int, K: int) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(N + K))


def fp8_blocks(at: str, weight: Tensor) -> tuple[Files, Tensor]:
    N, K = weight.shape
    found, scale = torch.empty_like(weight), torch.empty(-(-N // 128), -(-K // 128))
    data = torch.empty((N, K), dtype=E4M3)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at_ = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = weight[at_].abs().max() / 448
            data[at_] = (weight[at_] / scale[i, j]).to(E4M3)
            found[at_] = data[at_].float() * scale[i, j]
    return {at: data, f'{at}_scale_inv': scale}, found


def fp8_channels(at: str, weight: Tensor) -> tuple[Files, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    data = (weight / scale).to(E4M3)
    return {at: data, f'{at}_scale': scale}, data.float() * scale


def fp8_tensor(at: str, weight: Tensor) -> tuple[Files, Tensor]:
    scale = weight.abs().max() / 448
    data = (weight / scale).to(E4M3)
    files = {at: data, f'{at}_scale': scale, at.replace('weight', 'input_scale'): scale * 2}
    return files, data.float() * scale


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes, scales of groups, scale of all, values."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * 448)
    scale = (groups.abs().amax(2) / 6 / whole).to(E4M3)
    each = (scale.float() * whole)[:, :, None]
    code = ((groups / each).abs()[..., None] - steps).abs().argmin(-1)
    value = steps[code] * groups.sign() * each
    code = (code + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return code[:, ::2] | code[:, 1::2] << 4, scale, whole, value.flatten(1)


def nvfp4_modelopt(at: str, weight: Tensor) -> tuple[Files, Tensor]:
    data, scale, whole, values = nvfp4(weight)
    return {at: data, f'{at}_scale': scale, f'{at}_scale_2': whole}, values


def nvfp4_compressed(at: str, weight: Tensor) -> tuple[Files, Tensor]:
    data, scale, whole, values = nvfp4(weight)
    return {f'{at}_packed': data, f'{at}_scale': scale,
            f'{at}_global_scale': (1 / whole)[None],
            at.replace('weight', 'input_global_scale'): torch.ones(1)}, values


def int4_compressed(at: str, weight: Tensor) -> tuple[Files, Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2, keepdim=True) / 7).bfloat16().float()
    whole = (groups / scale).round().clamp(-8, 7)
    words = torch.zeros((len(weight), weight.shape[1] // 8), dtype=torch.int64)
    for i in range(8):
        words |= (whole.flatten(1)[:, i::8].long() + 8) << 4 * i
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return {f'{at}_packed': words, f'{at}_scale': scale[:, :, 0].bfloat16(),
            f'{at}_shape': torch.tensor(weight.shape)}, (whole * scale).flatten(1)


FORMATS = [fp8_blocks, fp8_channels, fp8_tensor, nvfp4_modelopt, nvfp4_compressed, int4_compressed]


def name(encode: Callable[..., object]) -> str:
    return encode.__name__


@pytest.mark.parametrize('encode', FORMATS, ids=name)
def test_a_quantised_tensor_is_read_in_pieces_as_the_values_it_stands_for(
        encode: Callable[[str, Tensor], tuple[Files, Tensor]], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, 'PIECE_BYTES', 5000)
    weight = drawn(200, 192)
    files, values = encode('layer.proj.weight', weight)
    assert torch.cosine_similarity(values.flatten(), weight.flatten(), 0) > 0.98
    save_file({**files, 'layer.norm.weight': weight[0].clone()}, tmp_path / 'model.safetensors')
    with SafetensorsReader(tmp_path) as opened:
        found = QuantisedReader(opened)
        assert found.shapes == {'layer.proj.weight': (200, 192), 'layer.norm.weight': (192,)}
        pieces = list(found.pieces('layer.proj.weight'))
        norm = torch.cat([piece for _, piece in found.pieces('layer.norm.weight')])
    assert len(pieces) > 1 and [row for row, _ in pieces] == sorted(row for row, _ in pieces)
    torch.testing.assert_close(torch.cat([piece for _, piece in pieces]), values, rtol=1e-6,
                               atol=0)
    assert torch.equal(norm, weight[0])


def test_a_planner_binds_to_a_checkpoint_of_mixed_formats(tmp_path: Path) -> None:
    c = config(width=128, mlp=256, value_heads=8)
    given, plain = {}, {}
    for i, (key, tensor) in enumerate(stored(c, weights(c)).items()):
        if tensor.dim() == 2 and 'proj' in key and not tensor.shape[1] % 32:
            files, values = FORMATS[i % len(FORMATS)](key, tensor)
            given |= {k: t.contiguous() for k, t in files.items()}
            plain[key] = values.contiguous()
        else:
            given[key] = plain[key] = tensor
    assert len({key.rsplit('.', 1)[1] for key in given}) > 6
    hidden = []
    for folder, files in (('quantised', given), ('plain', plain)):
        (tmp_path / folder).mkdir()
        save_file(files, tmp_path / folder / 'model.safetensors')
        record = {'width': 128, 'mlp': 256, 'value_heads': 8, 'precision': 'fp8', 'branches': 0,
                  'weights': str(tmp_path / folder), 'draft_tokens': 0}
        session = QWEN3_5.bind(cpu_backend(), load_config(record))
        try:
            session.prefill([1, 2, 3]).result(20)
            hidden.append(session.buffers['hidden'].tensor.clone())
        finally:
            session.close()
    assert hidden[0].any()
    torch.testing.assert_close(*hidden, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('encode', [nvfp4_modelopt, nvfp4_compressed], ids=name)
@pytest.mark.parametrize('packed', [False, True], ids=['one below the other', 'packed by head'])
def test_nvfp4_that_is_kept_as_nvfp4_is_not_rounded_again(
        encode: Callable[[str, Tensor], tuple[Files, Tensor]], packed: bool, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, 'PIECE_BYTES', 3000)
    c = config(width=128, mlp=256, value_heads=8, mtp=False)
    given, plain = {}, 'model.layers.1.mlp.up_proj.weight'  # beside a gate that is quantised
    for target in qwen3_5_targets(c, packed):
        for key, tensor in split_sources(target, weights(c)[target.name]).items():
            files = {key: tensor}
            if tensor.dim() == 2 and 'proj' in key and key != plain:
                files = encode(key, tensor)[0]
            given |= {k: t.contiguous() for k, t in files.items()}
    save_file(given, tmp_path / 'model.safetensors')
    kept, values = (loaded(replace(c, weights=str(tmp_path), precision=precision))
                    for precision in ('nvfp4', 'bf16'))
    products = [name for name in tensor_specs(c) if f'{name}.whole' in kept and name != 'head']
    assert len(products) == 4 * c.layers
    for name in products:
        found, expected = weight(kept, name).values(), values[name]
        if name == 'layers.1.gate_up':
            assert torch.equal(found[256:], quantise(given[plain]).values())
            found, expected = found[:256], expected[:256]
        assert torch.equal(found, expected), name


def loaded(c: Qwen35Config) -> dict[str, Tensor]:
    buffers = BufferSet(cpu_backend(), weight_specs(c), name='test')
    load_constants(c, buffers, lambda fraction: None)
    return {buffer.name: buffer.tensor for buffer in buffers}


def refusal(tmp_path: Path, files: Files) -> str:
    save_file(files, tmp_path / 'model.safetensors')
    with pytest.raises(ConfigError) as refused, SafetensorsReader(tmp_path) as opened:
        list(QuantisedReader(opened).pieces('a.weight'))
    return str(refused.value)


def test_what_is_no_known_format_is_refused_by_name(tmp_path: Path) -> None:
    weight = drawn(32, 64)
    assert 'AWQ, GPTQ or asymmetric' in refusal(tmp_path, {'a.qweight': weight.int()})
    files = fp8_blocks('a.weight', weight)[0]
    assert "'a.weight_scale_inv' have shape [3]" in refusal(
        tmp_path, files | {'a.weight_scale_inv': torch.ones(3)})
    assert "'a.weight' has shape [32, 8, 8]" in refusal(
        tmp_path, {'a.weight': weight.to(E4M3).view(32, 8, 8), 'a.weight_scale': torch.ones(32)})
    for encode, whole in ((nvfp4_modelopt, 'a.weight_scale_2'),
                          (nvfp4_compressed, 'a.weight_global_scale')):
        files = encode('a.weight', weight)[0]
        assert f'{whole!r} have shape [4]' in refusal(tmp_path, files | {whole: torch.ones(4)})
    files = nvfp4_compressed('a.weight', weight)[0]
    files.pop('a.weight_scale')
    assert "'a.weight_scale' is missing" in refusal(tmp_path, files)
    files = nvfp4_modelopt('a.weight', weight)[0]
    for bits in (0x7F, 0xBC):  # NaN, and one below 0
        scale = files['a.weight_scale'].clone()
        scale.view(torch.uint8)[3, 1] = bits
        assert "'a.weight_scale' are no NVFP4" in refusal(
            tmp_path, files | {'a.weight_scale': scale})
    scale = files['a.weight_scale'].float()
    assert 'are no NVFP4: torch.float32' in refusal(tmp_path, files | {'a.weight_scale': scale})
    files = nvfp4_compressed('a.weight', weight)[0] | {'a.weight_global_scale': torch.zeros(1)}
    assert "'a.weight_global_scale' gives inf" in refusal(tmp_path, files)
    assert "'a.weight_scale' have shape [32, 1]" in refusal(  # 24 columns
        tmp_path, nvfp4_modelopt('a.weight', weight)[0] | {
            'a.weight': torch.zeros((32, 12), dtype=torch.uint8),
            'a.weight_scale': torch.ones((32, 1)).to(E4M3)})
    assert 'are torch.float32 beside scales' in refusal(
        tmp_path, {'a.weight': weight, 'a.weight_scale': torch.ones(32, 1)})
