"""``python -m flashrt_core.tabletop.train_planner``: the small planner, from nothing to a score.

A hybrid Qwen3.5 of about 1.4 million parameters with MTP head learns to turn a scene as text and
an instruction into a plan. ``train`` goes on where it stopped; ``evaluate`` writes plans with the
real session, greedily, for held-out instructions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
import shutil
import sys
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.command_line import check_output
from flashrt_core.command_line import number
from flashrt_core.command_line import run
from flashrt_core.command_line import whole_number
from flashrt_core.errors import ConfigError
from flashrt_core.planners import make_planner
from flashrt_core.planners.qwen3_5.config import load_config
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.sequence import forward
from flashrt_core.planners.qwen3_5.sequence import logits
from flashrt_core.planners.qwen3_5.sequence import mtp_forward
from flashrt_core.planners.qwen3_5.weights import random_tensor
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.runtime import pick_backend
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import prompt
from flashrt_core.tabletop.models import config_of
from flashrt_core.tabletop.plan_writer import PlanWriter
from flashrt_core.tabletop.planner_data import AS_DRAWN
from flashrt_core.tabletop.planner_data import Batches
from flashrt_core.tabletop.planner_data import IGNORED
from flashrt_core.tabletop.planner_data import LENGTH
from flashrt_core.tabletop.planner_data import Lessons
from flashrt_core.tabletop.planner_data import train_tokenizer
from flashrt_core.tabletop.planner_data import VOCAB
from flashrt_core.tabletop.training import digest_of
from flashrt_core.tabletop.training import fused
from flashrt_core.tabletop.training import hold_folder
from flashrt_core.tabletop.training import load_record
from flashrt_core.tabletop.training import Recipe
from flashrt_core.tabletop.training import replace
from flashrt_core.tabletop.training import save_model
from flashrt_core.tabletop.training import Score
from flashrt_core.tabletop.training import take_weights
from flashrt_core.tabletop.training import tf32_products
from flashrt_core.tabletop.training import Training

SIZES = dict(
    width=128, mlp=352, layers=6, heads=4, kv_heads=2, head_dim=32, rotary=16, key_heads=4,
    value_heads=4, key_dim=32, value_dim=32, vocab=VOCAB, context=512, full_every=3, tied=True,
    rope_theta=10000.0,
)  # fmt: skip
MTP_SHARE = 0.3  # of the MTP head's loss
EVALUATION_SEED = 20_261_130
WEIGHTS, TOKENIZER, CONFIG = 'planner.safetensors', 'tokenizer.json', 'planner.yaml'
DEFAULT = Recipe(steps=6000, batch=256, decay=0.1)


def sizes() -> Qwen35Config:
    """Return the config that is trained, in float32."""
    return Qwen35Config(**SIZES, dtype='float32')  # type: ignore[arg-type]


def loss_of(c: Qwen35Config, w: Mapping[str, Tensor], tokens: Tensor,
            labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cross entropy, that of the MTP head) of one sequence, sums over its labels."""
    hidden = forward(c, w, tokens)
    main = F.cross_entropy(logits(c, w, hidden[:-1]), labels[1:], ignore_index=IGNORED,
                           reduction='sum')
    drafted = mtp_forward(c, w, tokens[1:-1], hidden[:-2])
    ahead = F.cross_entropy(logits(c, w, drafted), labels[2:], ignore_index=IGNORED,
                            reduction='sum')
    return main, ahead


def train(folder: Path, recipe: Recipe, device: torch.device, minutes: float,
          within: float = 0.0, lessons: Lessons = AS_DRAWN, begin: Path | None = None) -> int:
    """Train until ``recipe.steps`` or ``minutes`` are over; return the steps done in all.

    On a GPU its kernels are fused first, about a minute that no limit counts.

    :param within: minutes for all the steps, as many as that makes; 0 goes by the steps.
    :param lessons: what is shown. :param begin: folder of a model to go on from, whose tokenizer
        it keeps; None begins with random weights.
    :raises ConfigError: the folder holds a training of another recipe; ``begin`` is no such model.
    """
    c = sizes()
    record: dict[str, object] = {'sizes': SIZES, 'lessons': vars(lessons), 'length': LENGTH}
    if begin is None:
        w = {n: random_tensor(c, n, s).to(device) for n, s in tensor_specs(c).items()}
    else:
        w = {n: tensor.to(device) for n, tensor in weights_of(begin, c).items()}
        record['begin'] = {'sha256': digest_of(begin / WEIGHTS), **load_record(begin)}
    folder.mkdir(parents=True, exist_ok=True)
    if begin is not None:
        replace(folder / TOKENIZER, lambda path: shutil.copyfile(begin / TOKENIZER, path))
    elif not (folder / TOKENIZER).exists():
        train_tokenizer(folder / TOKENIZER, recipe.seed, lessons)
    training = Training(folder, recipe, w, record)
    if within:
        training.facts['within_minutes'] = within
    held = {ROPE: rope_table(c).to(device), **w}
    given = torch.zeros((2, recipe.batch, LENGTH), dtype=torch.int64, device=device)

    def losses() -> dict[str, Tensor]:
        tokens, labels = given
        count = (labels != IGNORED).sum()
        per_sequence = torch.func.vmap(lambda t, y: loss_of(c, held, t, y))
        main, ahead = (part.sum() / count for part in per_sequence(tokens, labels))
        return {'loss': main + MTP_SHARE * ahead, 'next': main, 'mtp': ahead}

    with (Batches(folder / TOKENIZER, recipe, lessons, training.done) as source,
          tf32_products()):
        loss = fused(losses) if device.type == 'cuda' else losses
        begun = time.monotonic()

        def feed(step: int) -> None:
            given.copy_(torch.from_numpy(source.take()))

        by_clock = (lambda: (time.monotonic() - begun) / (within * 60)) if within else None
        done = training.run(feed, loss, minutes, by_clock)
    training.save()
    save(folder, c, training.mean, done)
    if training.stopped:
        raise KeyboardInterrupt
    return done


def weights_of(folder: Path, c: Qwen35Config) -> dict[str, Tensor]:
    """Return the float32 weights of a trained planner's folder by name, on the CPU.

    :raises ConfigError: it is none, or one of other sizes.
    """
    found, settings = load_config(config_of(folder, 'planner'))
    if dataclasses.replace(found, weights='', tokenizer='') != c:
        raise ConfigError(f'{folder} holds a planner of other sizes; give one that '
                          'train_planner made')
    session = make_planner('qwen3_5').bind(pick_backend('cpu'), (found, settings))
    return take_weights(session, tensor_specs(c))


def save(folder: Path, c: Qwen35Config, w: Mapping[str, Tensor], step: int) -> None:
    """Write the model as a bf16 checkpoint with its config."""
    save_model(qwen3_5_targets(c), w, folder / WEIGHTS, {'steps': str(step)})
    lines = ['# The small planner of the tabletop; read by planners.qwen3_5.load_config.',
             'planner: qwen3_5', 'base: tiny']
    lines += [f'{name}: {str(value).lower()}' for name, value in SIZES.items()]
    lines += ['dtype: float32', f'weights: {WEIGHTS}', f'tokenizer: {TOKENIZER}',
              'draft_tokens: 3', 'branches: 0', 'prefill_keys: [16, 64, 128]',
              'smallest_span: 128']
    text = '\n'.join(lines) + '\n'
    replace(folder / CONFIG, lambda path: path.write_text(text, encoding='utf-8'))


def evaluate(folder: Path, count: int, held_out: bool, device: str, seed: int,
             show: int = 3) -> Score:
    """Write ``count`` plans greedily with the bound session; return how many are exact."""
    writer = PlanWriter(config_of(folder, 'planner'), device)
    rng = np.random.default_rng([seed, 2, held_out])
    exact, shown, said = 0, 0, time.monotonic()
    try:
        for done in range(1, count + 1):
            example = draw_example(rng, held_out)
            written = writer.write(example.scene, example.instruction)
            right = written.ended and written.goals == example.plan
            exact += right
            if not right and shown < show:
                shown += 1
                print(f'  {prompt(example.scene, example.instruction)!r}\n    asked '
                      f'{example.answer!r}\n    wrote {written.text!r}', flush=True)
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f'  {done}/{count}: {exact} exact', flush=True)
    finally:
        writer.close()
    return Score(exact, count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 fine, 2 refused."""
    parser = argparse.ArgumentParser('train_planner', description=__doc__)
    parser.add_argument('command', choices=('train', 'evaluate', 'all'))
    parser.add_argument('--out', type=Path, required=True, help='folder of the model')
    parser.add_argument('--device', default='auto', choices=('auto', 'cpu', 'cuda'))
    parser.add_argument('--minutes', type=number(0, above=True), default=1e9,
                        help='of training, at most')
    parser.add_argument('--count', type=whole_number(1), default=1000,
                        help='instructions to evaluate')
    parser.add_argument('--json', type=Path, help='file for the scores')
    parser.add_argument('--within', type=number(0), default=0.0,
                        help='minutes for the whole training instead of --steps')
    parser.add_argument('--begin', type=Path, help='folder of a trained model to go on from')
    for name, help in (('renamed', 'share of lessons with colours called other words'),
                       ('lists', 'share that begins with a part of several goals'),
                       ('deep', 'share of these that go on with another one')):
        parser.add_argument(f'--{name}', type=float, default=0.0, help=help)
    for name, value in vars(DEFAULT).items():
        parser.add_argument(f'--{name}', type=type(value), default=value)
    o = parser.parse_args(argv)
    return run('train_planner', lambda: _command(o))


def _command(o: argparse.Namespace) -> int:
    recipe = Recipe(**{name: getattr(o, name) for name in vars(DEFAULT)})
    lessons = Lessons(o.renamed, o.lists, o.deep)
    device = pick_backend(o.device).device
    if o.json is not None:
        check_output(o.json, 'scores')
    if o.command != 'evaluate':
        with hold_folder(o.out):
            done = train(o.out, recipe, device, o.minutes, o.within, lessons, o.begin)
        print(f'{done} steps done; {o.out / WEIGHTS} written')
    if o.command == 'train':
        return 0
    scores = {}
    for held_out in (False, True):
        what = f'{"held-out" if held_out else "seen"} compositions'
        print(f'{what}, seed {EVALUATION_SEED}:', flush=True)
        score = evaluate(o.out, o.count, held_out, o.device, EVALUATION_SEED)
        print(f'  {score}', flush=True)
        scores[f'plans, {what}'] = vars(score)
    if o.json is not None:
        o.json.write_text(json.dumps(scores, indent=1) + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
