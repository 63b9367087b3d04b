"""PI0 of transformers at the sizes of a config, for the time it takes."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashrt_core.policies.pi0.config import Pi0Config


class Reference:
    """
    transformers' PI0 of the same sizes with random weights.

    :param compiled: its vision-language model and its expert go through ``torch.compile``, once
        for each number of views, about a minute each.
    """

    def __init__(self, c: Pi0Config, device: torch.device, compiled: bool = False) -> None:
        from transformers import PI0Config
        from transformers import PI0ForConditionalGeneration

        def gemma(d: Any) -> dict[str, Any]:
            return {'model_type': 'gemma', 'hidden_size': d.width, 'num_hidden_layers': d.layers,
                    'intermediate_size': d.mlp, 'num_attention_heads': d.heads,
                    'num_key_value_heads': d.kv_heads, 'head_dim': d.head_dim,
                    'vocab_size': c.vocab}

        v = c.vision
        vision = {'model_type': 'siglip_vision_model', 'intermediate_size': v.mlp,
                  'hidden_size': v.width, 'patch_size': v.patch_size,
                  'image_size': v.image_size, 'num_hidden_layers': v.layers,
                  'num_attention_heads': v.heads, 'vision_use_head': False}
        vlm = {'model_type': 'paligemma', 'text_config': gemma(c.prefix),
               'vision_config': vision, 'projection_dim': c.prefix.width,
               'image_token_id': c.vocab}
        config = PI0Config(vlm_config=vlm, dit_config=gemma(c.expert), chunk_size=c.horizon,
                           max_state_dim=c.state_width, max_action_dim=c.action_width,
                           num_inference_steps=c.flow_steps)
        before = torch.get_default_dtype()
        torch.set_default_dtype(c.torch_dtype)
        try:
            with device:
                self._model = PI0ForConditionalGeneration(config).eval()
        finally:
            torch.set_default_dtype(before)
        if compiled:
            self._model.model.vlm.compile()
            self._model.model.dit.compile()
        self._config, self._device = c, device

    def call(self, views: int) -> Callable[[], object]:
        """Return a call with that many views, which has run once."""
        c, device = self._config, self._device
        side, text = c.vision.image_size, c.prompt_tokens + c.subgoal_tokens
        count = views * c.vision.tokens
        tokens = torch.full((1, count + text), c.vocab, device=device)
        tokens[0, count:] = torch.arange(text, device=device)
        given = {
            'state': torch.randn(1, c.state_width, device=device, dtype=c.torch_dtype),
            'input_ids': tokens,
            'pixel_values': torch.randn(1, views, 3, side, side, device=device,
                                        dtype=c.torch_dtype),
            'noise': torch.randn(1, c.horizon, c.action_width, device=device,
                                 dtype=c.torch_dtype),
            'attention_mask': torch.ones_like(tokens),
            'pixel_attention_mask': torch.ones(1, views, dtype=torch.bool, device=device),
        }
        action = torch.no_grad()(lambda: self._model.sample_actions(**given))
        action()
        return action
