"""Tests of flashrt_ros.images with real messages."""

from array import array
import struct
import zlib

import cv2
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from flashrt_core.errors import BadEncoding
from flashrt_core.errors import BadSize
from flashrt_core.errors import FlashrtError
from flashrt_ros.images import decode_compressed
from flashrt_ros.images import decode_image
from flashrt_ros.images import fit_view

messages = pytest.importorskip('sensor_msgs.msg')
STREAM = 'images/top'
RGB = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
SMOOTH = np.full((32, 48, 3), 60, dtype=np.uint8)
SMOOTH[:, :, 0] = np.linspace(0, 255, 32)[:, None]
SMOOTH[:, :, 1] = np.linspace(0, 255, 48)


def image(pixels, encoding, *, padding=0, **fields):
    rows = pixels.reshape(len(pixels), -1)
    padded = np.full((len(rows), rows.shape[1] + padding), 0xAA, dtype=np.uint8)
    padded[:, : rows.shape[1]] = rows
    message = messages.Image(
        height=pixels.shape[0], width=pixels.shape[1], encoding=encoding, step=padded.shape[1],
        data=array('B', padded.tobytes()))
    for field, value in fields.items():
        setattr(message, field, value)
    return message


def with_alpha(pixels):
    return np.dstack([pixels, np.full(pixels.shape[:2], 77, dtype=np.uint8)])


ENCODED = {
    'rgb8': RGB,
    'bgr8': RGB[:, :, ::-1],
    'rgba8': with_alpha(RGB),
    'bgra8': with_alpha(RGB[:, :, ::-1]),
}


@pytest.mark.parametrize('padding', [0, 1, 13])
@pytest.mark.parametrize('big_endian', [0, 1])
@pytest.mark.parametrize('encoding', ENCODED)
def test_every_colour_order_gives_the_same_rgb_whatever_the_padding(encoding, padding, big_endian):
    message = image(
        np.ascontiguousarray(ENCODED[encoding]), encoding, padding=padding,
        is_bigendian=big_endian)
    decoded = decode_image(message, stream=STREAM)
    assert decoded.dtype == np.uint8 and decoded.flags['C_CONTIGUOUS']
    assert np.array_equal(decoded, RGB)


@pytest.mark.parametrize('padding', [0, 3])
def test_grey_is_repeated_on_three_channels(padding):
    grey = RGB[:, :, 0].copy()
    decoded = decode_image(image(grey, 'mono8', padding=padding), stream=STREAM)
    assert np.array_equal(decoded, np.repeat(grey[:, :, None], 3, axis=2))


def test_one_pixel_is_an_image():
    decoded = decode_image(image(RGB[:1, :1].copy(), 'bgr8'), stream=STREAM)
    assert decoded.tolist() == RGB[:1, :1, ::-1].tolist()


@pytest.mark.parametrize(('encoding', 'remedy'), [
    ('bayer_rggb8', 'debayer_node'),
    ('16UC1', 'depth_image_proc'),
    ('mono16', 'depth_image_proc'),
    ('yuv422_yuy2', 'set the camera driver to rgb8'),
    ('nv12', 'set the camera driver to rgb8'),
    ('8UC3', 'does not say the colour order'),
    ('RGB8', 'set the camera driver'),
    ('', 'set the camera driver'),
])
def test_another_encoding_is_refused_with_the_node_to_insert(encoding, remedy):
    with pytest.raises(BadEncoding, match=remedy) as refusal:
        decode_image(image(RGB, encoding), stream=STREAM)
    assert STREAM in str(refusal.value) and repr(encoding) in str(refusal.value)


@pytest.mark.parametrize(('fields', 'message'), [
    ({'height': 8}, '105 bytes, height 8 times step 15'),
    ({'height': 6}, '105 bytes, height 6 times step 15'),
    ({'step': 14}, 'step 14 for 5 pixels of rgb8; a row needs 15'),
    ({'step': 0}, 'a row needs 15'),
    ({'width': 6}, 'a row needs 18'),
    ({'height': 0}, '5x0 pixels'),
    ({'width': 0}, '0x7 pixels'),
    ({'height': 2**32 - 1, 'width': 2**32 - 1}, 'give 1 to'),
    ({'data': array('B')}, '0 bytes'),
    ({'data': array('B', bytes(104))}, '104 bytes'),
])
def test_sizes_that_lie_are_refused(fields, message):
    with pytest.raises(BadSize, match=message):
        decode_image(image(RGB, 'rgb8', **fields), stream=STREAM)


def test_the_limit_of_pixels_is_the_callers():
    with pytest.raises(BadSize, match='give 1 to 34 pixels'):
        decode_image(image(RGB, 'rgb8'), stream=STREAM, max_pixels=34)
    assert decode_image(image(RGB, 'rgb8'), stream=STREAM, max_pixels=35).shape == (7, 5, 3)


@settings(max_examples=200)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40), st.integers(0, 400),
       st.sampled_from([*ENCODED, 'mono8', 'yuv422']))
def test_any_numbers_give_an_image_or_a_named_refusal(height, width, step, size, encoding):
    message = messages.Image(
        height=height, width=width, step=step, encoding=encoding, data=array('B', bytes(size)))
    try:
        assert decode_image(message, stream=STREAM).shape == (height, width, 3)
    except (BadSize, BadEncoding) as refusal:
        assert STREAM in str(refusal) and ';' in str(refusal)


def compressed(pixels, extension, text):
    ok, data = cv2.imencode(extension, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
    assert ok
    return messages.CompressedImage(format=text, data=array('B', data.tobytes()))


@pytest.mark.parametrize('text', ['png', 'rgb8; png compressed bgr8', ''])
def test_a_png_is_decoded_exactly(text):
    assert np.array_equal(decode_compressed(compressed(RGB, '.png', text), stream=STREAM), RGB)


@pytest.mark.parametrize('text', ['jpeg', 'jpg', 'bgr8; jpeg compressed bgr8', ''])
def test_a_jpeg_keeps_its_colours(text):
    decoded = decode_compressed(compressed(SMOOTH, '.jpg', text), stream=STREAM)
    assert decoded.shape == SMOOTH.shape
    assert np.abs(decoded.astype(int) - SMOOTH).mean() < 4


def test_a_grey_jpeg_has_three_channels():
    _, data = cv2.imencode('.jpg', SMOOTH[:, :, 0])
    message = messages.CompressedImage(format='jpeg', data=array('B', data.tobytes()))
    decoded = decode_compressed(message, stream=STREAM)
    assert decoded.shape == SMOOTH.shape
    assert np.array_equal(decoded[:, :, 0], decoded[:, :, 2])


@pytest.mark.parametrize('extension', ['.png', '.jpg'])
@pytest.mark.parametrize('keep', [0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused_and_never_filled_with_grey(extension, keep):
    message = compressed(SMOOTH, extension, '')
    message.data = message.data[: int(len(message.data) * keep)]
    with pytest.raises(BadSize, match='cut off'):
        decode_compressed(message, stream=STREAM)


def test_padding_behind_a_jpeg_is_accepted():
    message = compressed(SMOOTH, '.jpg', 'jpeg')
    message.data = array('B', bytes(message.data) + bytes(64))
    assert decode_compressed(message, stream=STREAM).shape == SMOOTH.shape


@pytest.mark.parametrize('text', ['h264', 'compressedDepth png', '16UC1; compressedDepth', 'tiff'])
def test_another_format_is_refused_with_the_node_to_insert(text):
    with pytest.raises(BadEncoding, match='image_transport republish'):
        decode_compressed(compressed(RGB, '.png', text), stream=STREAM)


def test_data_of_another_format_than_named_are_refused():
    with pytest.raises(BadEncoding, match='its data begin with 89504e47'):
        decode_compressed(compressed(RGB, '.png', 'jpeg'), stream=STREAM)


def test_an_empty_message_is_refused():
    with pytest.raises(BadEncoding, match='begin with nothing'):
        decode_compressed(messages.CompressedImage(format='png'), stream=STREAM)


def png_header(width, height, depth=8):
    body = b'IHDR' + struct.pack('>IIBBBBB', width, height, depth, 2, 0, 0, 0)
    header = struct.pack('>I', 13) + body + struct.pack('>I', zlib.crc32(body))
    return b'\x89PNG\r\n\x1a\n' + header + b'\0\0\0\0IEND\xaeB`\x82'


def test_a_small_file_that_claims_a_huge_image_is_refused_before_decoding(monkeypatch):
    monkeypatch.setattr(cv2, 'imdecode', lambda *_: pytest.fail('it was decoded'))
    message = messages.CompressedImage(format='png', data=array('B', png_header(60000, 60000)))
    with pytest.raises(BadSize, match='60000x60000'):
        decode_compressed(message, stream=STREAM)


def test_sixteen_bits_are_not_cut_to_eight():
    _, data = cv2.imencode('.png', SMOOTH.astype(np.uint16) * 257)
    message = messages.CompressedImage(format='png', data=array('B', data.tobytes()))
    with pytest.raises(BadEncoding, match='16 bits'):
        decode_compressed(message, stream=STREAM)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(['.png', '.jpg']), st.data())
def test_damaged_files_give_an_image_or_a_named_refusal(extension, data):
    message = compressed(RGB, extension, '')
    content = bytearray(message.data)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    message.data = array('B', bytes(content))
    try:
        decoded = decode_compressed(message, stream=STREAM)
        assert decoded.dtype == np.uint8 and decoded.shape[2] == 3
    except FlashrtError as refusal:
        assert STREAM in str(refusal)


def test_an_image_of_the_views_size_is_not_touched():
    assert fit_view(RGB, 7, 5, stream=STREAM, resize='refuse') is RGB


def test_another_size_is_refused_where_the_parameter_says_so():
    with pytest.raises(BadSize, match='is 5x7, the policy takes 32x32'):
        fit_view(RGB, 32, 32, stream=STREAM, resize='refuse')


def test_another_size_is_letterboxed_as_the_policies_were_trained():
    preprocess = pytest.importorskip('flashrt_core.policies.preprocess')
    fitted = fit_view(SMOOTH, 48, 48, stream=STREAM)
    assert fitted.shape == (48, 48, 3) and fitted.dtype == np.uint8
    assert np.array_equal(fitted, preprocess.letterbox(SMOOTH, 48))
    assert not fitted[:7].any() and not fitted[-7:].any()
    assert np.array_equal(fitted[8:40], SMOOTH)


def test_a_view_that_is_not_square_takes_its_exact_size_only():
    assert fit_view(RGB, 7, 5, stream=STREAM) is RGB
    with pytest.raises(BadSize, match='to 6x7, which is not square'):
        fit_view(RGB, 7, 6, stream=STREAM)
