"""Guidance at run time, frames named to the policy, and what diagnostics tell of the ticks."""

import json
from pathlib import Path

from _executor_rig import Rig
from _executor_rig import rig
from _fake_policy import FakeConfig
from _fake_policy import FakePolicy
from _fake_policy import SPREAD
from _ros_fixtures import wait_until
import numpy as np
import pytest
from rclpy.parameter import Parameter

from flashrt_ros.conversions import digest
from flashrt_ros.executor_observation import image_stream
from flashrt_ros.executor_observation import Observation
from flashrt_ros.executor_observation import Sample

pytestmark = pytest.mark.ros


def set_parameter(r: Rig, name: str, value: object) -> tuple[bool, str]:
    (reply,) = r.executor.set_parameters([Parameter(name, value=value)])
    return reply.successful, reply.reason


def told(r: Rig) -> dict[str, str]:
    return dict(r.executor.report.sections()['ticks'].values)


def test_guidance_changes_at_run_time_by_one_tick_and_a_reset_hands_it_on(tmp_path: Path) -> None:
    policy = FakePolicy(FakeConfig(guidance=True))
    with rig(tmp_path, policy, guidance=1.5) as r:
        r.run()
        given = policy.switches.inputs
        assert given[0].guidance == 1.5
        assert json.loads(r.until_event('reset').detail)['guidance'] == 1.5
        wait_until(lambda: given[-1].guidance is None, 'a tick that keeps it')
        assert set_parameter(r, 'guidance', 3.0) == (True, '')
        wait_until(lambda: 3.0 in [t.guidance for t in given], 'a tick that takes it over')
        wait_until(lambda: given[-1].guidance is None, 'a tick that keeps it')
        assert [t.guidance for t in given if t.guidance is not None] == [1.5, 3.0]
        assert json.loads(r.until_event('parameter', 'guidance').detail) == {
            'old': 1.5, 'new': 3.0}
        before = len(given)
        r.reset()
        wait_until(lambda: len(given) > before + 1, 'ticks after the reset')
        assert 3.0 in [t.guidance for t in given[before:]]


def test_guidance_is_refused_where_the_policy_has_none(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        taken, reason = set_parameter(r, 'guidance', 2.0)
        assert not taken and 'guidance is 2' in reason and 'guidance: true' in reason
        assert not set_parameter(r, 'guidance', -1.0)[0]
        assert {t.guidance for t in r.policy.switches.inputs} == {None}


def test_a_configure_with_guidance_for_a_policy_without_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path, guidance=2.0, activate=False) as r:
        assert r.executor.state_label == 'unconfigured'
        assert 'guidance is 2' in r.executor.last_transition_error


def test_a_frame_that_did_not_change_is_named_the_same_and_counted_by_view(tmp_path: Path) -> None:
    with rig(tmp_path, max_image_age_s=60.0, max_skew_s=60.0) as r:
        r.run()
        given = r.policy.switches.inputs
        wait_until(lambda: len(given) > 2, 'ticks')
        for t in given[:2]:
            assert set(t.frames) == {'top', 'wrist'}
            assert t.frames['top'].digest == digest(t.images['top'])
        assert int(told(r)['vision_reused_top']) == 0
        assert r.arm is not None
        r.arm.frozen = {'images/top'}
        wait_until(lambda: int(told(r)['vision_reused_top']) > 2, 'a frame to be reused')
        assert int(told(r)['vision_reused_wrist']) == 0
        assert set_parameter(r, 'reuse_vision', False) == (True, '')
        before = len(given)
        wait_until(lambda: len(given) > before + 3, 'ticks without reuse')
        assert given[-1].frames == {}
        count = told(r)['vision_reused_top']
        wait_until(lambda: len(given) > before + 6, 'more of them')
        assert told(r)['vision_reused_top'] == count


def test_diagnostics_tell_the_seed_of_the_ticks_and_the_spread_of_their_candidates(
    tmp_path: Path
) -> None:
    with rig(tmp_path) as r:
        r.reset(set_seed=True, seed=17)
        r.until_phase('ticking')
        wait_until(lambda: told(r)['seed'] == '17', 'the seed')
        assert told(r)['best_of'] == '1' and 'best_of_spread' not in told(r)
        assert set_parameter(r, 'best_of', 2) == (True, '')
        wait_until(lambda: told(r)['best_of'] == '2', 'a tick that chooses')
        values = told(r)
        assert values['best_of_selected'] == '1'
        assert {values[f'best_of_spread{end}'] for end in ('', '_p50', '_p99')} == {str(SPREAD)}


def test_a_sample_is_digested_once_and_only_when_asked() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    sample = Sample(5, 6, array)
    observation = Observation({image_stream('top'): sample})
    assert observation.frames(('top', 'wrist')) == {'top': sample}
    assert 'digest' not in vars(sample)
    assert observation.digests() == {'images/top': digest(array)}
    array[0] = 9  # never done to a sample; it shows that the digest is kept
    assert sample.digest != digest(array)
