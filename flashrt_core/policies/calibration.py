"""What an FP8 policy needs besides its weights: good frames to calibrate on, and a file of scales.

Static activation scales hold for the inputs they were measured on. Frames that show nothing give
scales that saturate on the first real scene, so they are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import BadEncoding
from flashrt_core.errors import BadSize
from flashrt_core.errors import ConfigError
from flashrt_core.policies.arrays import is_array
from flashrt_core.policies.arrays import shown
from flashrt_core.policies.normalise import LARGEST
from flashrt_core.policies.preprocess import letterbox

FORMAT = 1
FEWEST = 8        # frames a view
DARKEST = 12.0    # mean of a frame, of 255
FLATTEST = 4.0    # standard deviation of a frame within the bars of a letterbox, of 255
REMEDY = 'calibrate again: python -m flashrt_core.policies.calibrate'
IMAGES = ('.png', '.jpg', '.jpeg', '.bmp')

Frame = NDArray[np.uint8]


@dataclass(frozen=True)
class Scales:
    """Static input scales of an FP8 policy.

    :param family: of the policy. :param weights: digest of the plain weights they were made with.
    :param frames: sets of frames seen. :param largest: product -> largest absolute input.
    """

    family: str
    weights: str
    frames: int
    largest: Mapping[str, float]

    @property
    def digest(self) -> str:
        """Digest of the numbers, as hex."""
        record = json.dumps(dict(self.largest), sort_keys=True)
        return hashlib.sha256(record.encode()).hexdigest()


def check_frames(frames: Mapping[str, Sequence[Frame]], fewest: int = FEWEST) -> int:
    """Verify that frames can carry a calibration; return how many sets of views there are.

    :param frames: view -> uint8 RGB images [H, W, 3], as many for each view.
    :raises BadEncoding, BadSize: not uint8 [H, W, 3].
    :raises ConfigError: too few, views of different counts, a dark or constant frame, or frames
        of a view that are all the same; naming view, frame and value.
    """
    count = count_frames(frames)
    if count < fewest:
        raise ConfigError(
            f'calibration has {count} frames a view; give at least {fewest}, from different '
            'moments of the work')
    for view, images in frames.items():
        for at, image in enumerate(images):
            _check_frame(view, at, image)
        if all(np.array_equal(images[0], image) for image in images[1:]):
            raise ConfigError(
                f'all {count} frames of view {view!r} are the same picture; give frames from '
                'different moments')
    return count


def count_frames(frames: Mapping[str, Sequence[Frame]]) -> int:
    """Return how many frames each view has; raises ConfigError where they differ."""
    counts = {view: len(images) for view, images in frames.items()}
    if not counts or len(set(counts.values())) != 1:
        raise ConfigError(f'frames a view are {counts}; give every view as many')
    return next(iter(counts.values()))


def _check_frame(view: str, at: int, image: Frame) -> None:
    if not is_array(image, np.uint8):
        raise BadEncoding(f'frame {at} of view {view!r} is {shown(image)}; give uint8 RGB')
    if image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise BadSize(f'frame {at} of view {view!r} is {list(image.shape)}; give [H, W, 3]')
    mean, spread = float(image.mean()), float(_without_bars(image).std())
    if mean < DARKEST:
        raise ConfigError(
            f'frame {at} of view {view!r} is dark: its mean is {mean:.1f} of 255, at least '
            f'{DARKEST:.0f} is needed; light the scene or leave the frame out')
    if spread < FLATTEST:
        raise ConfigError(
            f'frame {at} of view {view!r} is nearly one colour: its standard deviation is '
            f'{spread:.1f} of 255, at least {FLATTEST:.0f} is needed; leave the frame out')


def _without_bars(image: Frame) -> Frame:
    """Return an image without the rows and columns that are black all along, as of a letterbox."""
    brightest = image.max(axis=2)
    rows, columns = brightest.max(axis=1) > 0, brightest.max(axis=0) > 0
    return image[rows][:, columns] if rows.any() else image


def read_frames(folder: str | Path, views: Iterable[str], size: int) -> dict[str, list[Frame]]:
    """Read ``folder/<view>/*.png|jpg|bmp`` in order of their names, letterboxed to ``size``.

    :raises ConfigError: a view without a folder, a folder without images, an unreadable image.
    """
    found: dict[str, list[Frame]] = {}
    for view in views:
        place = Path(folder) / view
        if not place.is_dir():
            raise ConfigError(
                f'{place} is no folder; put the frames of view {view!r} there, as PNG or JPEG')
        paths = sorted(p for p in place.iterdir() if p.suffix.lower() in IMAGES)
        if not paths:
            raise ConfigError(f'{place} holds no image; accepted are {", ".join(IMAGES)}')
        found[view] = []
        for path in paths:
            image = cv2.imread(str(path), cv2.IMREAD_COLOR)
            if image is None:
                raise ConfigError(f'{path} cannot be read as an image; replace or remove it')
            found[view].append(letterbox(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), size))
    return found


def save_scales(scales: Scales, path: str | Path) -> None:
    """Write scales as JSON; the file is whole or, if it fails, as it was before.

    :raises ConfigError: the file cannot be written.
    """
    record = {'format': FORMAT, **vars(scales), 'largest': dict(scales.largest)}
    path = Path(path)
    draft = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        draft.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f'scales cannot be written to {path}: {error.strerror}') from error


def load_scales(path: str | Path, family: str, products: Iterable[str]) -> Scales:
    """Read scales and verify that they are of this policy; of its weights, see check_weights.

    :param products: the names that need a scale.
    :raises ConfigError: unreadable, of another family or other products.
    """
    scales = _read(Path(path))
    if scales.family != family:
        raise ConfigError(
            f'scales {path} are of family {scales.family!r}, this policy is {family!r}; {REMEDY}')
    missing = sorted(set(products) - set(scales.largest))
    extra = sorted(set(scales.largest) - set(products))
    if missing or extra:
        raise ConfigError(
            f'scales {path} lack {missing[:4]} ({len(missing)} in all) and have {extra[:4]} '
            f'({len(extra)}) that this policy does not use; {REMEDY}')
    return scales


def check_weights(scales: Scales, weights: str) -> None:
    """Verify that scales were made with the weights of that digest.

    :raises ConfigError: they were made with others.
    """
    if scales.weights != weights:
        raise ConfigError(
            f'scales are of weights {scales.weights[:12]}, this policy has {weights[:12]}; '
            f'{REMEDY}')


def _read(path: Path) -> Scales:
    try:
        record: Any = json.loads(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ConfigError(f'scales {path} cannot be read: {error.strerror}') from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'scales {path} are no JSON: {error}') from error
    if not isinstance(record, dict) or record.get('format') != FORMAT:
        raise ConfigError(f'scales {path} have no "format": {FORMAT}; make them with calibrate')
    largest: Any = record.get('largest')
    whole = (
        isinstance(record.get('family'), str)
        and isinstance(record.get('weights'), str)
        and type(record.get('frames')) is int
        and isinstance(largest, dict)
    )
    if not whole:
        raise ConfigError(f'scales {path} lack family, weights, frames or largest')
    for name, value in largest.items():
        if type(value) not in (int, float) or not 0 < value <= LARGEST:
            raise ConfigError(
                f'scales {path}: {name} is {value!r:.40}; a number above 0 that float32 holds is '
                f'needed: {REMEDY}')
    return Scales(record['family'], record['weights'], record['frames'], largest)
