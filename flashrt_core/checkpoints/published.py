"""Where published checkpoints lie and which terms bind them; names only, nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass

_TOKENIZER = (
    'https://storage.googleapis.com/big_vision/paligemma_tokenizer.model, the one openpi uses, or '
    'tokenizer.model of google/paligemma-3b-pt-224 on Hugging Face'
)
_LICENCE = (
    "code under Apache-2.0; the weights come from PaliGemma, so Gemma's terms of use bind them: "
    'check the licence on the model page'
)


@dataclass(frozen=True)
class Published:
    """What a family's authors publish.

    ``repositories``: on Hugging Face, as safetensors. ``converted``: elsewhere, to be converted.
    ``tokenizer``: where the file ``tokenizer.model`` comes from.
    """

    repositories: tuple[str, ...]
    converted: str
    tokenizer: str
    licence: str


PUBLISHED = {
    'pi0': Published(
        ('lerobot/pi0_base',),
        'gs://openpi-assets/checkpoints/pi0_base and its other pi0_* by openpi, converted to '
        'PyTorch by its own script',
        _TOKENIZER,
        _LICENCE,
    ),
    'pi05': Published(
        ('lerobot/pi05_base', 'lerobot/pi05_libero_finetuned'),
        'gs://openpi-assets/checkpoints/pi05_base and pi05_droid by openpi, converted to PyTorch '
        'by its own script',
        _TOKENIZER,
        _LICENCE,
    ),
}


def how_to_get(family: str) -> str:
    """Return the lines that tell a newcomer what to download for ``family``, and under what."""
    known = PUBLISHED.get(family)
    if known is None:
        return (
            f'  Weights of {family!r}: see the page of the model, and read its licence there.'
        )
    first, *more = known.repositories
    name = first.rsplit('/', 1)[-1]
    return '\n'.join([
        f'  Weights: hf download {first} --local-dir ~/models/{name}',
        f'    (Hugging Face; 7 GB in bfloat16, 14 GB in float32{"; also " if more else ""}'
        f'{", ".join(more)}),',
        f'    or {known.converted}.',
        '    A base model needs fine-tuning for your robot, and brings no statistics of it.',
        f'  Tokenizer: {known.tokenizer};',
        '    put it beside the weights as tokenizer.model, or name it with tokenizer:=PATH.',
        f'  Licence: {known.licence}.',
    ])
