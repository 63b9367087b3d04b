"""Make the golden arrays of Pi0.5 from LeRobot 0.6.1: ``python test/goldens/pi05_lerobot.py``.

Needs Python 3.12, ``lerobot[pi]==0.6.1`` and this repository's root in PYTHONPATH; runs in seconds
on a CPU. LeRobot has two sizes only, so its choosers of sizes are replaced from outside.
"""
from __future__ import annotations

import json
import os

os.environ['HF_HUB_OFFLINE'] = '1'

from lerobot.configs import FeatureType
from lerobot.configs import NormalizationMode
from lerobot.configs import PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import AddBatchDimensionProcessorStep
from lerobot.processor import NormalizerProcessorStep
from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor import UnnormalizerProcessorStep
import numpy as np
from recipe import ARRAYS
from recipe import Case
from recipe import CASES
from recipe import CONFIG
from recipe import PROCESSOR
from recipe import tensors
import torch
from torch import nn
from transformers import PaliGemmaConfig
from transformers.models.auto import CONFIG_MAPPING

from flashrt_core.checkpoints import pi0_canonical
from flashrt_core.policies import make_tokenizer

LEROBOT_VOCAB = 257152
STATE, ACTION = 'observation.state', 'action'


def small_model() -> nn.Module:
    """Build LeRobot's Pi0.5 at the recipe's sizes, with the recipe's weights."""
    c = CONFIG
    dims = {'gemma_2b': c.prefix, 'gemma_300m': c.expert}

    def size(variant: str) -> modeling_pi05.GemmaConfig:
        d = dims[variant]
        return modeling_pi05.GemmaConfig(
            d.width, d.layers, d.mlp, d.heads, d.kv_heads, d.head_dim)

    def paligemma() -> PaliGemmaConfig:
        return PaliGemmaConfig(
            vision_config={
                'model_type': 'siglip_vision_model', 'hidden_size': c.vision.width,
                'num_hidden_layers': c.vision.layers, 'num_attention_heads': c.vision.heads,
                'patch_size': c.vision.patch_size, 'vision_use_head': False},
            text_config={'model_type': 'gemma'})

    modeling_pi05.get_gemma_config = size
    modeling_pi05.CONFIG_MAPPING = {'paligemma': paligemma, 'gemma': CONFIG_MAPPING['gemma']}
    made = modeling_pi05.PI05Pytorch(PI05Config(
        chunk_size=c.horizon, n_action_steps=c.horizon, max_state_dim=c.state_width,
        max_action_dim=c.action_width, num_inference_steps=c.flow_steps,
        image_resolution=(c.vision.image_size,) * 2, device='cpu')).eval()
    inner = made.paligemma_with_expert.paligemma.model
    inner.multi_modal_projector.linear = nn.Linear(c.vision.width, c.prefix.width)

    given = tensors(c)
    filled = set()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            key = pi0_canonical(name)
            if key in given:
                parameter[:len(given[key])] = given[key]
                filled.add(key)
            else:  # must not matter: the prefix' last layer, heads
                parameter.normal_()
    assert filled == set(given), sorted(set(given) - filled)
    return made


def processors() -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Make LeRobot's normalising pipelines for the recipe's statistics."""
    s = CONFIG.statistics
    stats = {STATE: {'q01': s.state_q01, 'q99': s.state_q99},
             ACTION: {'q01': s.action_q01, 'q99': s.action_q99}}
    features = {STATE: PolicyFeature(FeatureType.STATE, (CONFIG.state_dim,)),
                ACTION: PolicyFeature(FeatureType.ACTION, (CONFIG.action_dim,))}
    way = {FeatureType.STATE: NormalizationMode.QUANTILES,
           FeatureType.ACTION: NormalizationMode.QUANTILES}
    arrays = {k: {n: np.float32(v) for n, v in group.items()} for k, group in stats.items()}
    before = PolicyProcessorPipeline(
        [AddBatchDimensionProcessorStep(), NormalizerProcessorStep(features, way, arrays)],
        name='policy_preprocessor')
    after = PolicyProcessorPipeline(
        [UnnormalizerProcessorStep({ACTION: features[ACTION]}, way, arrays)],
        name='policy_postprocessor')
    return before, after


def run(made: nn.Module, case: Case) -> dict[str, np.ndarray]:
    """Return prompt text and actions of one case, normalised and physical."""
    before, after = processors()
    normalise, unnormalise = before.steps[1], after.steps[0]
    transition = {
        TransitionKey.OBSERVATION: {STATE: torch.tensor([case.state])},
        TransitionKey.COMPLEMENTARY_DATA: {'task': [case.task]}}
    transition = Pi05PrepareStateTokenizerProcessorStep(CONFIG.state_width)(normalise(transition))
    text = transition[TransitionKey.COMPLEMENTARY_DATA]['task'][0]
    tokens = make_tokenizer('words').encode(text, CONFIG.text_tokens)
    padding = CONFIG.text_tokens - len(tokens)
    side = CONFIG.vision.image_size
    images, masks = [], []
    for image in case.images.values():
        pixels = np.zeros((side, side, 3), np.uint8) if image is None else image
        scaled = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255.0 * 2.0 - 1.0
        images.append(scaled.expand(case.rows, -1, -1, -1))
        masks.append(torch.full((case.rows,), image is not None))
    actions = made.sample_actions(
        images, masks, torch.tensor([tokens + [0] * padding] * case.rows),
        torch.tensor([[True] * len(tokens) + [False] * padding] * case.rows),
        noise=torch.from_numpy(case.noise))
    physical = unnormalise({TransitionKey.ACTION: actions[..., :CONFIG.action_dim]})
    return {'text': np.array(text), 'actions': actions.numpy(),
            'physical': physical[TransitionKey.ACTION].numpy()}


def main() -> None:
    """Write the arrays, the names of LeRobot's tensors and its processor files."""
    made = small_model()
    stored = {f'{name}/{key}': value
              for name, case in CASES.items() for key, value in run(made, case).items()}
    shapes = {f'model.{name}': [CONFIG.vocab if n == LEROBOT_VOCAB else n for n in value.shape]
              for name, value in made.state_dict().items()}
    np.savez_compressed(ARRAYS, keys=np.array(json.dumps(shapes)), **stored)
    processors()[0].save_pretrained(PROCESSOR)
    for name, case in CASES.items():
        print(name, case.task, stored[f'{name}/text'], stored[f'{name}/actions'][0, 0])


if __name__ == '__main__':
    main()
