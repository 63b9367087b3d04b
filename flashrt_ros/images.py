"""sensor_msgs/Image and CompressedImage to uint8 RGB [height, width, 3].

Decoded with numpy and OpenCV, no cv_bridge. What is not decoded here is refused with the node to
insert. Sizes are checked against each other and against a limit before anything is allocated.
"""

import struct
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import BadEncoding
from flashrt_core.errors import BadSize

Rgb = NDArray[np.uint8]

MAX_PIXELS = 16 * 1024 * 1024
_CHANNELS = {'rgb8': 3, 'bgr8': 3, 'mono8': 1, 'rgba8': 4, 'bgra8': 4}
_TO_RGB = {
    'bgr8': cv2.COLOR_BGR2RGB,
    'mono8': cv2.COLOR_GRAY2RGB,
    'rgba8': cv2.COLOR_RGBA2RGB,
    'bgra8': cv2.COLOR_BGRA2RGB,
}
_JPEG_START, _JPEG_END = b'\xff\xd8\xff', b'\xff\xd9'
_PNG_START, _PNG_END = b'\x89PNG\r\n\x1a\n', b'IEND\xaeB`\x82'


def decode_image(message: Any, *, stream: str, max_pixels: int = MAX_PIXELS) -> Rgb:
    """Return a sensor_msgs/Image as RGB.

    Padded rows are cut; the byte order flag says nothing about 8 bit channels and is not read;
    grey is repeated on three channels; alpha is dropped. The result may alias the message: do not
    write into it.

    :param stream: what error messages call the topic.
    :raises BadEncoding: for an encoding other than rgb8, bgr8, mono8, rgba8, bgra8.
    :raises BadSize: when sizes are zero, beyond the limit, or disagree with each other.
    """
    height, width, step = int(message.height), int(message.width), int(message.step)
    channels = _CHANNELS.get(message.encoding)
    if channels is None:
        raise BadEncoding(_unknown_encoding(stream, str(message.encoding)))
    _check_pixels(stream, height, width, max_pixels)
    if step < width * channels:
        raise BadSize(
            f'{stream} has step {step} for {width} pixels of {message.encoding}; a row needs '
            f'{width * channels} bytes; correct the driver'
        )
    if len(message.data) != step * height:
        raise BadSize(
            f'{stream} has {len(message.data)} bytes, height {height} times step {step} is '
            f'{step * height}; correct the driver'
        )
    rows = np.frombuffer(message.data, dtype=np.uint8).reshape(height, step)
    pixels = rows[:, : width * channels]
    if channels > 1:
        pixels = pixels.reshape(height, width, channels)
    if message.encoding == 'rgb8':
        return np.ascontiguousarray(pixels)
    return cv2.cvtColor(pixels, _TO_RGB[message.encoding])


def decode_compressed(message: Any, *, stream: str, max_pixels: int = MAX_PIXELS) -> Rgb:
    """Return a sensor_msgs/CompressedImage (JPEG or 8 bit PNG) as RGB, a new array.

    A cut-off file is refused, because OpenCV would fill the rest with grey. Orientation tags are
    ignored.

    :raises BadEncoding: for another format, or data that are not of the format named.
    :raises BadSize: when the file is cut off, or its size is zero or beyond the limit.
    """
    data = bytes(message.data)
    named = _format_named(stream, str(message.format))
    found = (
        'jpeg' if data.startswith(_JPEG_START) else 'png' if data.startswith(_PNG_START) else ''
    )
    if not found or named not in ('', found):
        raise BadEncoding(
            f'{stream} says format {message.format!r:.80}, its data begin with '
            f'{data[:8].hex() or "nothing"}; publish JPEG or PNG and name it'
        )
    whole = data.rstrip(b'\0').endswith(_JPEG_END) if found == 'jpeg' else data.endswith(_PNG_END)
    if not whole:
        raise BadSize(
            f'{stream} is a {found} file cut off after {len(data)} bytes; check the transport'
        )
    height, width = _jpeg_size(data, stream) if found == 'jpeg' else _png_size(data, stream)
    _check_pixels(stream, height, width, max_pixels)
    try:
        decoded = cv2.imdecode(
            np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        )
    except cv2.error:
        decoded = None
    if decoded is None or decoded.shape != (height, width, 3) or decoded.dtype != np.uint8:
        raise BadEncoding(
            f'{stream} is a damaged {found} file of {len(data)} bytes; check the publisher'
        )
    return cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB)


def fit_view(
    image: Rgb, height: int, width: int, *, stream: str, resize: str = 'letterbox'
) -> Rgb:
    """Return the image at the policy view's size, uint8 RGB [height, width, 3].

    :param resize: ``letterbox`` keeps the aspect and pads as the policies were trained
        (flashrt_core.policies.preprocess); ``refuse`` takes the exact size only.
    :raises BadSize: for another size when refusing, or when the view is not square.
    """
    if image.shape == (height, width, 3):
        return image
    if resize == 'refuse':
        raise BadSize(
            f'{stream} is {image.shape[1]}x{image.shape[0]}, the policy takes {width}x{height}; '
            'insert image_proc resize_node or set image_resize to letterbox'
        )
    if height != width:
        raise BadSize(
            f'{stream} cannot be letterboxed to {width}x{height}, which is not square; insert '
            'image_proc resize_node and set image_resize to refuse'
        )
    from flashrt_core.policies.preprocess import letterbox

    return letterbox(image, height)


def _check_pixels(stream: str, height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1 or height * width > max_pixels:
        raise BadSize(
            f'{stream} is {width}x{height} pixels; give 1 to {max_pixels} pixels, e.g. by '
            'image_proc resize_node'
        )


def _unknown_encoding(stream: str, encoding: str) -> str:
    lower = encoding.lower()
    if lower.startswith('bayer'):
        remedy = 'insert image_proc debayer_node'
    elif lower in ('mono16', '16uc1', '32fc1'):
        remedy = 'insert image_proc or depth_image_proc and publish mono8'
    elif lower.startswith(('yuv', 'uyvy', 'yuyv', 'nv12', 'nv21', 'nv24')):
        remedy = 'set the camera driver to rgb8, or insert its image format converter'
    elif lower.startswith('8uc'):
        remedy = 'it does not say the colour order; let the publisher name rgb8, bgr8 or mono8'
    else:
        remedy = 'set the camera driver to one of them or insert a converter node (image_proc)'
    return f'{stream} has encoding {encoding!r:.80}, decoded are {", ".join(_CHANNELS)}; {remedy}'


def _format_named(stream: str, text: str) -> str:
    lower = text.lower()
    if 'compresseddepth' not in lower:
        if 'jpeg' in lower or 'jpg' in lower:
            return 'jpeg'
        if 'png' in lower:
            return 'png'
        if not lower.strip():
            return ''
    raise BadEncoding(
        f'{stream} has format {text!r:.80}, decoded are jpeg and png; insert image_transport '
        'republish to raw or jpeg'
    )


def _png_size(data: bytes, stream: str) -> tuple[int, int]:
    if len(data) < 33 or data[12:16] != b'IHDR':
        raise BadEncoding(f'{stream} is a PNG file without a header; check the publisher')
    width, height, depth = struct.unpack('>IIB', data[16:25])
    if depth > 8:
        raise BadEncoding(
            f'{stream} is a PNG file of {depth} bits; it is not cut to 8 silently; publish 8 bit '
            'images'
        )
    return height, width


def _jpeg_size(data: bytes, stream: str) -> tuple[int, int]:
    at = 2
    while at + 9 < len(data):
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack('>HH', data[at + 5 : at + 9])
            return height, width
        if marker in (0xD9, 0xDA):
            break
        at += 2 + int.from_bytes(data[at + 2 : at + 4], 'big')
    raise BadEncoding(f'{stream} is a JPEG file without a frame header; check the publisher')
