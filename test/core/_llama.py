"""Tiny Llamas of transformers, as checkpoints on disk and as sessions of ours."""

from __future__ import annotations

import json

from safetensors.torch import save_file
import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

SIZES = {
    'grouped': {'num_attention_heads': 4, 'num_key_value_heads': 2},
    'one_kv_head': {'num_attention_heads': 6, 'num_key_value_heads': 1, 'hidden_size': 96},
    'untied': {'tie_word_embeddings': False, 'rms_norm_eps': 1e-6},
    'wide_heads': {'head_dim': 40, 'rope_theta': 1e5},
}


def their_model(size: str, seed: int = 0) -> LlamaForCausalLM:
    """A random float32 Llama of transformers with norms away from one."""
    config = TheirConfig(**{
        'vocab_size': 300, 'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 3,
        'num_attention_heads': 4, 'num_key_value_heads': 4, 'max_position_embeddings': 256,
        'tie_word_embeddings': True, 'attn_implementation': 'eager', **SIZES[size]})
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'norm' in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0)  # logits of some spread
    return model


def save(model: LlamaForCausalLM, folder) -> str:
    """Write ``model`` as a checkpoint and return the folder's path."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop('lm_head.weight', None)
    save_file({n: t.contiguous() for n, t in state.items()}, folder / 'model.safetensors')
    (folder / 'config.json').write_text(json.dumps(model.config.to_dict()))
    return str(folder)
