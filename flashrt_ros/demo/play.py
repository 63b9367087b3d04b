"""The demo from start to report: processes up, episodes, real time, HTML."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import datetime
import importlib.metadata
import os
from pathlib import Path
import platform
import shlex
import sys
import time

from flashrt_core.command_line import check_output
from flashrt_core.command_line import number
from flashrt_core.command_line import whole_number
from flashrt_core.errors import ConfigError
from flashrt_core.tabletop.subgoals import CAMERA
from flashrt_ros.conductor import Conductor
from flashrt_ros.config_files import config_path
from flashrt_ros.demo.brain import Brain
from flashrt_ros.demo.brain import find_brain
from flashrt_ros.demo.lockstep import LockStep
from flashrt_ros.demo.realtime import RealTimeEpisode
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.report import write_report
from flashrt_ros.demo.story import Story
from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.processes import ProcessError
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.qos import use_large_message_profile

NAMESPACE = 'demo'
VIEWS = ('top', 'wrist')
START_TIMEOUT_S = 120.0
REAL_TIME_SEED = 2
EXPERT_SEED = 5
PACKAGES = ('torch', 'numpy', 'opencv-python-headless', 'safetensors', 'matplotlib')


class DomainCrowded(ProcessError):
    """Other nodes talk on the domain that the demo was given."""

    code = 'domain_crowded'


def parser() -> argparse.ArgumentParser:
    """Command line of the demo."""
    p = argparse.ArgumentParser(prog='demo', description=__doc__)
    p.add_argument('--episodes', type=whole_number(1), default=3,
                   help='in lock-step: interrupt, the same again, retry, other tables')
    p.add_argument('--steps', type=whole_number(0), default=0,
                   help='that each may take; 0: 400, untrained 120, quick 60')
    p.add_argument('--quick', action='store_true', help='shorter episodes, short real time')
    p.add_argument('--no-realtime', action='store_true', help='leave out the real-time episode')
    p.add_argument('--seconds', type=number(0), default=0.0,
                   help='real time; 0: 8 s, quick 3 s')
    p.add_argument('--out', type=Path, default=Path('out/demo'), help='folder of report and logs')
    p.add_argument('--domain-id', type=int, default=None, help='default: a free one')
    p.add_argument('--device', default='auto', choices=('auto', 'cpu', 'cuda'))
    p.add_argument('--policy-config', default='',
                   help='name or file; else the trained policy, or an untrained one')
    p.add_argument('--planner-config', default='',
                   help='name or file; else the trained planner, or an untrained one')
    return p


def play(argv: Sequence[str], terminal: Terminal) -> int:
    """Run everything; the report is written even when a later stage fails.

    :raises FlashrtError: a process died, a service refused, nothing came.
    """
    args, ros_args = parser().parse_known_args(argv)
    if ros_args and ros_args[0] != '--ros-args':
        raise ConfigError(f'unknown argument {ros_args[0]!r}; --help lists those there are')
    brain = find_brain(args.policy_config, args.planner_config)
    out: Path = args.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / 'log').mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out is {str(out)!r}, where no folder can be made ({error}); give '
                          'one in which you may write') from error
    report, record = out / 'report.html', out / 'run.json'
    for path in (report, record):  # told before the work
        check_output(path, 'report')
    run = Run(
        started=datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='seconds'),
        command=shlex.join(['python', '-m', 'flashrt_ros.demo', *argv]),
        policy=brain.policy_name,
        planner=brain.planner_name,
        untrained=brain.untrained,
        quick=args.quick,
        machine=machine(),
        versions=versions(),
    )
    use_large_message_profile()
    terminal.title('flashrt_ros demo: a robot whose mind is reset by restoring a capsule')
    if brain.untrained:
        terminal.note(
            f'Untrained, with random weights: {brain.untrained}. The arm wanders, plans are '
            'random; the scripted expert solves a task.')
    try:
        _lock_step(args, brain, run, terminal)
        if not args.no_realtime:
            _real_time(args, brain, run, terminal)
    except BaseException as error:
        run.failures.append(f'the run ended early: {type(error).__name__}: {error}')
        raise
    finally:
        run.seconds = terminal.seconds
        if run.episodes:
            terminal.stage('Report')
            write_report(run, report)
            run.save(record)
            run.seconds = terminal.seconds
            terminal.done(str(report))
    for failure in run.failures:
        terminal.error(failure)
    terminal.title(f'{terminal.seconds:.0f} s in all; open {report.resolve().as_uri()}')
    return 1 if run.failures else 0


def _start(
    group: ProcessGroup, args: argparse.Namespace, brain: Brain, terminal: Terminal, *,
    lock_step: bool,
) -> Conductor:
    """Start the robot and, in one process, executor and planner; give a conductor once active."""
    terminal.stage(f'Start on ROS domain {group.domain_id}')
    files = [config_path('demo.yaml')]
    robot: dict[str, object] = {'image_size_px': CAMERA}
    executor = {'device': args.device, **brain.executor()}
    planner = {'device': args.device, **brain.planner()}
    if lock_step:
        # Nothing repeats an observation in lock-step, so none may be lost.
        for stream in ('joint_states', *(f'images/{view}' for view in VIEWS)):
            executor[f'qos_overrides./{NAMESPACE}/{stream}.subscription.reliability'] = 'reliable'
    else:
        robot |= {'lock_step': False, 'publish_clock': False}
        executor |= {'lock_step': False, 'use_sim_time': False}
        planner |= {'use_sim_time': False}
    # In one process a parameter goes to the node whose name stands before it.
    both = {f'{node}:{name}': value for node, given in (('executor', executor),
                                                        ('planner', planner))
            for name, value in given.items()}
    group.start('tabletop', namespace=NAMESPACE, params_files=files, params=robot)
    group.start('bringup', namespace=NAMESPACE, params_files=files, params=both)
    conductor = Conductor(
        group,
        namespace=NAMESPACE,
        views=VIEWS if lock_step else VIEWS[:1],
        reliable=lock_step,
        planner_name='planner',
    )
    try:
        conductor.wait_for_services(START_TIMEOUT_S)
        strangers = conductor.strangers()
        if strangers:
            raise DomainCrowded(
                f'ROS domain {group.domain_id} is crowded: {", ".join(strangers[:6])} talk on it; '
                'leave out --domain-id, or end those nodes'
            )

        def show(status: ExecutorStatus) -> None:
            terminal.progress(int(status.progress * 100), 100, status.phase)

        conductor.wait_until_active(START_TIMEOUT_S, show)
    except BaseException:
        conductor.close()
        raise
    return conductor


def _lock_step(args: argparse.Namespace, brain: Brain, run: Run, terminal: Terminal) -> None:
    with ProcessGroup(args.out / 'log', domain_id=args.domain_id) as group:
        run.domain_id = group.domain_id
        began = time.monotonic()
        with _start(group, args, brain, terminal, lock_step=True) as conductor:
            run.startup['robot, executor and planner'] = time.monotonic() - began
            status = conductor.heard.status
            run.device = status.device if status is not None else ''
            terminal.done(f'{run.policy} and {run.planner} on {run.device}, in one process; '
                          'the robot in another')
            stage = LockStep(conductor, brain, run, terminal,
                             args.steps or brain.steps(args.quick))
            story = Story(stage)
            story.play(args.episodes)
            stage.expert_episode(EXPERT_SEED)
            story.list_capsules()
            run.processes = group.describe()
        _check_exits(group, run)


def _real_time(args: argparse.Namespace, brain: Brain, run: Run, terminal: Terminal) -> None:
    seconds = args.seconds or (3.0 if args.quick else 8.0)
    with ProcessGroup(args.out / 'log' / 'realtime', domain_id=args.domain_id) as group:
        with _start(group, args, brain, terminal, lock_step=False) as conductor:
            terminal.done('real time')
            RealTimeEpisode(conductor, run, terminal, seconds).play(REAL_TIME_SEED)
        _check_exits(group, run)


def _check_exits(group: ProcessGroup, run: Run) -> None:
    for name, code in group.stop().items():
        if code != 0:
            run.failures.append(f'{name} did not end in order: exit {code}')


def machine() -> dict[str, str]:
    """Name what this runs on."""
    model = ''
    try:
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                model = line.split(':', 1)[1].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0))
    return {
        'machine': f'{platform.machine()}, {cores} cores{", " + model if model else ""}',
        'system': f'{platform.system()} {platform.release()}',
    }


def versions() -> dict[str, str]:
    """Versions that matter for a report."""
    found = {'python': '.'.join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found['ROS'] = os.environ.get('ROS_DISTRO', 'jazzy (wheels)')
    return found
