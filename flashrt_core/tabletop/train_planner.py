"""``python -m flashrt_core.tabletop.train_planner``: the small planner, from nothing to a score.

A hybrid Qwen3.5 of about 1.4 million parameters with MTP head learns to turn a scene as text and
an instruction into a plan. ``train`` goes on where it stopped; ``evaluate`` writes plans with the
real session, greedily, for held-out instructions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
import json
import math
import os
from pathlib import Path
import queue
import sys
import threading
import time
from typing import Any

import numpy as np
from safetensors.torch import load_file
from safetensors.torch import save_file
import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.checkpoints.keymap import split_sources
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.planners import make_planner
from flashrt_core.planners import Options
from flashrt_core.planners.qwen3_5.config import load_config
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.sequence import forward
from flashrt_core.planners.qwen3_5.sequence import logits
from flashrt_core.planners.qwen3_5.sequence import mtp_forward
from flashrt_core.planners.qwen3_5.weights import random_tensor
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.planners.vocabularies import json_tokenizer
from flashrt_core.runtime import pick_backend
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import prompt
from flashrt_core.tabletop.planner_data import batches
from flashrt_core.tabletop.planner_data import encode
from flashrt_core.tabletop.planner_data import END
from flashrt_core.tabletop.planner_data import IGNORED
from flashrt_core.tabletop.planner_data import train_tokenizer
from flashrt_core.tabletop.planner_data import VOCAB

SIZES = dict(
    width=128, mlp=352, layers=6, heads=4, kv_heads=2, head_dim=32, rotary=16, key_heads=4,
    value_heads=4, key_dim=32, value_dim=32, vocab=VOCAB, context=512, full_every=3, tied=True,
    rope_theta=10000.0,
)  # fmt: skip
LENGTH = 96      # tokens of a training sequence
MTP_SHARE = 0.3  # of the MTP head's loss
EVALUATION_SEED = 20_261_130
WEIGHTS, TOKENIZER, CONFIG, STATE = (
    'planner.safetensors', 'tokenizer.json', 'planner.yaml', 'training.safetensors')


@dataclass(frozen=True)
class Recipe:
    """What decides the trained weights besides the sizes; kept beside them."""

    steps: int = 6000
    batch: int = 256
    rate: float = 2e-3
    warmup: int = 200
    decay: float = 0.02
    seed: int = 1


@dataclass(frozen=True)
class Score:
    """Exact plans among ``count`` instructions."""

    exact: int
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return the Wilson interval at 95 % (Wilson, 1927)."""
        n, p, z = self.count, self.exact / self.count, 1.959964
        middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return ((middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n))

    def __str__(self) -> str:
        low, high = self.interval
        return (f'{self.exact} of {self.count} exact: {self.exact / self.count:.2%} '
                f'(95 %: {low:.2%} to {high:.2%})')


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


def train(folder: Path, recipe: Recipe, device: torch.device, minutes: float) -> int:
    """Train until ``recipe.steps`` or ``minutes`` are over; return the steps done in all.

    :raises ConfigError: the folder holds a training of another recipe.
    """
    c = sizes()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TOKENIZER).exists():
        train_tokenizer(folder / TOKENIZER, recipe.seed)
    tokenizer = json_tokenizer(folder / TOKENIZER)
    names = list(tensor_specs(c))
    w = {n: random_tensor(c, n, s).to(device) for n, s in tensor_specs(c).items()}
    table = rope_table(c).to(device)
    moments = {n: [torch.zeros_like(w[n]), torch.zeros_like(w[n])] for n in names}
    done = _resume(folder, recipe, w, moments)
    for name in names:
        w[name].requires_grad_(True)
    held = {ROPE: table, **w}
    per_sequence = torch.func.vmap(lambda t, y: loss_of(c, held, t, y))
    source = _ahead(tokenizer, recipe, done)
    started, first, shown = time.monotonic(), done, time.monotonic()
    while done < recipe.steps and time.monotonic() - started < minutes * 60:
        tokens, labels = (torch.from_numpy(x).to(device) for x in source.get())
        main, ahead = (part.sum() for part in per_sequence(tokens, labels))
        count = (labels != IGNORED).sum()
        ((main + MTP_SHARE * ahead) / count).backward()
        norm = _update(w, moments, recipe, done)
        done += 1
        now = time.monotonic()
        if now - shown > 10 or done == recipe.steps or done == first + 1:
            shown, pace = now, (now - started) / (done - first)
            losses = [float(part.detach() / count) for part in (main, ahead)]
            print(f'step {done}/{recipe.steps}  loss {losses[0]:.4f}  mtp {losses[1]:.4f}  norm '
                  f'{float(norm):.2f}  {pace:.3f} s/step  left '
                  f'{pace * (recipe.steps - done) / 60:.1f} min', flush=True)
    save(folder, c, recipe, w, moments, done)
    return done


def _ahead(tokenizer: Any, recipe: Recipe, done: int) -> queue.Queue[Any]:
    """Batches made on another thread while the device works."""
    ready: queue.Queue[Any] = queue.Queue(8)

    def fill() -> None:
        for batch in batches(tokenizer, recipe.batch, LENGTH, recipe.seed, done):
            ready.put(batch)

    threading.Thread(target=fill, daemon=True).start()
    return ready


def _update(w: dict[str, Tensor], moments: dict[str, list[Tensor]], recipe: Recipe,
            step: int) -> Tensor:
    """One step of AdamW (arXiv 1711.05101) with warm-up and a cosine; returns the norm."""
    names = list(moments)
    gradients = [w[n].grad for n in names]
    norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    rise = min(1.0, (step + 1) / recipe.warmup)
    rate = recipe.rate * rise * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)) + 1e-6
    with torch.no_grad():
        for name, gradient in zip(names, gradients, strict=True):
            assert gradient is not None
            first, second = moments[name]
            gradient.mul_(scale)
            first.lerp_(gradient, 0.1)
            second.mul_(0.98).addcmul_(gradient, gradient, value=0.02)
            unbiased = first / (1 - 0.9 ** (step + 1))
            spread = (second / (1 - 0.98 ** (step + 1))).sqrt_().add_(1e-8)
            if w[name].ndim > 1:
                w[name].mul_(1 - rate * recipe.decay)
            w[name].addcdiv_(unbiased, spread, value=-rate)
            w[name].grad = None
    return norm


def _resume(folder: Path, recipe: Recipe, w: dict[str, Tensor],
            moments: dict[str, list[Tensor]]) -> int:
    path = folder / STATE
    if not path.exists():
        return 0
    record = json.loads((folder / 'training.json').read_text(encoding='utf-8'))
    if record['recipe'] != vars(recipe):
        raise ConfigError(f'{folder} holds a training with {record["recipe"]}, asked is '
                          f'{vars(recipe)}; give the same options or another folder')
    stored = load_file(path)
    for name in w:
        w[name].copy_(stored[f'weight.{name}'])
        for at in (0, 1):
            moments[name][at].copy_(stored[f'moment{at}.{name}'])
    return int(record['step'])


def save(folder: Path, c: Qwen35Config, recipe: Recipe, w: Mapping[str, Tensor],
         moments: Mapping[str, Sequence[Tensor]], step: int) -> None:
    """Write the state of training, and the model as a bf16 checkpoint with its config."""
    whole = {f'weight.{n}': w[n].detach().cpu().contiguous() for n in moments}
    for at in (0, 1):
        whole |= {f'moment{at}.{n}': m[at].cpu().contiguous() for n, m in moments.items()}
    _replace(folder / STATE, lambda path: save_file(whole, path))
    record = {'recipe': vars(recipe), 'step': step}
    _replace(folder / 'training.json', lambda path: Path(path).write_text(json.dumps(record)))
    stored: dict[str, Tensor] = {}
    for target in qwen3_5_targets(c):
        parts = split_sources(target, w[target.name].detach().cpu())
        stored |= {key: part.to(torch.bfloat16) for key, part in parts.items()}
    _replace(folder / WEIGHTS, lambda path: save_file(stored, path))
    lines = ['# The small planner of the tabletop; read by planners.qwen3_5.load_config.',
             'planner: qwen3_5', 'base: tiny']
    lines += [f'{name}: {str(value).lower()}' for name, value in SIZES.items()]
    lines += ['dtype: float32', f'weights: {WEIGHTS}', f'tokenizer: {TOKENIZER}',
              'draft_tokens: 3', 'branches: 0', 'prefill_keys: [16, 64, 128]',
              'smallest_span: 128']
    _replace(folder / CONFIG,
             lambda path: Path(path).write_text('\n'.join(lines) + '\n', encoding='utf-8'))


def _replace(path: Path, write: Any) -> None:
    """Write beside and rename, so that a stop leaves the old file."""
    draft = path.with_name(f'.{path.name}.new')
    write(draft)
    os.replace(draft, path)


def evaluate(folder: Path, count: int, held_out: bool, device: str, seed: int,
             show: int = 3) -> Score:
    """Write ``count`` plans greedily with the bound session; return how many are exact."""
    config, settings = load_config(folder / CONFIG)
    session = make_planner('qwen3_5').bind(pick_backend(device), (config, settings))
    tokenizer = json_tokenizer(folder / TOKENIZER)
    end = tokenizer.special[END]
    rng = np.random.default_rng([seed, 2, held_out])
    exact, shown, said = 0, 0, time.monotonic()
    try:
        for done in range(1, count + 1):
            example = draw_example(rng, held_out)
            before, answer = encode(tokenizer, example)
            session.prefill(before).result()
            found: list[int] = []
            while len(found) < len(answer) + 8 and end not in found:
                found += session.decode(Options(max_tokens=160)).result().tokens
            exact += found[: len(answer)] == answer
            if found[: len(answer)] != answer and shown < show:
                shown += 1
                written = tokenizer.decode(found)
                print(f'  {prompt(example.scene, example.instruction)!r}\n    asked '
                      f'{example.answer!r}\n    wrote {written!r}', flush=True)
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f'  {done}/{count}: {exact} exact', flush=True)
    finally:
        session.close()
    return Score(exact, count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 fine, 2 refused."""
    parser = argparse.ArgumentParser('train_planner', description=__doc__)
    parser.add_argument('command', choices=('train', 'evaluate', 'all'))
    parser.add_argument('--out', type=Path, required=True, help='folder of the model')
    parser.add_argument('--device', default='auto', choices=('auto', 'cpu', 'cuda'))
    parser.add_argument('--minutes', type=float, default=1e9, help='of training, at most')
    parser.add_argument('--count', type=int, default=1000, help='instructions to evaluate')
    for item in fields(Recipe):
        parser.add_argument(f'--{item.name}', type=type(item.default), default=item.default)
    options = parser.parse_args(argv)
    recipe = Recipe(**{item.name: getattr(options, item.name) for item in fields(Recipe)})
    try:
        if options.command != 'evaluate':
            device = pick_backend(options.device).device
            done = train(options.out, recipe, device, options.minutes)
            print(f'{done} of {recipe.steps} steps done; {options.out / WEIGHTS} written')
        if options.command != 'train':
            for held_out in (False, True):
                print(f'{"held-out" if held_out else "seen"} compositions, seed '
                      f'{EVALUATION_SEED}:', flush=True)
                score = evaluate(options.out, options.count, held_out, options.device,
                                 EVALUATION_SEED)
                print(f'  {score}', flush=True)
    except FlashrtError as error:
        print(f'error [{error.code}]: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
