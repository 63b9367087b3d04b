"""SigLIP vision tower (arXiv 2303.15343): patches, learned positions, pre-norm encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn.attention import attend
from flashrt_core.nn.norms import layer_norm


@dataclass(frozen=True)
class SiglipDims:
    """Sizes of a tower; images are square, ``image_size`` a multiple of ``patch_size`` pixels."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    mlp: int
    eps: float = 1e-6

    @property
    def grid(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        return self.grid * self.grid

    @property
    def patch_dim(self) -> int:
        return self.patch_size * self.patch_size * 3


class SiglipLayer(NamedTuple):
    """Weights of one layer; qkv holds query, key and value rows one below the other."""

    norm1_weight: Tensor  # [width]
    norm1_bias: Tensor
    qkv_weight: Tensor  # [3 * width, width]
    qkv_bias: Tensor
    out_weight: Tensor  # [width, width]
    out_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    fc1_weight: Tensor  # [mlp, width]
    fc1_bias: Tensor
    fc2_weight: Tensor  # [width, mlp]
    fc2_bias: Tensor


def siglip_layer(weights: Mapping[str, Tensor], prefix: str) -> SiglipLayer:
    """Pick one layer's tensors by name (``prefix.norm1.weight`` and so on)."""
    names = (field.rsplit('_', 1) for field in SiglipLayer._fields)
    return SiglipLayer(*(weights[f'{prefix}.{name}.{kind}'] for name, kind in names))


def patchify(images: Tensor, dims: SiglipDims) -> Tensor:
    """Cut uint8 RGB images [V, H, W, 3] into patches [V, tokens, patch * patch * 3]."""
    V, g, p = images.shape[0], dims.grid, dims.patch_size
    patches = images.view(V, g, p, g, p, 3).transpose(2, 3)  # [V, g, g, p, p, 3]
    return patches.reshape(V, g * g, p * p * 3)


def siglip_tower(images: Tensor, w: Mapping[str, Tensor], dims: SiglipDims) -> Tensor:
    """Encode uint8 RGB images [V, H, W, 3] into features [V, tokens, width]; pixels go to [-1, 1].

    ``w`` holds the tower's tensors by name, ``vision.patch.weight`` and so on.
    """
    x = patchify(images, dims).float().div(255.0).mul(2.0).sub(1.0)
    x = F.linear(
        x.to(w['vision.patch.weight'].dtype), w['vision.patch.weight'], w['vision.patch.bias']
    )
    x = x + w['vision.position']  # [V, tokens, width]
    for i in range(dims.layers):
        x = encoder_layer(x, siglip_layer(w, f'vision.layers.{i}'), dims)
    return layer_norm(x, w['vision.norm.weight'], w['vision.norm.bias'], dims.eps)


def encoder_layer(x: Tensor, w: SiglipLayer, dims: SiglipDims) -> Tensor:
    """One pre-norm encoder layer over x [V, tokens, width], every token attending every other."""
    V, T, _ = x.shape
    y = layer_norm(x, w.norm1_weight, w.norm1_bias, dims.eps)
    qkv = F.linear(y, w.qkv_weight, w.qkv_bias).view(V, T, 3, dims.heads, -1)
    q, k, v = qkv.unbind(2)  # each [V, T, heads, head_dim]
    x = x + F.linear(attend(q, k, v), w.out_weight, w.out_bias)
    y = layer_norm(x, w.norm2_weight, w.norm2_bias, dims.eps)
    y = F.gelu(F.linear(y, w.fc1_weight, w.fc1_bias), approximate='tanh')
    return x + F.linear(y, w.fc2_weight, w.fc2_bias)
