"""A node that is started wrongly ends with status 2 and one sentence, never with a traceback."""

from pathlib import Path

import pytest

from flashrt_ros.processes import ProcessGroup

pytestmark = [pytest.mark.ros, pytest.mark.slow]


def test_wrong_starts_end_with_2_and_a_sentence_that_names_what_was_wrong(tmp_path: Path) -> None:
    broken = tmp_path / 'broken.yaml'
    broken.write_text('/**/tabletop:\n  ros__parameters:\n   - a: [\n')
    typo = tmp_path / 'typo.yaml'
    typo.write_text('/**/tabletop:\n  ros__parameters:\n    sed: 3\n')
    cases = {
        'typo': (['--params-file', str(typo)], {}, ('parameter sed ', 'write seed')),
        'broken file': (['--params-file', str(broken)], {}, (str(broken), 'Error parsing')),
        'missing file': (['--params-file', '/no/such.yaml'], {}, ('/no/such.yaml',)),
        'type': (['-p', 'use_sim_time:=3'], {}, ('use_sim_time', '3', 'BOOL')),
        'namespace': (['-r', '__ns:=bad//ns'], {}, ('bad//ns',)),
        'argument': (['--foo'], {}, ('--foo',)),
        'domain': ([], {'ROS_DOMAIN_ID': '999'}, ("'999'", '0 to 232')),
        'log folder': ([], {'ROS_LOG_DIR': '/proc/no'}, ('/proc/no',)),
    }
    with ProcessGroup(log_dir=tmp_path / 'log', env={'OMP_NUM_THREADS': '1'}) as group:
        for name, (arguments, environment, words) in cases.items():
            process = group.start('tabletop', name=name.replace(' ', '_'), env=environment,
                                  args=['--ros-args', *arguments])
            process.expected_end = True
            assert process.wait(60) == 2, f'{name}: {process.tail()}'
            log = process.log()
            assert 'Traceback' not in log, f'{name}: {log}'
            fatal = [line for line in log.splitlines() if line.startswith('[FATAL]')]
            assert len(fatal) == 1 and all(word in fatal[0] for word in words), f'{name}: {log}'


def test_help_is_printed_and_an_argument_outside_ros_args_is_refused(tmp_path: Path) -> None:
    with ProcessGroup(log_dir=tmp_path / 'log', env={'OMP_NUM_THREADS': '1'}) as group:
        for argument, status, words in (('--help', 0, 'usage: '), ('seed:=3', 2, "'seed:=3'")):
            process = group.start('tabletop', name=f'end_{status}', args=[argument])
            process.expected_end = True
            assert process.wait(60) == status, process.tail()
            assert words in process.log() and 'Traceback' not in process.log()


def test_a_parameter_file_for_another_node_is_told(tmp_path: Path) -> None:
    other = tmp_path / 'other.yaml'
    other.write_text('/**/tabeltop:\n  ros__parameters:\n    seed: 3\n')
    with ProcessGroup(log_dir=tmp_path / 'log', env={'OMP_NUM_THREADS': '1'}) as group:
        process = group.start('tabletop', params_files=[other])
        group.wait_for(lambda: 'nothing for /tabletop; write /**/tabletop:' in process.log(), 60,
                       'the warning')
