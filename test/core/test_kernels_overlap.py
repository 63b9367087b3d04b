"""Kernels that start before the one before has ended wait for it, on every path, then write.

Programmatic dependent launch, see kernels/_launch.py: what a missing wait does shows on a GPU
only, and there not always. Here it is read from the source.
"""
from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
import pkgutil
import textwrap

import pytest

import flashrt_core.kernels
from flashrt_core.kernels import _triton

DIRECTORY = Path(flashrt_core.kernels.__path__[0])
MODULES = [name for _, name, _ in pkgutil.iter_modules([str(DIRECTORY)])]
for module in MODULES:
    importlib.import_module(f'flashrt_core.kernels.{module}')
OVERLAPPING = [kernel.fn for kernel in _triton.lazy_kernels
               if 'PDL' in inspect.signature(kernel.fn).parameters]


def called(node: ast.AST, name: str) -> bool:
    """Say whether ``node`` is a call of tl.<name>, or contains one."""
    return any(isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
               and part.func.attr == name for part in ast.walk(node))


def waits(body: list[ast.stmt]) -> bool:
    """Say whether every path through ``body`` waits when PDL is on.

    :raises AssertionError: something is written, or a path ends, before it has waited.
    """
    for statement in body:
        if isinstance(statement, ast.Expr) and 'griddepcontrol.wait;' in ast.unparse(statement):
            return True
        if isinstance(statement, ast.If):
            always = ast.unparse(statement.test) == 'PDL'
            taken, other = waits(statement.body), waits(statement.orelse)
            if taken and (always or other):
                return True
            continue
        ends = any(isinstance(part, ast.Return) for part in ast.walk(statement))
        writes = any(called(statement, name) for name in ('store', 'debug_barrier'))
        writes |= any(isinstance(part, ast.Attribute) and part.attr.startswith('atomic')
                      for part in ast.walk(statement))
        assert not ends and not writes, f'before the wait: {ast.unparse(statement)}'
    return False


def body_of(source: str) -> list[ast.stmt]:
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    return function.body


@pytest.mark.parametrize('fn', OVERLAPPING, ids=lambda fn: fn.__name__)
def test_it_waits_on_every_path_before_it_writes(fn):
    assert waits(body_of(inspect.getsource(fn)))


WAIT = "if PDL: tl.inline_asm_elementwise('griddepcontrol.wait; // $0')"


@pytest.mark.parametrize('lines', [
    ["if PDL: tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0')"],
    ['if AHEAD > 0:', f'    {WAIT}'],
    ['if own: tl.store(x, 1)', WAIT],
    ['if first >= n: return', WAIT],
    ['tl.atomic_add(x, 1)', WAIT],
    ['for i in range(n):', f'    {WAIT}'],
], ids=['none', 'in one branch', 'store', 'return', 'atomic', 'in a loop'])
def test_a_kernel_that_does_not_is_found(lines):
    source = '\n    '.join(['def kernel(x, PDL):', *lines, 'tl.store(x, 2)'])
    with pytest.raises(AssertionError, match='before the wait'):
        waits(body_of(source))


def launches() -> list[ast.Call]:
    return [node for name in MODULES for node in ast.walk(ast.parse(
        (DIRECTORY / f'{name}.py').read_text())) if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)]


def test_a_kernel_is_told_whenever_it_is_launched_early():
    found = set()
    for call in launches():
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get('launch_pdl') == given.get('PDL'), ast.unparse(call)
        if 'PDL' in given:
            found.add(ast.unparse(call.func.value))
    assert found == {fn.__name__ for fn in OVERLAPPING}
