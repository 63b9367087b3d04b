"""Make the scales of an FP8 policy: python -m flashrt_core.policies.calibrate --config FILE ...

Frames are pictures of the robot's own cameras at work, ``FOLDER/<view>/*.png``, or drawn from
tables of the built-in robot. The config then says ``precision: fp8`` and ``scales: FILE``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
import zipfile

import numpy as np
from numpy.typing import NDArray

from flashrt_core.checkpoints import pi0_statistics
from flashrt_core.command_line import check_output
from flashrt_core.command_line import run
from flashrt_core.command_line import whole_number
from flashrt_core.errors import ConfigError
from flashrt_core.policies.calibration import count_frames
from flashrt_core.policies.calibration import FEWEST
from flashrt_core.policies.calibration import read_frames
from flashrt_core.policies.calibration import save_scales
from flashrt_core.policies.pi0.calibration import calibrate
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.prompts import make_prompts
from flashrt_core.policies.protocol import SubgoalWrite
from flashrt_core.policies.protocol import TickInput
from flashrt_core.policies.text import WordTokenizer
from flashrt_core.runtime import pick_backend


def from_folder(
    c: Pi0Config, folder: str | Path, states: str | Path = '', prompt: str = ''
) -> list[TickInput]:
    """Return an observation a frame, of the pictures in ``folder/<view>``.

    :param states: a .npy file of joints [frames, state_dim] in their order; empty: the mean state.
    :param prompt: the task; a config without a tokenizer takes random token ids in its place.
    :raises ConfigError: no usable pictures, more of one view than of another, states of another
        shape, or a prompt is missing.
    """
    frames = read_frames(folder, c.views, c.vision.image_size)
    count = count_frames(frames)
    joints = _read_states(c, states, count)
    text = _prompt(c, prompt)
    return [
        TickInput({view: frames[view][i] for view in c.views}, joints[i], prompt=text,
                  steps_executed=c.horizon)
        for i in range(count)
    ]


def from_tabletop(c: Pi0Config, count: int) -> list[TickInput]:
    """Return observations of ``count`` tables of the built-in robot, with a subgoal each.

    :raises ConfigError: the policy has other cameras or joints than that robot.
    """
    from flashrt_core.tabletop.dataset import draw_world  # only this needs the robot
    from flashrt_core.tabletop.scene import render_state
    from flashrt_core.tabletop.scene import VIEWS
    from flashrt_core.tabletop.subgoals import draw_goal
    from flashrt_core.tabletop.subgoals import encode_subgoal

    if not set(c.views) <= set(VIEWS) or c.state_dim != 4:
        raise ConfigError(
            f'the policy has views {list(c.views)} and {c.state_dim} joints, the built-in robot '
            f'{list(VIEWS)} and 4; calibrate on pictures of your robot with --frames')
    prompts = make_prompts(c.tokenizer, c.family, c.vocab, bool(c.weights))
    rng, words, made = np.random.default_rng(5), WordTokenizer(), []
    for i in range(count):
        state = draw_world(rng).snapshot()
        tokens = encode_subgoal(draw_goal(rng, state, pairs='seen'))
        if prompts is not None:
            tokens = prompts.encode(words.decode(tokens), c.subgoal_tokens)
        images = {view: render_state(state, view, c.vision.image_size) for view in c.views}
        made.append(TickInput(images, state.joints.astype(np.float32), steps_executed=c.horizon,
                              subgoal=SubgoalWrite(i + 1, tokens)))
    return made


def _read_states(c: Pi0Config, path: str | Path, count: int) -> NDArray[np.float32]:
    if not path:
        mean = tables(pi0_statistics(c))['table.state_mean'].numpy()
        return np.tile(mean, (count, 1))
    try:
        states = np.load(path, allow_pickle=False)
        if not isinstance(states, np.ndarray):
            raise ValueError('it holds several arrays')
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f'states {path} cannot be read as .npy: {error}') from error
    if states.dtype.kind not in 'fiu':
        raise ConfigError(f'states {path} are {states.dtype}; give real numbers')
    if states.shape != (count, c.state_dim):
        raise ConfigError(
            f'states {path} are {list(states.shape)}; give a row of {c.state_dim} for each of '
            f'{count} frames')
    with np.errstate(over='ignore'):  # infinity is refused later, as every state of its kind
        return states.astype(np.float32)


def _prompt(c: Pi0Config, text: str) -> tuple[int, ...]:
    prompts = make_prompts(c.tokenizer, c.family, c.vocab, bool(c.weights))
    if prompts is None and not text:
        drawn = np.random.default_rng(5).integers(0, c.vocab, c.prompt_tokens // 2)
        return tuple(drawn.tolist())
    if prompts is None or not text:
        raise ConfigError(
            f'prompt is {text!r} and tokenizer {c.tokenizer!r}; give both, the task that the '
            'frames show and the tokenizer that reads it')
    return tuple(prompts.encode(text, c.prompt_tokens))


def main(argv: Sequence[str] | None = None) -> int:
    """Make the file; 0 made, 2 refused."""
    parser = argparse.ArgumentParser('calibrate', description=__doc__)
    parser.add_argument('--config', required=True, help='of the policy, name or file')
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--frames', metavar='FOLDER', help='pictures in a folder a view')
    source.add_argument('--tabletop', type=whole_number(FEWEST), metavar='N',
                        help='tables of the built-in robot')
    parser.add_argument('--states', default='', help='.npy of joints, a row a frame')
    parser.add_argument('--prompt', default='', help='the task that the frames show')
    parser.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    parser.add_argument('--out', required=True, help='file of scales to write')
    o = parser.parse_args(argv)
    return run('calibrate', lambda: _make(o))


def _make(o: argparse.Namespace) -> int:
    check_output(Path(o.out), 'scales')
    if o.tabletop is not None and (o.states or o.prompt):
        raise ConfigError('states and prompt go with --frames; the tables have their own')
    c = load_config(o.config)
    found = (from_tabletop(c, o.tabletop) if o.tabletop is not None
             else from_folder(c, o.frames, o.states, o.prompt))
    scales = calibrate(pick_backend(o.device), c, found,
                       lambda count: print(f'frame {count} of {len(found)}', flush=True))
    save_scales(scales, o.out)
    print(f'{o.out}: {len(scales.largest)} scales from {scales.frames} sets of frames')
    return 0


if __name__ == '__main__':
    sys.exit(main())
