"""Every Triton kernel compiles for every board without a GPU, and equals its reference."""
from __future__ import annotations

import importlib
import os
from pathlib import Path
import pkgutil
import subprocess
import sys

import pytest

import flashrt_core.kernels
from flashrt_core.kernels import _triton

SHARED_LIMIT = {87: 163 << 10, 90: 227 << 10, 110: 227 << 10, 121: 99 << 10}  # bytes per block
DIRECTORY = Path(flashrt_core.kernels.__path__[0])


def triton_from(*version: int):
    triton = pytest.importorskip('triton')
    held = tuple(int(part) for part in triton.__version__.split('.')[:2])
    if held < version:
        pytest.skip(f'Triton {triton.__version__} is older than {version}')
    return triton


def kernel_modules() -> list[str]:
    return [name for _, name, _ in pkgutil.iter_modules([str(DIRECTORY)])
            if not name.startswith('_') and name != 'registry']


def variants() -> list[tuple[_triton.Variant, int]]:
    found = []
    for name in kernel_modules():
        module = importlib.import_module(f'flashrt_core.kernels.{name}')
        found += [(variant, arch) for variant in module.VARIANTS for arch in SHARED_LIMIT
                  if arch in variant.archs]
    return found


def chosen(stress: float) -> list[tuple[_triton.Variant, int]]:
    """Every variant for its board of least shared memory, every kernel for every board it has;
    in the full stress run every variant for every board.
    """
    every, seen, found = variants(), set(), []
    for variant, arch in every:
        boards = [other for held, other in every if held is variant]
        key = variant.kernel.name, arch
        if stress >= 1 or arch == min(boards, key=SHARED_LIMIT.__getitem__) or key not in seen:
            found.append((variant, arch))
        seen.add(key)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if 'variant' in metafunc.fixturenames:
        metafunc.parametrize('variant, arch', chosen(metafunc.config.getoption('--stress')),
                             ids=label)


def label(value: object) -> str:
    if isinstance(value, _triton.Variant):
        return f'{value.kernel.fn.__name__}-{"-".join(map(str, value.constants.values()))}'
    return f'sm_{value}'


def test_every_kernel_file_declares_variants_of_every_kernel():
    declared = {variant.kernel.name for variant, _ in variants()}
    assert declared == {kernel.name for kernel in _triton.lazy_kernels}


def test_no_kernel_escapes_the_registry():
    for path in DIRECTORY.parent.rglob('*.py'):
        text = path.read_text()
        if path.name != '_triton.py':
            assert 'triton.jit' not in text, f'{path.name} uses triton.jit; use lazy_jit'
        if 'lazy_jit' in text:
            assert path.parent == DIRECTORY, f'{path} holds a kernel outside kernels/'


def test_a_short_run_leaves_out_no_kernel_no_variant_and_no_board():
    every, some = variants(), chosen(0.1)
    assert len(some) < len(every) == len(chosen(1))
    assert {id(v) for v, _ in some} == {id(v) for v, _ in every}
    assert ({(v.kernel.name, arch) for v, arch in some}
            == {(v.kernel.name, arch) for v, arch in every})


def test_it_compiles_to_a_cubin_within_shared_memory(variant, arch, tmp_path, monkeypatch):
    # The assembler of Triton 3.6 and older does not know sm_110a.
    triton = triton_from(3, 7) if arch == 110 else triton_from(3, 6)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    monkeypatch.setenv('TRITON_DISABLE_LINE_INFO', '1')  # the same code in less time
    names = variant.kernel.jit.arg_names
    # As launched: tensors begin at multiples of 16 bytes, so loads are pipelined through shared
    # memory. Without this a kernel seems to need next to none.
    aligned = {(names.index(name),): [['tt.divisibility', 16]]
               for name, kind in variant.signature.items() if kind.startswith('*')}
    source = ASTSource(variant.kernel.jit, signature=dict(variant.signature),
                       constexprs=dict(variant.constants), attrs=aligned)
    options = {'num_warps': variant.num_warps, 'num_stages': variant.num_stages}
    built = triton.compile(source, target=GPUTarget('cuda', arch, 32),
                           options=options | dict(variant.options))
    assert len(built.asm['cubin']) > 0
    assert built.metadata.shared <= SHARED_LIMIT[arch]


def test_copies_are_compiled_to_16_byte_accesses(tmp_path, monkeypatch):
    triton = pytest.importorskip('triton')
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashrt_core.kernels.copy import CHUNK
    from flashrt_core.kernels.copy import VARIANTS
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    variant = VARIANTS[0]
    source = ASTSource(variant.kernel.jit, signature=dict(variant.signature),
                       constexprs=dict(variant.constants))
    text = triton.compile(source, target=GPUTarget('cuda', 90, 32),
                          options={'num_warps': variant.num_warps}).asm['ptx']
    accesses = CHUNK // (16 * 32 * variant.num_warps)
    assert text.count('ld.global.v2.b64') >= accesses
    assert text.count('st.global.v2.b64') >= accesses


def test_kernels_equal_their_references_in_tritons_interpreter():
    triton_from(3, 7)  # older interpreters fail on numpy >= 2.4
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name('_interpret_kernels.py'))],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {'PYTHONPATH': str(DIRECTORY.parents[1])})
    assert child.returncode == 0, child.stderr
    assert child.stdout.count('passed') == 3


def test_importing_the_package_does_not_import_triton():
    code = ('import sys, flashrt_core.runtime, flashrt_core.kernels.copy, '
            'flashrt_core.kernels.digest, flashrt_core.kernels.philox; '
            'print("triton" in sys.modules)')
    child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                           timeout=120, check=True,
                           env=os.environ | {'PYTHONPATH': str(DIRECTORY.parents[1])})
    assert child.stdout.strip() == 'False'
