"""Command: ``record``, ``replay`` and ``compare`` recordings of an executor and its planner."""

import argparse
from collections.abc import Sequence
import sys

from flashrt_core.command_line import run
from flashrt_core.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it did what was asked, 1 when a replay differs, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog='bag', description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True)
    record = commands.add_parser('record', help='record both nodes until Ctrl-C')
    record.add_argument('path', help='folder to make')
    record.add_argument('--executor', default='/executor', help='full name of the node')
    record.add_argument('--planner', default='',
                        help='full name of the node; default: planner beside the executor')
    record.add_argument('--storage', default='mcap', choices=('mcap', 'sqlite3'))
    replay = commands.add_parser('replay', help='replay bit for bit, without ROS')
    replay.add_argument('path')
    choices = {'image-resize': ('letterbox', 'refuse'), 'device': ('auto', 'cpu', 'cuda')}
    for name in ('policy', 'policy-config', 'embodiment', 'image-resize', 'device'):
        replay.add_argument(f'--{name}', choices=choices.get(name),
                            help='instead of the recorded parameter')
    compare = commands.add_parser('compare', help='compare the chunks of two recordings')
    compare.add_argument('first')
    compare.add_argument('second')
    given, rest = parser.parse_known_args(argv)
    if rest and given.command != 'record':
        parser.error(f'unknown arguments: {" ".join(rest)}')
    actions = {'record': lambda: _record(given, rest), 'replay': lambda: _replay(given),
               'compare': lambda: _compare(given)}
    return run(f'bag {given.command}', actions[given.command])


def _record(given: argparse.Namespace, ros_arguments: Sequence[str]) -> int:
    from flashrt_ros.ros_environment import require_ros

    require_ros()
    from flashrt_ros.bag.record import record

    return record(given.path, given.executor, given.planner, given.storage, ros_arguments)


def _replay(given: argparse.Namespace) -> int:
    from flashrt_core.capsule import CapsuleStore
    from flashrt_core.policies import make_policy
    from flashrt_core.runtime import pick_backend
    from flashrt_ros.bag.recording import Recording
    from flashrt_ros.bag.replay import Replayer
    from flashrt_ros.config_files import find_embodiment
    from flashrt_ros.embodiment import load_embodiment
    from flashrt_ros.policy_source import DEFAULTS
    from flashrt_ros.policy_source import policy_config

    recording = Recording(given.path)

    def setting(name: str) -> str:
        value = getattr(given, name) or recording.parameters.get(name)
        if not value:
            raise ConfigError(f'{name} is not in the recording; give --{name.replace("_", "-")}')
        return str(value)

    robot = load_embodiment(find_embodiment(setting('embodiment')))
    backend = pick_backend(setting('device'))
    policy = make_policy(setting('policy'))
    values = {**DEFAULTS, **recording.parameters, 'policy': setting('policy')}
    if given.policy_config or 'policy_config' not in values:
        values['policy_config'] = setting('policy_config')
    session = policy.bind(backend, policy_config(values, policy, robot))
    try:
        bytes_of = recording.parameters.get
        store = CapsuleStore(
            backend,
            bytes_of('capsule_gpu_bytes', 1 << 30),
            bytes_of('capsule_host_bytes', 1 << 30),
        )
        replayer = Replayer(
            recording,
            session,
            store,
            robot,
            resize=setting('image_resize'),
            marks=int(bytes_of('rollback_ticks', 16)) + 1,
        )
        report = replayer.run()
        store.close()
    finally:
        session.close()
    for line in report.gaps + report.different:
        print(line)
    print(
        f'{report.equal} ticks equal bit for bit, {len(report.different)} different, '
        f'{report.skipped} not replayed'
    )
    return 0 if report.exact else 1


def _compare(given: argparse.Namespace) -> int:
    from flashrt_ros.bag.compare import compare
    from flashrt_ros.bag.recording import Recording

    found = compare(Recording(given.first), Recording(given.second))
    print(
        f'{found.compared} ticks compared: {found.equal} equal, inputs of {found.inputs_equal} '
        f'equal, {found.unmatched} in one recording only'
    )
    if found.first_difference:
        print(f'first difference: {found.first_difference}, largest distance {found.largest:g}')
    return 0 if found.same else 1


if __name__ == '__main__':
    sys.exit(main())
