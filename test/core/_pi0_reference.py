"""transformers' PI0ForConditionalGeneration as the numeric reference of our Pi0."""
from __future__ import annotations

from collections.abc import Sequence
import os

import numpy as np
import torch

from flashrt_core.policies.pi0 import Pi0Config

os.environ.setdefault('HF_HUB_OFFLINE', '1')


def reference_model(c: Pi0Config, seed: int = 0) -> torch.nn.Module:
    """Build the reference at the sizes of ``c``, every parameter random, float32."""
    from transformers import PI0Config
    from transformers import PI0ForConditionalGeneration

    def gemma(d: object) -> dict[str, object]:
        return {
            'model_type': 'gemma', 'hidden_size': d.width, 'num_hidden_layers': d.layers,
            'intermediate_size': d.mlp, 'num_attention_heads': d.heads,
            'num_key_value_heads': d.kv_heads, 'head_dim': d.head_dim, 'vocab_size': c.vocab}

    vision = {
        'model_type': 'siglip_vision_model', 'intermediate_size': c.vision.mlp,
        'hidden_size': c.vision.width, 'patch_size': c.vision.patch_size,
        'image_size': c.vision.image_size, 'num_hidden_layers': c.vision.layers,
        'num_attention_heads': c.vision.heads, 'vision_use_head': False}
    vlm = {'model_type': 'paligemma', 'text_config': gemma(c.prefix), 'vision_config': vision,
           'projection_dim': c.prefix.width, 'image_token_id': c.vocab}
    config = PI0Config(
        vlm_config=vlm, dit_config=gemma(c.expert), chunk_size=c.horizon,
        max_state_dim=c.state_width, max_action_dim=c.action_width,
        num_inference_steps=c.flow_steps)
    model = PI0ForConditionalGeneration(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter.shape[1:].numel() if parameter.ndim > 1 else 100
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * fan_in**-0.5)
    return model


def reference_actions(
    model: torch.nn.Module, c: Pi0Config, images: Sequence[np.ndarray | None], text: Sequence[int],
    state: np.ndarray, noise: np.ndarray, padding: int = 3,
) -> np.ndarray:
    """Return normalised actions [rows, horizon, action width]; an image of None is masked.

    ``state`` [state width] is normalised and padded. The prompt is padded by ``padding`` tokens.
    """
    rows, given = len(noise), [image for image in images if image is not None]
    blank = np.zeros_like(given[0])
    pixels = torch.from_numpy(np.stack([blank if i is None else i for i in images]))
    pixels = (pixels.float() / 255 * 2 - 1).permute(0, 3, 1, 2)[None]
    count = len(given) * c.vision.tokens
    tokens = [c.vocab] * count + list(text) + [0] * padding
    mask = [1] * (count + len(text)) + [0] * padding
    with torch.no_grad():
        actions = model.sample_actions(
            state=torch.from_numpy(state)[None].expand(rows, -1),
            input_ids=torch.tensor([tokens]).expand(rows, -1),
            pixel_values=pixels.expand(rows, -1, -1, -1, -1),
            noise=torch.from_numpy(noise),
            attention_mask=torch.tensor([mask]).expand(rows, -1),
            pixel_attention_mask=torch.tensor([[i is not None for i in images]]).expand(rows, -1))
    return actions.numpy()
