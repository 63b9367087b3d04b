"""The process starter: logs, deaths, time-outs, signals, orphans, domains."""

import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

import pytest

from flashrt_core.errors import ConfigError
from flashrt_ros.processes import ProcessDied
from flashrt_ros.processes import ProcessError
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.processes import WaitTimeout
from flashrt_ros.processes import yaml_value
from flashrt_ros.ros_environment import DomainLease
from flashrt_ros.ros_environment import SOURCE_ROOT
from flashrt_ros.ros_environment import wheel_environment

SLEEPER = 'import time, sys; print("up", flush=True); time.sleep(60)'


def _alive(pid: int) -> bool:
    try:
        state = Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0]
    except OSError:
        return False
    return state not in 'ZX'


def _until(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_child_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    with ProcessGroup(tmp_path) as group:
        code = 'print("last words"); raise SystemExit(3)'
        group.start_command([sys.executable, '-c', code], name='doomed')
        with pytest.raises(ProcessDied, match='exit code 3') as caught:
            group.wait_for(lambda: False, 10, 'a death')
    assert 'last words' in str(caught.value)
    assert 'doomed' in str(caught.value)


def test_a_condition_that_stays_false_times_out_and_names_what_was_awaited(tmp_path):
    with ProcessGroup(tmp_path) as group:
        process = group.start_command([sys.executable, '-c', SLEEPER], name='sleeper')
        group.wait_for(lambda: 'up' in process.log().splitlines(), 10, 'the sleeper')
        with pytest.raises(WaitTimeout, match='the moon') as caught:
            group.wait_for(lambda: False, 0.05, 'the moon')
    assert 'up' in str(caught.value)


def test_a_wait_for_nodes_that_others_started_names_the_domain_they_must_be_on():
    with ProcessGroup(domain_id=77) as group, pytest.raises(WaitTimeout) as caught:
        group.wait_for(lambda: None, 0.01, 'the moon')
    assert str(caught.value) == ('waited 0.01 s in vain for the moon; nothing was started here: '
                                 'see that the nodes run, on ROS domain 77 as this does')


def test_stop_interrupts_first_and_kills_what_ignores_it(tmp_path):
    deaf = (
        'import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n'
        'print("up", flush=True)\ntime.sleep(60)'
    )
    polite = (
        'import signal, time, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n'
        'print("up", flush=True)\ntime.sleep(60)'
    )
    with ProcessGroup(tmp_path, stop_timeout_s=1.0) as group:
        for name, code in (('deaf', deaf), ('polite', polite)):
            process = group.start_command([sys.executable, '-c', code], name=name)
            group.wait_for(lambda p=process: 'up' in p.log().splitlines(), 10, name)
        codes = group.stop()
    assert codes == {'deaf': -signal.SIGKILL, 'polite': 0}


def test_children_of_a_killed_parent_do_not_live_on(tmp_path):
    script = (
        'import sys\nfrom flashrt_ros.processes import ProcessGroup\n'
        f'group = ProcessGroup({str(tmp_path)!r}).__enter__()\n'
        f'p = group.start_command([sys.executable, "-c", {SLEEPER!r}], name="orphan")\n'
        'print(p.pid, flush=True)\nimport time\ntime.sleep(60)\n'
    )
    env = {**os.environ, 'PYTHONPATH': str(SOURCE_ROOT)}
    parent = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, env=env)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert _until(lambda: not _alive(pid))
    finally:
        parent.kill()


def test_leaving_the_block_by_an_exception_ends_the_children(tmp_path):
    with pytest.raises(RuntimeError), ProcessGroup(tmp_path, stop_timeout_s=2) as group:
        process = group.start_command([sys.executable, '-c', SLEEPER], name='sleeper')
        raise RuntimeError('boom')
    assert not _alive(process.pid)


def test_every_group_gets_a_domain_of_its_own_and_gives_it_back():
    first, second = DomainLease(), DomainLease()
    try:
        assert first.id != second.id
    finally:
        first.close()
        second.close()
    again = DomainLease()
    assert again.id == first.id
    again.close()


def test_a_domain_whose_first_participant_has_ended_but_not_another_is_not_leased():
    lease = DomainLease()
    lease.close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as participant:
        participant.bind(('', 7400 + 250 * lease.id + 10 + 2 * 3))
        other = DomainLease()
        other.close()
    assert other.id != lease.id


def test_a_domain_outside_the_protocol_is_refused():
    with pytest.raises(ConfigError, match='233'):
        DomainLease(233)


def test_the_child_sees_the_domain_and_stays_on_this_host(tmp_path):
    keys = '("ROS_DOMAIN_ID", "ROS_AUTOMATIC_DISCOVERY_RANGE")'
    show = f'import os; print(*(os.environ[k] for k in {keys}))'
    with ProcessGroup(tmp_path) as group:
        process = group.start_command([sys.executable, '-c', show], name='show')
        process.expected_end = True
        assert process.wait(10) == 0
        assert process.log().splitlines()[-1] == f'{group.domain_id} LOCALHOST'


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (True, 'true'), (3, '3'), (0.2, '0.2'), (1.0, '1.0'), ('', '""'), ('12', '"12"'),
        ([1.0, 2.5], '[1.0, 2.5]'), (['a', 'b'], '["a", "b"]'), (Path('/x'), '"/x"'),
    ],
)  # fmt: skip
def test_parameter_values_keep_their_type_through_yaml(value, text):
    assert yaml_value(value) == text


def test_a_value_no_parameter_can_hold_is_refused():
    with pytest.raises(ConfigError, match='dict'):
        yaml_value({'a': 1})


def test_ros_arguments_are_ordered_files_before_values(tmp_path):
    with ProcessGroup(tmp_path) as group:
        process = group.start(
            'this.that',
            namespace='arm1',
            params={'x': 1},
            params_files=['a.yaml'],
            remaps={'p': 'q'},
        )
        process.expected_end = True
    line = ' '.join(process.command)
    assert line.endswith(
        '-m this.that --ros-args -r __ns:=/arm1 -r p:=q --params-file a.yaml -p x:=1'
    )


def test_an_unknown_executable_is_named(tmp_path):
    with ProcessGroup(tmp_path) as group, pytest.raises(ProcessError, match="'cook'"):
        group.start('cook')


def test_two_processes_of_one_name_keep_separate_logs(tmp_path):
    with ProcessGroup(tmp_path, stop_timeout_s=2) as group:
        first = group.start_command([sys.executable, '-c', SLEEPER], name='twin')
        second = group.start_command([sys.executable, '-c', SLEEPER], name='twin')
        assert first.log_path != second.log_path
        assert group['twin_2'] is second


def test_the_source_root_comes_first_for_children():
    env = wheel_environment({'PYTHONPATH': '/elsewhere'})
    assert env['PYTHONPATH'].split(os.pathsep)[0] == str(SOURCE_ROOT)


@pytest.mark.ros
def test_a_context_of_the_parent_lies_on_the_domain_of_the_children(tmp_path):
    pytest.importorskip('rclpy')
    before = dict(os.environ)
    with ProcessGroup(tmp_path) as group:
        context = group.context()
        try:
            assert context.get_domain_id() == group.domain_id
        finally:
            context.shutdown()
    assert dict(os.environ) == before


def test_wheels_in_a_plain_folder_are_found_without_a_venv(tmp_path):
    for folder in ('rclpy', 'ros_rcl.libs', 'lib'):
        (tmp_path / folder).mkdir()
    (tmp_path / 'rclpy/__init__.py').touch()
    (tmp_path / 'lib/librcl.so').touch()
    code = (
        'import json; from flashrt_ros.ros_environment import wheel_environment as w; '
        'print(json.dumps(w({})))'
    )
    env = {
        'PYTHONPATH': f'{tmp_path}{os.pathsep}{SOURCE_ROOT}',
        '_ROS_WHEELS_BOOTSTRAP_COMPLETE': '1',
    }
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env)
    found = json.loads(done.stdout)
    assert found['LD_LIBRARY_PATH'].split(os.pathsep) == [
        str(tmp_path / 'ros_rcl.libs'), str(tmp_path / 'lib')]  # fmt: skip
    assert found['AMENT_PREFIX_PATH'] == str(tmp_path)
