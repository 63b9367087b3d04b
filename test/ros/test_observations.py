"""Tests of flashrt_ros.observations."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ObservationFuture
from flashrt_core.errors import ObservationMissing
from flashrt_core.errors import ObservationSkewed
from flashrt_core.errors import ObservationStale
from flashrt_ros.clocks import RosReading
from flashrt_ros.observations import first_error
from flashrt_ros.observations import ObservationWatch
from flashrt_ros.statistics import Counters

MS = 1_000_000
JOINTS, TOP = 'joint_states', 'images/top'
NOW = 1_000_000 * MS


def watch(**limits):
    counters = Counters()
    values = {'max_skew_s': 0.2, 'future_tolerance_s': 0.05} | limits
    return ObservationWatch(
        {JOINTS: 0.2, TOP: 0.5}, counters=counters, **values), counters


def at(now_ns=NOW):
    return RosReading(now_ns, ready=now_ns > 0, jumped_back=False)


def verdicts(subject, now=None, **stamps):
    names = {'joints': JOINTS, 'top': TOP}
    judged = subject.judge({names[key]: value for key, value in stamps.items()}, now or at())
    return {verdict.stream: verdict for verdict in judged}


def test_fresh_streams_may_be_used():
    subject, counters = watch()
    judged = subject.judge({JOINTS: NOW - 10 * MS, TOP: NOW - 90 * MS}, at())
    assert [v.verdict for v in judged] == ['ok', 'ok']
    assert [v.age_s for v in judged] == pytest.approx([0.01, 0.09])
    assert first_error(judged) is None
    assert not any(counters.snapshot().values())


def test_a_stream_that_never_sent_is_missing():
    subject, counters = watch()
    judged = subject.judge({JOINTS: NOW}, at())
    error = first_error(judged)
    assert isinstance(error, ObservationMissing) and 'images/top has sent nothing' in str(error)
    assert counters['observation_missing'] == 1


def test_a_frozen_camera_goes_stale_within_its_limit_while_others_go_on():
    subject, counters = watch(max_skew_s=60)
    frozen = NOW
    for elapsed_ms, expected in ((0, 'ok'), (490, 'ok'), (500, 'ok'), (501, 'stale')):
        now = NOW + elapsed_ms * MS
        assert verdicts(subject, at(now), joints=now, top=frozen)[TOP].verdict == expected
    error = first_error(subject.judge({JOINTS: now, TOP: frozen}, at(now)))
    assert isinstance(error, ObservationStale)
    assert '0.501 s old, the limit is 0.500 s' in str(error)
    assert counters['observation_stale'] == 2


def test_a_still_scene_with_fresh_stamps_keeps_ticking():
    subject, _ = watch()
    for frame in range(100):
        now = NOW + frame * 33 * MS
        subject.accept(TOP, now, at(now))
        assert verdicts(subject, at(now), joints=now, top=now)[TOP].ok


def test_each_stream_has_its_own_limit():
    subject, _ = watch(max_skew_s=60)
    judged = verdicts(subject, joints=NOW - 300 * MS, top=NOW - 300 * MS)
    assert judged[JOINTS].verdict == 'stale' and judged[TOP].verdict == 'ok'


def test_an_unstamped_message_is_called_that():
    subject, _ = watch()
    assert 'zero stamp' in verdicts(subject, joints=NOW, top=0)[TOP].message


def test_a_stamp_ahead_of_time_is_refused_beyond_the_tolerance():
    subject, counters = watch()
    judged = verdicts(subject, joints=NOW + 50 * MS, top=NOW + 51 * MS)
    assert judged[JOINTS].verdict == 'ok' and judged[TOP].verdict == 'future'
    assert isinstance(judged[TOP].error(), ObservationFuture)
    with pytest.raises(ObservationFuture, match='use_sim_time'):
        subject.accept(TOP, NOW + 51 * MS, at())
    assert counters['observations_future'] == 2


def test_streams_too_far_apart_are_skewed_and_the_older_one_is_named():
    subject, counters = watch()
    judged = verdicts(subject, joints=NOW, top=NOW - 201 * MS)
    assert judged[TOP].verdict == 'skewed' and judged[JOINTS].ok
    assert isinstance(judged[TOP].error(), ObservationSkewed)
    assert 'max_skew_s' in judged[TOP].message
    assert counters['observation_skewed'] == 1
    assert verdicts(subject, joints=NOW, top=NOW - 200 * MS)[TOP].ok


def test_a_future_stamp_does_not_make_the_others_look_skewed():
    subject, _ = watch()
    judged = verdicts(subject, joints=NOW, top=NOW + 10_000 * MS)
    assert judged[JOINTS].verdict == 'ok' and judged[TOP].verdict == 'future'


def test_a_message_older_than_the_last_is_dropped_and_counted():
    subject, counters = watch()
    subject.accept(JOINTS, NOW - 10 * MS, at())
    with pytest.raises(ObservationStale, match=r'0\.005 s before the one already held'):
        subject.accept(JOINTS, NOW - 15 * MS, at())
    subject.accept(TOP, NOW - 15 * MS, at())  # streams have marks of their own
    subject.accept(JOINTS, NOW - 10 * MS, at())  # an equal stamp is no step back
    assert counters['observations_out_of_order'] == 1
    assert counters['observations_accepted'] == 3


def test_a_refused_future_stamp_does_not_block_what_follows():
    subject, _ = watch()
    with pytest.raises(ObservationFuture):
        subject.accept(JOINTS, NOW * 2, at())
    subject.accept(JOINTS, NOW, at())


def test_after_a_jump_back_and_a_clear_old_stamps_are_new_ones():
    subject, _ = watch()
    subject.accept(JOINTS, NOW, at())
    subject.clear()
    subject.accept(JOINTS, NOW - 900 * MS, at(NOW - 890 * MS))


def test_zero_simulated_time_makes_everything_not_ready():
    subject, counters = watch()
    judged = subject.judge({JOINTS: 0, TOP: NOW}, at(0))
    assert [v.verdict for v in judged] == ['missing', 'missing']
    assert 'start the publisher of /clock' in judged[0].message
    with pytest.raises(ObservationMissing, match='simulated time is zero'):
        subject.accept(JOINTS, 0, at(0))
    assert counters['clock_not_ready'] == 3


@given(
    st.dictionaries(st.sampled_from([JOINTS, TOP]), st.none() | st.integers(0, 3000)),
    st.integers(0, 3000))
def test_a_tick_never_runs_on_what_is_too_old_too_new_or_too_far_apart(stamps, now):
    subject, _ = watch()
    stamps = {name: stamp if stamp is None else stamp * MS for name, stamp in stamps.items()}
    now *= MS
    judged = subject.judge(stamps, at(now))
    assert [v.stream for v in judged] == [JOINTS, TOP]
    for v in judged:
        assert v.ok == (v.message == '')
        assert v.ok or v.stream in v.message
    if first_error(judged) is None:
        assert now > 0 and None not in stamps.values() and len(stamps) == 2
        assert all(-50 * MS <= now - stamp for stamp in stamps.values())
        assert now - stamps[JOINTS] <= 200 * MS and now - stamps[TOP] <= 500 * MS
        assert max(stamps.values()) - min(stamps.values()) <= 200 * MS


@pytest.mark.parametrize('limits', [
    {'max_skew_s': 0.0}, {'future_tolerance_s': -0.1}, {'max_skew_s': float('nan')}])
def test_limits_out_of_range_are_refused(limits):
    with pytest.raises(ConfigError):
        watch(**limits)


def test_an_age_limit_out_of_range_names_its_stream():
    with pytest.raises(ConfigError, match='max age of images/top is 0'):
        ObservationWatch(
            {TOP: 0.0}, max_skew_s=1, future_tolerance_s=0, counters=Counters())
