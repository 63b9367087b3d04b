"""``python -m flashrt_core.tabletop.model_cards``: take trained models over, each with its card.

Copies what the runtime reads and the training's record below resource/models, and writes a card
from that record and the scores of the evaluation. No figure is typed in.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import json
from pathlib import Path
import shutil
import sys
from typing import Any

from safetensors import safe_open
from safetensors import SafetensorError

from flashrt_core.command_line import make_folder
from flashrt_core.command_line import run
from flashrt_core.errors import ConfigError
from flashrt_core.tabletop.instructions import HELD_OUT_CHAINS
from flashrt_core.tabletop.instructions import HELD_OUT_PAIRS
from flashrt_core.tabletop.models import FILES
from flashrt_core.tabletop.models import HOW
from flashrt_core.tabletop.subgoals import HELD_OUT_RADIUS_M
from flashrt_core.tabletop.subgoals import HELD_OUT_SPOTS_M
from flashrt_core.tabletop.training import load_record
from flashrt_core.tabletop.training import RECORD
from flashrt_core.tabletop.training import Score

LIMIT_BYTES = 12_000_000  # both models together
ABOUT = {
    'policy': (
        'Small policy of the tabletop',
        'Pi0 architecture (SigLIP tower, language prefix, flow-matching action expert), trained '
        'from nothing. It sees the cameras top and wrist, the joints and a subgoal in words; it '
        'gives 16 joint targets and the probability that the subgoal is done.',
        'States of the built-in simulator, drawn by its own cameras; labels by a scripted expert '
        'that reads the true state. The arm is pushed and blocks slip; most episodes are driven '
        'by the policy itself and labelled afterwards (DAgger). No other data.'),
    'planner': (
        'Small planner of the tabletop',
        'Hybrid Qwen3.5 architecture (gated delta rule and full attention) with MTP head, trained '
        'from nothing. It reads a scene as text and an instruction and writes subgoals. The scene '
        "text is an oracle's: it is written from the simulator's true state.",
        'Scenes, instructions and plans of a generated grammar, drawn without end. No other '
        'data.'),
}


def card(name: str, folder: Path, scores: Mapping[str, Any]) -> str:
    """Return a card in Markdown.

    :param folder: of the model and its training. :param scores: {what: {good, count}}.
    """
    title, what, data = ABOUT[name]
    record = load_record(training_folder(folder))
    lines = [f'# {title}', '', what, '', '## Data', '', data, '']
    held = ', '.join(sorted(f'{block} block in {zone} zone' for block, zone in HELD_OUT_PAIRS))
    lines += [f'Never shown: {held}.']
    if name == 'policy':
        spots = ' and '.join(f'({x}, {y})' for x, y in HELD_OUT_SPOTS_M)
        lines += [f'No block lay within {HELD_OUT_RADIUS_M} m of {spots} m at the start.']
    else:
        chains = ', '.join(sorted(f'{a} then {b}' for a, b in HELD_OUT_CHAINS))
        lines += [f'Nor one kind of part after another: {chains}.']
    lines += ['', '## Training']
    for number, stage in enumerate(_stages(record), start=1):
        how = HOW[name].format(f'FOLDER{number}')
        how += f' --begin FOLDER{number - 1}' if 'begin' in stage else ''
        how += ''.join(f' --{k} {v}' for k, v in stage.get('lessons', {}).items() if v)
        minutes = stage.get('facts', {}).get('within_minutes')
        how += f' --within {minutes}' if minutes else ''
        lines += ['', f'`{how}`', '', '| | |', '|---|---|',
                  *(f'| {key} | {_shown(value)} |' for key, value in _facts(stage))]
    lines += ['', _size_of(folder / f'{name}.safetensors'), '', '## Score', '']
    if not scores:
        raise ConfigError(f'no scores for {name}; run the evaluation with --json')
    lines += ['| | good | of | share | 95 % (Wilson) |', '|---|---|---|---|---|']
    for key, value in scores.items():
        score = Score(**value)
        low, high = score.interval
        lines.append(f'| {key} | {score.good} | {score.count} | {score.good / score.count:.1%} | '
                     f'{low:.1%} to {high:.1%} |')
    lines += ['', 'Seeds of the evaluation are fixed in its source and apart from those of the '
              'training.', '']
    return '\n'.join(lines)


def training_folder(folder: Path) -> Path:
    """Return where a model's training wrote its record: the folder or the last part of it."""
    for part in ('timed', 'turn2', 'turn1'):
        if (folder / part / RECORD).is_file():
            return folder / part
    return folder


def _stages(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of the trainings that each went on from the one before."""
    before = record.get('begin')
    return [*(_stages(before) if before else []), record]


def _facts(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [('steps', record['step']), *list(record['recipe'].items())[1:],
            *record.get('facts', {}).items()]


def _size_of(weights: Path) -> str:
    try:
        with safe_open(weights, framework='numpy') as file:
            count = sum(_size(file.get_slice(key).get_shape()) for key in file.keys())
    except SafetensorError as error:
        raise ConfigError(f'{weights} is no whole checkpoint: {error}; train it again') from error
    return f'{count:,} parameters; {weights.stat().st_size:,} bytes, bf16.'


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ', '.join(f'{key} {_shown(part)}' for key, part in value.items())
    return str(value)


def ship(name: str, folder: Path, scores: Mapping[str, Any], out: Path) -> int:
    """Copy a model and write its card; return the bytes that it takes.

    :raises ConfigError: a file is missing.
    """
    missing = [file for file in FILES[name] if not (folder / file).is_file()]
    if missing:
        raise ConfigError(f'{folder} lacks {", ".join(missing)}; train the {name} there')
    text = card(name, folder, scores)
    make_folder(out / name, 'folder of models')
    for source in (*(folder / file for file in FILES[name]), training_folder(folder) / RECORD):
        if source.resolve() != (out / name / source.name).resolve():
            shutil.copyfile(source, out / name / source.name)
    (out / f'{name}.md').write_text(text, encoding='utf-8')
    return sum((out / name / file).stat().st_size for file in FILES[name])


def main(argv: Sequence[str] | None = None) -> int:
    """Take over the models whose folders are given; 0 fine, 2 refused."""
    parser = argparse.ArgumentParser('model_cards', description=__doc__)
    for name in FILES:
        parser.add_argument(f'--{name}', type=Path, help='folder of its training')
    parser.add_argument('--scores', type=Path, nargs='+', required=True,
                        help='files that the evaluations wrote')
    parser.add_argument('--out', type=Path, default=Path('resource/models'))
    o = parser.parse_args(argv)
    return run('model_cards', lambda: _ship_all(o))


def _ship_all(o: argparse.Namespace) -> int:
    folders = {name: getattr(o, name) for name in FILES if getattr(o, name) is not None}
    if not folders:
        raise ConfigError(f'no model is given; give {" or ".join(f"--{name}" for name in FILES)}')
    scores = read_scores(o.scores)
    total = 0
    for name, folder in folders.items():
        chosen = {key: value for key, value in scores.items()
                  if key.startswith('plans') == (name == 'planner')}
        total += ship(name, folder, chosen, o.out)
    print(f'{total:,} bytes below {o.out}')
    if total > LIMIT_BYTES:
        raise ConfigError(f'that is more than the {LIMIT_BYTES:,} that the two may take')
    return 0


def read_scores(paths: Sequence[Path]) -> dict[str, Any]:
    """Return {what: {good, count}} of all files together, the last one's where two agree.

    :raises ConfigError: a file that the evaluation did not write.
    """
    scores: dict[str, Any] = {}
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding='utf-8'))
            whole = isinstance(found, dict) and all(
                isinstance(value, dict) and value.keys() == {'good', 'count'}
                and all(type(part) is int for part in value.values())
                and 0 <= value['good'] <= value['count'] and value['count']
                for value in found.values())
            if not whole:
                raise ValueError('it holds no {what: {good, count}}')
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f'scores {path} cannot be read: {error}; write them by the '
                              'evaluation with --json') from error
        scores |= found
    return scores


if __name__ == '__main__':
    sys.exit(main())
