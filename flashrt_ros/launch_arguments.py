"""Arguments that the launch files share: (name, default, description, choices).

A default of None means that the argument must be given. Free of ``launch``, so that they can be
read where it is not installed.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

Argument = tuple[str, str | None, str, tuple[str, ...] | None]
TRUTH = ('true', 'false')

NAMESPACE = ('namespace', '', 'of the robot; all topics and services lie below it', None)
POLICY = (
    ('policy', 'pi0', 'policy family', None),
    ('policy_config', 'tiny', 'named size of the policy, or a YAML file: a path, or below config/',
     None),
    ('checkpoint', 'policy',
     'weights, a .safetensors file or its folder; policy: as policy_config says; random', None),
    ('tokenizer', 'policy',
     'a tokenizer.model; policy: the one beside the checkpoint, else as policy_config says',
     None),
    ('embodiment', 'embodiments/tabletop.yaml', 'robot YAML: a path, or below config/', None),
    ('output_mode', 'chunk', 'chunk: a trajectory per tick; stream: a point per step',
     ('chunk', 'stream')),
)  # fmt: skip
PLANNER = (
    ('planner', 'qwen3_5', 'planner family', None),
    ('planner_config', 'planner_bytes/planner.yaml',
     'named size of the planner, or a YAML file: a path, or below config/', None),
    ('grammar', 'tabletop', 'of plans: tabletop, none, or a .lark or .regex file', None),
)  # fmt: skip
START = (
    ('device', 'auto', 'where the policy runs', ('auto', 'cpu', 'cuda')),
    ('use_sim_time', 'false', 'follow /clock', TRUTH),
    ('autostart', 'true', 'configure and activate at start', TRUTH),
)
PROCESS = (
    ('python', '', 'interpreter that runs the nodes, an absolute path; empty: the one on PATH',
     None),
    ('respawn', 'true', 'start a process anew when it ends by itself (a lost GPU), but not when '
     'it has refused its parameters', TRUTH),
    ('log_level', 'info', 'of the nodes', ('debug', 'info', 'warn', 'error')),
)  # fmt: skip
POLICY_PARAMETERS = tuple(argument[0] for argument in POLICY)
PLANNER_PARAMETERS = tuple(argument[0] for argument in PLANNER)
START_PARAMETERS = tuple(argument[0] for argument in START)


def changed(arguments: tuple[Argument, ...], **defaults: str | None) -> tuple[Argument, ...]:
    """Return the arguments with other defaults for some of them."""
    return tuple((name, defaults.get(name, default), text, choices)
                 for name, default, text, choices in arguments)


def refusal_of_unknown(file: str, names: Sequence[str], given: Iterable[str],
                       command_line: Iterable[str]) -> str:
    """Return what to say of an argument that a launch file does not declare, '' if there is none.

    launch itself ignores it: a robot with a mistyped namespace would share another one's topics.

    :param given: ``name:=value`` of the command line, as launch has taken them from there.
    :param command_line: all of it; where it does not name ``file``, that is included by another
        launch file, whose arguments these are.
    """
    if not any(Path(word).name == file for word in command_line):
        return ''
    for name in (word.partition(':=')[0] for word in given if ':=' in word):
        if name not in names:
            close = get_close_matches(name, names, 1)
            return (f'argument {name!r:.80} is none of {file}'
                    + (f', did you mean {close[0]}?' if close else '')
                    + f'; it takes {", ".join(sorted(names))}, --show-args describes them')
    return ''
