"""The doctor: recorded boards against golden reports, live run on this machine, wedged probes."""

import io
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from flashrt_ros.doctor import main
from flashrt_ros.doctor.findings import Level
from flashrt_ros.doctor.findings import Needs
from flashrt_ros.doctor.findings import OPTIONAL
from flashrt_ros.doctor.findings import Patient
from flashrt_ros.doctor.machine import Interpreter
from flashrt_ros.doctor.machine import LiveMachine
from flashrt_ros.doctor.machine import Recording
from flashrt_ros.doctor.machine import version_tuple
from flashrt_ros.doctor.report import CHECKS
from flashrt_ros.doctor.report import examine
from flashrt_ros.doctor.report import write_text
from flashrt_ros.executor_parameters import SPECS
from flashrt_ros.ros_environment import SOURCE_ROOT

DATA = Path(__file__).parent / 'data' / 'doctor'
BOARDS = sorted(path.stem for path in DATA.glob('*.json'))
FAILURES = {'thor_r39': 0, 'thor_r38_cu128': 4, 'orin_r36': 5, 'spark': 0, 'laptop': 0}


def _levels(recording: Recording, needs: Needs | None = None) -> dict[str, Level]:
    return {title: finding.level for _, title, finding in examine(recording, needs or Needs())}


@pytest.mark.parametrize('board', BOARDS)
def test_the_report_of_a_recorded_board_equals_its_golden_file(board):
    out = io.StringIO()
    failures = write_text(Recording.load(DATA / f'{board}.json'), Needs(), out)
    golden = DATA / f'{board}.txt'
    if os.environ.get('FLASHRT_UPDATE_GOLDEN'):
        golden.write_text(out.getvalue())
    assert out.getvalue() == golden.read_text()
    assert failures == FAILURES[board]


@pytest.mark.parametrize('board', BOARDS)
def test_all_that_is_not_ok_has_a_remedy(board):
    for _, title, finding in examine(Recording.load(DATA / f'{board}.json'), Needs()):
        assert bool(finding.remedy) == (finding.level is not Level.OK), title


def test_the_exit_code_is_the_number_of_failures(capsys):
    assert main(['--replay', str(DATA / 'thor_r38_cu128.json')]) == 4
    assert main(['--replay', str(DATA / 'thor_r39.json')]) == 0
    capsys.readouterr()


def test_json_carries_every_check_once(capsys):
    main(['--json', '--replay', str(DATA / 'spark.json')])
    report = json.loads(capsys.readouterr().out)
    assert [c['number'] for c in report['checks']] == list(range(1, len(CHECKS) + 1))
    assert report['failures'] == 0


def test_a_cpu_torch_beside_a_gpu_is_a_failure_but_alone_is_not():
    laptop = Recording.load(DATA / 'laptop.json')
    assert _levels(laptop)['torch build'] is Level.OK
    laptop.folders['/dev'] = ['nvidiactl']
    assert _levels(laptop)['torch build'] is Level.FAIL


def test_a_torch_of_the_wrong_build_is_removed_first_for_pip_would_keep_it():
    laptop = Recording.load(DATA / 'laptop.json')
    laptop.folders['/dev'] = ['nvidiactl']
    remedies = {title: finding.remedy for _, title, finding in examine(laptop, Needs())}
    assert remedies['torch build'] == (
        ".venv/bin/pip uninstall -y torch; .venv/bin/pip install 'torch>=2.11,<2.16'")


def test_optional_packages_are_those_of_the_requirements_and_a_missing_one_says_what_for():
    wanted = (SOURCE_ROOT / 'requirements-gpu.txt').read_text()
    assert all(re.search(rf'^{name}>', wanted, re.MULTILINE) for name in OPTIONAL)
    laptop = Recording.load(DATA / 'laptop.json')
    [finding] = [f for _, title, f in examine(laptop, Needs()) if title == 'optional packages']
    assert 'no rosbags: not for bag record' in finding.found and 'llguidance 1' in finding.found
    assert finding.remedy == '.venv/bin/pip install rosbags gguf'
    laptop.probes['packages'] |= {'rosbags': '0.11', 'gguf': '0.19'}
    assert _levels(laptop)['optional packages'] is Level.OK


def test_what_a_remedy_names_is_there():
    laptop, thor = (Recording.load(DATA / f'{name}.json') for name in ('laptop', 'thor_r39'))
    laptop.probes['dds']['received']['640x480'] = thor.probes['dds']['received']['640x480'] = 3
    thor.probes['ros']['numpy'] = '2.1.0'
    thor.files['/proc/mounts'] = '/dev/mmcblk0p1 / ext4 rw 0 0\n'
    remedies = [finding.remedy for machine in (laptop, thor)
                for _, _, finding in examine(machine, Needs())]
    files = [name for remedy in remedies
             for name in re.findall(r'(?:flashrt_ros/|[$]PWD/)((?!share)[\w/.-]+)', remedy)]
    assert len(files) == 3 and all((SOURCE_ROOT / name).is_file() for name in files), files
    assert any(remedy.endswith(': capsule_directory') for remedy in remedies)
    assert 'capsule_directory' in {spec.name for spec in SPECS}


@pytest.mark.parametrize('text', ['', '[]', '{}', '{"interpreter": 3}',
                                  '{"interpreter": {"version": [3, 11, 2]}}'])
def test_a_file_that_is_no_recording_is_refused(tmp_path, capsys, text):
    (tmp_path / 'board.json').write_text(text)
    for path in (tmp_path / 'board.json', tmp_path / 'none.json', tmp_path):
        assert main(['--replay', str(path)]) == 2
        told = capsys.readouterr()
        assert 'doctor --record' in told.err and len(told.err.splitlines()) == 1 and not told.out


def test_a_mistake_is_told_before_anything_is_examined(tmp_path, capsys):
    assert main(['--record', str(tmp_path / 'none' / 'board.json')]) == 2
    assert 'none is no folder' in capsys.readouterr().err
    replay = ['--replay', str(DATA / 'thor_r39.json')]
    for wrong in (['--jsom'], ['--memory-gb', 'nan'], ['--disk-gb', '-1']):
        with pytest.raises(SystemExit):
            main([*replay, *wrong])
        assert wrong[0] in capsys.readouterr().err
    assert main([*replay, '--ros-args', '-r', '__ns:=/robot']) == 0


def test_an_interrupt_ends_the_probe_that_runs(tmp_path):
    wedge, told = tmp_path / 'python', tmp_path / 'pid'
    wedge.write_text(f'#!/bin/sh\necho $$ > {told}.new\nmv {told}.new {told}\nexec sleep 60\n')
    wedge.chmod(0o755)

    def interrupt():
        while not told.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        LiveMachine(python=str(wedge)).probe('gpu_code', 30.0)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_a_thor_with_a_warning_of_torch_passes_when_its_kernels_run():
    thor = Recording.load(DATA / 'thor_r39.json')
    thor.probes['torch']['arch_list'] = ['sm_80']
    assert _levels(thor)['GPU code'] is Level.OK


def test_a_plan_larger_than_memory_fails_and_page_cache_is_no_loss():
    thor = Recording.load(DATA / 'thor_r39.json')
    assert _levels(thor, Needs(memory_gb=110.0))['memory'] is Level.FAIL
    assert _levels(thor, Needs(memory_gb=95.0))['memory'] is Level.WARN
    assert _levels(thor, Needs(memory_gb=40.0))['memory'] is Level.OK


def test_mig_and_conda_and_a_wrong_numpy_are_seen():
    thor = Recording.load(DATA / 'thor_r39.json')
    key = 'nvidia-smi --query-gpu=mig.mode.current --format=csv,noheader'
    thor.commands[key] = 'Enabled\n'
    thor.env['CONDA_PREFIX'] = '/home/user/miniforge3'
    thor.probes['ros']['numpy'] = '2.1.0'
    levels = _levels(thor)
    assert levels['GPU neighbours'] is Level.WARN
    assert levels['interpreter'] is Level.FAIL
    assert levels['ROS and numpy'] is Level.WARN


def test_a_check_that_raises_becomes_a_warning_and_the_others_go_on():
    thor = Recording.load(DATA / 'thor_r39.json')
    thor.probes['formats'] = {'unexpected': 1}
    levels = _levels(thor)
    assert levels['number formats'] is Level.WARN
    assert levels['network'] is Level.OK


def test_a_probe_is_asked_once():
    asked = []
    thor = Recording.load(DATA / 'thor_r39.json')
    original = thor.probe
    thor.probe = lambda name, timeout_s: asked.append(name) or original(name, timeout_s)
    _levels(thor)
    assert len(asked) == len(set(asked))


def test_a_wedged_probe_ends_at_its_time_limit(tmp_path):
    wedge = tmp_path / 'python'
    wedge.write_text('#!/bin/sh\nexec sleep 60\n')
    wedge.chmod(0o755)
    machine = LiveMachine(python=str(wedge))
    start = time.monotonic()
    answer = machine.probe('gpu_code', 1.0)
    assert answer == {'error': 'no answer within 1 s'}
    assert time.monotonic() - start < 30
    assert 'not run' in LiveMachine(budget_s=0.0).probe('torch', 5.0)['error']


def test_an_unknown_computer_is_a_pc():
    nobody = Recording(Interpreter((3, 11, 2), 'python', '/venv', '/usr', 'x86_64'))
    assert Patient(nobody).board_key == 'pc'


def test_versions_are_compared_as_numbers():
    assert version_tuple('2.13.0+cpu') > version_tuple('2.9.1')
    assert version_tuple(None) == (0, 0)
    assert version_tuple('3.0.0rc1') == (3, 0)


def test_the_doctor_itself_imports_neither_torch_nor_rclpy():
    code = (
        'import sys, flashrt_ros.doctor, flashrt_ros.doctor.report\n'
        'print(sorted({"torch", "rclpy", "triton"} & set(sys.modules)))'
    )
    env = {**os.environ, 'PYTHONPATH': str(SOURCE_ROOT)}
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == '[]', done.stderr


@pytest.mark.ros
@pytest.mark.slow
def test_this_machine_has_no_failure_and_its_recording_replays_the_report(tmp_path, capsys):
    pytest.importorskip('rclpy')
    record = tmp_path / 'machine.json'
    assert main(['--json', '--record', str(record)]) == 0
    live = json.loads(capsys.readouterr().out)
    main(['--json', '--replay', str(record)])
    assert json.loads(capsys.readouterr().out) == live
