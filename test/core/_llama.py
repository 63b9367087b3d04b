"""Tiny Llamas of transformers, as checkpoints on disk and as sessions of ours."""

from __future__ import annotations

import json

import gguf
from safetensors.torch import save_file
import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

from flashrt_core.planners.vocabularies import byte_letters

MARKERS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']

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


def permuted(rows, heads):
    """Return q or k as a conversion to GGUF stores it: halves become neighbouring pairs."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def save_gguf(path, model, kind=None, architecture='llama', **fields):
    """Write transformers' model as a GGUF file; matrices as ``kind``."""
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters['rope_theta'])
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('gpt-2')
    tokens = [*MARKERS, *byte_letters()]
    tokens += [f'!{"x" * i}' for i in range(1, 1 + c.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(['! x'])
    writer.add_eos_token_id(2)
    for name, value in fields.items():
        writer.add_string(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == 'lm_head.weight' and c.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if name.endswith('q_proj.weight'):
            array = permuted(array, c.num_attention_heads)
        if name.endswith('k_proj.weight'):
            array = permuted(array, c.num_key_value_heads)
        quantised = kind if kind is not None and array.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(array, quantised)
        writer.add_tensor(names.get_name(name, ('.weight',)), stored, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
