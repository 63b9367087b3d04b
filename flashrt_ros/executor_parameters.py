"""The executor's parameters: config/executor.yaml holds the same names under ``/**/executor:``.

doc/parameters.md is made from this table (``python -m flashrt_ros.executor_parameters``); a test
keeps the two the same.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ParameterInvalid
from flashrt_core.policies.chunking import MODES
from flashrt_core.policies.protocol import GUIDANCE_LIMIT
from flashrt_ros.capsule_parameters import CAPSULES
from flashrt_ros.capsule_parameters import check_capsules
from flashrt_ros.capsule_parameters import table_text
from flashrt_ros.parameters import ParameterSpec
from flashrt_ros.parameters import ParameterTable
from flashrt_ros.policy_source import AS_CONFIGURED

DOCUMENT = Path(__file__).resolve().parent.parent / 'doc' / 'parameters.md'

SPECS = (
    ParameterSpec('policy', 'pi0', 'policy family, a name of flashrt_core.policies',
                  read_only=True),
    ParameterSpec('policy_config', 'tiny',
                  'named size, or a YAML file: a path, or below config/; empty: '
                  'config/<policy>.yaml', read_only=True),
    ParameterSpec('checkpoint', AS_CONFIGURED,
                  'weights: a .safetensors file or its folder; policy: as policy_config says; '
                  'random: random weights, to measure with; empty: refused, saying where to get '
                  'some', read_only=True),
    ParameterSpec('tokenizer', AS_CONFIGURED,
                  'path of a tokenizer.model; policy: the one beside the checkpoint, else as '
                  'policy_config says', read_only=True),
    ParameterSpec('fit_to_robot', False,
                  "state_dim, action_dim and views of the policy's config become those of the "
                  'embodiment', read_only=True),
    ParameterSpec('embodiment', 'embodiments/tabletop.yaml',
                  'robot YAML: a path, or a file below config/', read_only=True),
    ParameterSpec('device', 'auto', 'where the policy runs', choices=('auto', 'cpu', 'cuda'),
                  read_only=True),
    ParameterSpec('stream_priority', -1, 'of its CUDA streams; a lower number is served first',
                  -3, 0, read_only=True),
    ParameterSpec('autostart', True, 'configure and activate at start', read_only=True),
    ParameterSpec('lock_step', False,
                  "steps only on ~/step, under the caller's clock: deterministic",
                  read_only=True),
    ParameterSpec('output_mode', 'chunk',
                  'chunk: a JointTrajectory per tick; stream: one point per step',
                  choices=('chunk', 'stream'), read_only=True),
    ParameterSpec('image_transport', 'raw',
                  'raw: images/<view>; compressed: images/<view>/compressed',
                  choices=('raw', 'compressed'), read_only=True),
    ParameterSpec('require_reset', True,
                  'act only after ~/reset: after a restart nobody knows whose episode it is',
                  read_only=True),
    ParameterSpec('prompt', '', 'task in words, given to the policy with the next tick'),
    ParameterSpec('chunk_mode', AS_CONFIGURED,
                  'how chunks follow each other: blend, ensemble and rtc tick while the last one '
                  'is played, sync only when it is used up; policy: as its config says',
                  choices=(AS_CONFIGURED, *MODES), read_only=True),
    ParameterSpec('tick_period_steps', 8, 'steps between two ticks; without effect in sync',
                  1, 1000),
    ParameterSpec('best_of', 1,
                  'candidates evaluated in each tick, of which one is played; above 1 it must be '
                  "one of best_of_keys of the policy's config", 1, 16),
    ParameterSpec('guidance', 1.0,
                  'how strongly the task steers the actions, 1: as trained; another value only '
                  "where the policy's config has guidance: true", 0.0, GUIDANCE_LIMIT),
    ParameterSpec('reuse_vision', True,
                  'encode a camera frame that did not change once only, where the '
                  "policy's config has reuse_vision: true"),
    ParameterSpec('delay_window_chunks', 8,
                  'the next chunk is expected as late, in steps, as the latest of so many chunks',
                  1, 1000, read_only=True),
    ParameterSpec('max_image_age_s', 0.5, 'older images stop the ticks and hold', 0.001, 60.0),
    ParameterSpec('max_joint_age_s', 0.2, 'older joint states stop the ticks and hold',
                  0.001, 60.0),
    ParameterSpec('max_skew_s', 0.2, 'largest distance in time between the streams of a tick',
                  0.0001, 60.0),
    ParameterSpec('future_tolerance_s', 0.05, 'stamps further ahead of ROS time are refused',
                  0.0, 60.0),
    ParameterSpec('exhausted_hold_s', 0.2,
                  'a chunk used up for this long holds; motion goes on from the measured pose',
                  0.0, 60.0),
    ParameterSpec('limits', 'clamp', 'targets beyond the limits: clamp or reject the chunk',
                  choices=('clamp', 'reject'), read_only=True),
    ParameterSpec('resync_speed_ratio', 0.5, 'part of the rate limit used while blending in',
                  0.01, 1.0),
    ParameterSpec('image_resize', 'letterbox', 'images of another size: letterbox or refuse them',
                  choices=('letterbox', 'refuse'), read_only=True),
    ParameterSpec('tick_deadline_s', 1.0, 'a longer tick counts as a missed deadline',
                  0.001, 600.0, read_only=True),
    ParameterSpec('tick_misses_to_hold', 3, 'missed deadlines in a row that hold the robot',
                  1, 1000),
    ParameterSpec('device_timeout_s', 10.0, 'a longer tick means that the device is lost',
                  0.1, 600.0),
    ParameterSpec('heartbeat_period_s', 0.2, 'longest silence of ~/heartbeat while no tick runs',
                  0.01, 10.0, read_only=True),
    ParameterSpec('verb_timeout_s', 30.0, 'limit of one capsule verb', 0.1, 3600.0),
    ParameterSpec('observation_timeout_s', 5.0, '~/step waits this long for its observation',
                  0.01, 600.0),
    ParameterSpec('shutdown_timeout_s', 2.0, 'for the acknowledgement of the last hold',
                  0.0, 60.0),
    ParameterSpec('fifo_priority', 20, 'SCHED_FIFO priority of the step thread; 0: do not ask',
                  0, 99, read_only=True),
    *CAPSULES,
    ParameterSpec('rollback_ticks', 16, 'boundaries that ~/rollback can go back', 1, 4096,
                  read_only=True),
)


def executor_parameters() -> ParameterTable:
    """Return the table with its checks across parameters; not yet declared."""
    table = ParameterTable(SPECS)
    table.add_check(_check_deadlines)
    return table


def age_limits(values: Any, views: Iterable[str]) -> dict[str, Any]:
    """Return what an ObservationWatch judges by, from parameters and the robot's views."""
    images = {f'images/{view}': values['max_image_age_s'] for view in views}
    return {'max_age_s': {'joint_states': values['max_joint_age_s'], **images},
            'max_skew_s': values['max_skew_s'],
            'future_tolerance_s': values['future_tolerance_s']}


def heartbeat_deadline_s(values: ParameterTable) -> float:
    """Return the QoS deadline of ~/heartbeat: the longest silence of a node that is well.

    A tick that begins when the last beat is a heartbeat period old may take up to its deadline.
    """
    return float(values['tick_deadline_s'] + values['heartbeat_period_s'])


def check_at_configure(values: ParameterTable) -> None:
    """Check what only concerns a start, before anything is loaded.

    :raises ConfigError: naming parameter, value and remedy.
    """
    check_capsules(values)
    if values['device_timeout_s'] < values['tick_deadline_s']:
        raise ConfigError(
            f'device_timeout_s is {values["device_timeout_s"]}, below tick_deadline_s '
            f'{values["tick_deadline_s"]}; give at least as much')


def _check_deadlines(values: Mapping[str, Any]) -> None:
    if values['device_timeout_s'] < values['tick_deadline_s']:
        raise ParameterInvalid(
            f'parameter tick_deadline_s {values["tick_deadline_s"]} exceeds device_timeout_s '
            f'{values["device_timeout_s"]}; keep it at or below')


def document() -> str:
    """Return the text of doc/parameters.md."""
    return (table_text('Parameters of the executor', ParameterTable(SPECS))
            + '\n`~/heartbeat` offers the QoS deadline `tick_deadline_s + heartbeat_period_s`: a '
            'subscriber that asks for as much or more\nis told when the executor falls silent.\n'
            '\n## Exit status\n\n'
            '0 after SIGINT or SIGTERM, 2 for a parameter that is refused at start, 75 when the '
            'device is lost: start it anew\n(`respawn=True` in a launch file), it captures and '
            'loads C0 again; a second signal ends it at once with 128 + its number.\n'
            'A policy, embodiment or device that configure refuses ends nothing: the reason is '
            'logged and the node stays unconfigured.\nConfigure it again, or start it anew with '
            'other parameters.\n'
            '\n## Weights\n\n'
            '`checkpoint` names them; where none is given or found, the refusal says what to '
            'download, from where, under which licence,\nand how to run with random weights. '
            'What will be allocated and what is free is logged before anything is loaded;\nwhat '
            'does not fit is refused then. A boot logs its stages and how long each took. '
            'Compiled kernels are kept in\n`$TRITON_CACHE_DIR` (`~/.triton/cache`): in a '
            'container keep that folder on a volume, and later boots compile nothing.\n')


if __name__ == '__main__':
    DOCUMENT.write_text(document(), encoding='utf-8')
