"""The log of a boot: stages in order with their times, a long one as it goes on."""

from typing import Any
from unittest import mock

import pytest
import torch

from flashrt_core.kernels import _triton
from flashrt_ros.boot_log import BootLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_stage_is_told_when_it_ends_and_all_of_them_at_the_end() -> None:
    clock, lines = Clock(), []
    boot = BootLog(lines.append, clock)
    clock.now += 0.5
    for stage, takes in (('loading', 3.0), ('capturing', 1.5)):
        boot.told(stage, 0.0)
        clock.now += takes
        boot.told(stage, 1.0)
    assert boot.ended() == 'loading 3.0 s, capturing 1.5 s, the rest 0.5 s'
    assert lines == ['loading took 3.0 s', 'capturing took 1.5 s']


def test_a_long_stage_is_told_as_it_goes_on_but_not_at_every_word() -> None:
    clock, lines = Clock(), []
    boot = BootLog(lines.append, clock)
    for done in range(0, 101, 10):
        boot.told('loading', done / 100)
        clock.now += 1.2
    assert lines == ['loading: 50% after 6 s', 'loading: 100% after 12 s']


def test_the_self_check_of_kernels_is_told_with_what_was_not_taken(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: dict[tuple[str, str], float] = {('old', 'cuda:0'): 9.0}
    choices: dict[tuple[str, str], str] = {}
    monkeypatch.setattr(_triton, '_check_s', seconds)
    monkeypatch.setattr(_triton, '_choices', choices)
    monkeypatch.setenv('TRITON_CACHE_DIR', 'kept')
    boot = BootLog(lambda line: None, Clock())
    assert 'kernels' not in boot.ended()
    for name, choice in (('rows', 'triton'), ('gelu', 'torch: the check gave other bits')):
        seconds[name, 'cuda:0'], choices[name, 'cuda:0'] = 2.0, choice
    told = boot.ended()
    assert 'self-check of 2 kernels, 4.0 s' in told and 'kept in kept' in told
    assert 'not used: gelu on cuda:0 (torch: the check gave other bits)' in told


def test_a_long_compilation_is_told_as_kernels_pass_and_not_once_the_boot_is_over(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, '_check_s', {})
    monkeypatch.setattr(_triton, '_choices', {})
    clock, lines = Clock(), []
    boot = BootLog(lines.append, clock)
    device = mock.Mock(type='cuda', __str__=lambda self: 'cuda:0')
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)

    def passes() -> bool:
        clock.now += 4.0
        return True

    boot.told('capturing', 0.0)
    for name in ('rows', 'gelu', 'norm'):
        assert _triton.triton_selected(name, device, passes)
    assert lines == ['capturing: 2 kernels compiled and checked, gelu the last, after 8 s']
    boot.ended()
    clock.now += 60.0
    assert _triton.triton_selected('late', device, passes)
    assert not any('late' in line for line in lines)


def test_kernels_are_kept_where_triton_keeps_them(monkeypatch: Any) -> None:
    monkeypatch.delenv('TRITON_CACHE_DIR', raising=False)
    monkeypatch.setenv('TRITON_HOME', 'somewhere')
    assert str(_triton.kernel_cache()) == 'somewhere/.triton/cache'
    monkeypatch.delenv('TRITON_HOME')
    monkeypatch.setenv('HOME', 'me')
    assert str(_triton.kernel_cache()) == 'me/.triton/cache'
