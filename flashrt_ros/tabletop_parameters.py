"""The built-in robot's parameters; config/tabletop.yaml holds the same names."""

from flashrt_ros.parameters import ParameterSpec

SPECS = (
    ParameterSpec('lock_step', False, 'the world moves only by ~/step, not by a clock',
                  read_only=True),
    ParameterSpec('publish_clock', False, 'publish /clock and stamp with it: 20 ms a step',
                  read_only=True),
    ParameterSpec('seed', 0, 'of the first world', 0, 2**63 - 1, read_only=True),
    ParameterSpec('blocks', 1, 'in the first world', 1, 3, read_only=True),
    ParameterSpec('zones', 2, 'in every world', 1, 3),
    ParameterSpec('task', '', 'of the first world; empty: drawn from the seed', read_only=True),
    ParameterSpec('image_size_px', 224, 'width and height of the camera images', 16, 2048),
    ParameterSpec('image_transport', 'raw',
                  'raw: images/<view>; compressed: images/<view>/compressed',
                  choices=('raw', 'compressed'), read_only=True),
    ParameterSpec('jpeg_quality', 92, 'of compressed images', 1, 100),
    ParameterSpec('camera_period_steps', 2, 'steps between images in real time', 1, 500),
    ParameterSpec('hold_after_s', 0.2, 'silence after the last point until the arm holds',
                  0.02, 60.0, read_only=True),
    ParameterSpec('step_timeout_s', 5.0, '~/step waits this long for a command', 0.05, 600.0),
    ParameterSpec('fifo_priority', 0, 'SCHED_FIFO priority of the step thread, 0: none', 0, 99,
                  read_only=True),
)
