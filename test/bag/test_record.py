"""Tests of flashrt_ros.bag over real DDS: a live executor is recorded, then replayed."""

from pathlib import Path

from _executor_rig import rig
from _fake_policy import FakePolicy
from _planner_rig import FIRST
from _planner_rig import planner_rig
from _planner_rig import SECOND
from _planner_rig import TWO
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
import pytest
from rclpy.serialization import serialize_message
from rosbags import rosbag2
from rosbags.typesys import get_types_from_msg
from rosbags.typesys import get_typestore
from rosbags.typesys import Stores

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.runtime import cpu_backend
from flashrt_ros.bag.message_types import reading_typestore
from flashrt_ros.bag.message_types import RECORDED
from flashrt_ros.bag.message_types import writing_typestore
from flashrt_ros.bag.record import Recorder
from flashrt_ros.bag.recording import Recording
from flashrt_ros.bag.replay import Replayer
from flashrt_ros.bag.writer import BagWriter
from flashrt_ros.embodiment import load_embodiment
from flashrt_ros.main import EXIT_CONFIG
from flashrt_ros.main import StopRequest
from flashrt_ros.msg import CapsuleInfo
from flashrt_ros.msg import Heartbeat
from flashrt_ros.msg import Subgoal
from flashrt_ros.msg import SubgoalOutcome

pytestmark = [pytest.mark.bag, pytest.mark.ros]
MESSAGES = Path(__file__).parents[2] / 'msg'


def test_types_made_from_the_installed_classes_are_those_of_the_message_files():
    ours, theirs = writing_typestore(), get_typestore(Stores.ROS2_JAZZY)
    for name in ('ObservationStamp', *RECORDED):
        kind = f'flashrt_ros/msg/{name}'
        theirs.register(get_types_from_msg((MESSAGES / f'{name}.msg').read_text(), kind))
        assert ours.hash_rihs01(kind) == theirs.hash_rihs01(kind)


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
def test_a_live_run_with_resets_subgoals_and_a_rollback_is_replayed_bit_for_bit(tmp_path, storage):
    policy = FakePolicy()
    with rig(tmp_path, policy, namespace='arm1') as running:
        recorder = running.graph.spin(Recorder(
            tmp_path / 'run', executor='/arm1/executor', storage=storage,
            context=running.graph.context))
        wait_until(lambda: recorder.ready, 'the recorder to have found the executor')
        wait_until(lambda: len(recorder.counts) >= 8, f'all streams; now {recorder.counts}')
        running.reset(set_seed=True, seed=3)
        running.until_phase('ticking')
        ticked(running, 4)
        reply = running.call('set_subgoal', subgoal=Subgoal(tokens=[4, 5], episode=0))
        assert reply.success, reply.message
        ticked(running, 3)
        assert running.call('snapshot', id='here').success
        ticked(running, 2)
        assert running.call('rollback', boundaries=2).success
        running.until_phase('ticking')
        ticked(running, 3)
        assert running.call('restore', id='here').success
        running.until_phase('ticking')
        ticked(running, 2)
        running.reset()
        running.until_phase('ticking')
        ticked(running, 2)
        assert running.call('hold', cause='the end', latch=True).success
        published = len(running.tick_inputs)
        topic = '/arm1/executor/tick_input'
        wait_until(lambda: recorder.counts[topic] >= published, 'the last tick to be recorded')
        recorder.close()
    recording = Recording(tmp_path / 'run')
    assert recording.parameters['policy'] == 'fake'
    report = replayed(recording, tmp_path)
    assert report.gaps == [] and report.different == [] and report.exact
    assert report.equal == len(list(recording.ticks)) >= published


def test_the_planners_messages_are_recorded_too(tmp_path):
    with planner_rig(tmp_path, link='topic') as (planner, robot):
        recorder = robot.graph.spin(Recorder(
            tmp_path / 'run', storage='sqlite3', context=robot.graph.context))
        wait_until(lambda: recorder.ready, 'the recorder to have found the executor')
        topics = {'/planner/status', '/planner/events', '/subgoal', '/subgoal_outcome'}
        wait_until(lambda: topics <= set(recorder.counts), f'{topics}; now {recorder.counts}')
        robot.reset()
        goal = planner.goal(wait=True).until('execute')
        planner.outcome(1)
        wait_until(lambda: robot.executor.engine.slot.requested == 2, 'the second subgoal')
        planner.outcome(2)
        assert goal.result().success
        assert planner.call('snapshot', id='here').success
        wait_until(lambda: recorder.counts['/planner/events'] > 1
                   and recorder.counts['/subgoal_outcome'] == 2
                   and recorder.counts['/subgoal'] == 2, f'all; now {recorder.counts}')
        recorder.close()
    said: dict[str, list] = {topic: [] for topic in topics}
    with rosbag2.Reader(tmp_path / 'run') as reader:
        store = reading_typestore(reader.connections)
        for connection, _, data in reader.messages():
            if connection.topic in said:
                said[connection.topic].append(store.deserialize_cdr(data, connection.msgtype))
    assert [m.text for m in said['/subgoal']] == [FIRST, SECOND]
    assert [(m.sequence, m.outcome) for m in said['/subgoal_outcome']] == [(1, 0), (2, 0)]
    assert TWO in {m.instruction for m in said['/planner/status']}
    assert {m.kind for m in said['/planner/events']} >= {'plan', 'snapshot'}
    assert Recording(tmp_path / 'run').executor == '/executor'


def replayed(recording, folder):
    backend = cpu_backend()
    session = FakePolicy().bind(backend, '')
    store = CapsuleStore(backend, 1 << 24, 1 << 24)
    try:
        return Replayer(
            recording, session, store, load_embodiment(folder / 'rig.yaml'),
            resize='refuse').run()
    finally:
        session.close()
        store.close()


def ticked(running, more):
    """Wait until more ticks were published."""
    before = len(running.tick_inputs)
    wait_until(lambda: len(running.tick_inputs) >= before + more, f'{more} more ticks')


@pytest.mark.parametrize(('options', 'message'), [
    ({'storage': 'zip'}, "storage is 'zip'"),
    ({'executor': 'executor'}, 'give its full name'),
    ({'planner': 'planner'}, "planner is 'planner'"),
    ({'executor': '/my executor'}, "executor is '/my executor'; give its full name"),
    ({'planner': '/2nd/planner'}, "planner is '/2nd/planner'"),
])
def test_a_recorder_with_a_mistake_is_refused(tmp_path, options, message):
    with ros_graph() as graph, pytest.raises(ConfigError, match=message):
        Recorder(tmp_path / 'run', context=graph.context, **options)
    assert not (tmp_path / 'run').exists()  # so that the corrected command finds room


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    with ros_graph() as graph, pytest.raises(ConfigError, match='does not exist'):
        Recorder(tmp_path, context=graph.context)


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
def test_a_disk_that_refuses_is_told_at_close_and_what_was_written_is_kept(
    tmp_path, storage, monkeypatch
):
    genuine = rosbag2.Writer.write

    def write(self, connection, timestamp, data):
        if timestamp == 6:
            raise OSError('No space left on device')
        genuine(self, connection, timestamp, data)

    monkeypatch.setattr(rosbag2.Writer, 'write', write)
    writer = BagWriter(tmp_path / 'run', storage)
    kind, data = 'flashrt_ros/msg/Heartbeat', serialize_message(Heartbeat(tick=7))
    writer.write('/beat', kind, 5, data)
    writer.write('/beat', kind, 6, data)
    with pytest.raises(ConfigError, match='No space left'):
        writer.close()
    writer.close()
    writer.write('/beat', kind, 7, data)
    with rosbag2.Reader(tmp_path / 'run') as reader:
        assert [stamp for _, stamp, _ in reader.messages()] == [5]


def test_a_disk_that_refuses_ends_the_recorder_with_an_error(tmp_path, monkeypatch):
    def write(self, connection, timestamp, data):
        raise OSError('No space left on device')

    monkeypatch.setattr(rosbag2.Writer, 'write', write)
    stop = StopRequest()
    with ros_graph() as graph:
        recorder = graph.spin(Recorder(tmp_path / 'run', request=stop, context=graph.context))
        talker = graph.node('talker')
        publisher = talker.create_publisher(SubgoalOutcome, '/subgoal_outcome', 10)
        wait_until(lambda: publisher.get_subscription_count(), 'the recorder to listen')
        publisher.publish(SubgoalOutcome())
        wait_until(stop.is_set, 'the recorder to ask for its end')
        stop.exit_code = 0
        assert recorder.stop(1.0) and stop.exit_code == EXIT_CONFIG


def test_pictures_in_other_transports_and_foreign_types_do_not_end_a_recording(tmp_path):
    with ros_graph() as graph:
        recorder = graph.spin(Recorder(tmp_path / 'run', context=graph.context))
        talker = graph.node('talker')
        publishers = [talker.create_publisher(kind, topic, 10) for kind, topic in (
            (CapsuleInfo, '/images/top/theora'), (CapsuleInfo, '/scene'),
            (SubgoalOutcome, '/subgoal_outcome'))]
        wait_until(lambda: publishers[2].get_subscription_count(), 'the recorder to listen')
        for publisher, kind in zip(publishers, (CapsuleInfo, CapsuleInfo, SubgoalOutcome)):
            publisher.publish(kind())
        wait_until(lambda: recorder.counts.get('/subgoal_outcome'), 'a message to be recorded')
        recorder.close()
    with rosbag2.Reader(tmp_path / 'run') as reader:
        assert [connection.topic for connection in reader.connections] == ['/subgoal_outcome']
