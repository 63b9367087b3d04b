"""The planner's parameters: config/planner.yaml holds the same names under ``/**/planner:``.

doc/planner_parameters.md is made from this table (``python -m flashrt_ros.planner_parameters``); a
test keeps the two the same.
"""

from pathlib import Path

from flashrt_ros.capsule_parameters import check_capsules
from flashrt_ros.capsule_parameters import PLANNER_CAPSULES
from flashrt_ros.capsule_parameters import table_text
from flashrt_ros.parameters import ParameterSpec
from flashrt_ros.parameters import ParameterTable
from flashrt_ros.planner_language import FORMS

DOCUMENT = Path(__file__).resolve().parent.parent / 'doc' / 'planner_parameters.md'

SPECS = (
    ParameterSpec('planner', 'qwen3_5', 'planner family, a name of flashrt_core.planners',
                  read_only=True),
    ParameterSpec('planner_config', 'planner_bytes/planner.yaml',
                  'named size, or a YAML file: a path, or below config/', read_only=True),
    ParameterSpec('grammar', 'tabletop',
                  'tabletop, none, or a .lark or .regex file of whole plans', read_only=True),
    ParameterSpec('system_prompt', '', 'stands before the grammar in the pinned context',
                  read_only=True),
    ParameterSpec('prompt_form', 'auto', 'auto: chatml where the tokenizer has its markers',
                  choices=FORMS, read_only=True),
    ParameterSpec('device', 'auto', 'where the planner runs', choices=('auto', 'cpu', 'cuda'),
                  read_only=True),
    ParameterSpec('stream_priority', 0, 'of its CUDA streams; a lower number is served first',
                  -3, 0, read_only=True),
    ParameterSpec('autostart', True, 'configure and activate at start', read_only=True),
    ParameterSpec('executor', 'executor', 'name of the executor node, relative or full',
                  read_only=True),
    ParameterSpec('link', 'topic', 'topic: subgoals go out on `subgoal`; service: by '
                  '~/set_subgoal; in bringup they are written into the executor itself',
                  choices=('topic', 'service'), read_only=True),
    ParameterSpec('link_timeout_s', 5.0,
                  'wait for the executor to be met, and to answer a subgoal', 0.01, 60.0),
    ParameterSpec('subgoal_deadline_s', 30.0,
                  'the executor holds when no next subgoal comes in this time; 0: never',
                  0.0, 3600.0),
    ParameterSpec('replan_limit', 1, 'new plans made for one goal whose subgoal failed or timed '
                  'out', 0, 100),
    ParameterSpec('max_tokens', 384, 'tokens of one plan at most', 1, 65536),
    ParameterSpec('temperature', 0.0, 'of the sampler; 0 is greedy', 0.0, 100.0),
    ParameterSpec('seed', 0, 'of the sampler', 0, (1 << 63) - 1),
    ParameterSpec('draft_tokens', 0, 'of speculation, if the model has an MTP head', 0, 16),
    ParameterSpec('plan_timeout_s', 60.0, 'limit of one append', 0.1, 3600.0),
    ParameterSpec('verb_timeout_s', 30.0, 'limit of one capsule verb', 0.1, 3600.0),
    ParameterSpec('device_timeout_s', 10.0, 'wait for a plan that ends to come to a boundary',
                  0.1, 600.0),
    ParameterSpec('shutdown_timeout_s', 2.0, 'for what is sent last', 0.0, 60.0),
    ParameterSpec('admission_margin_s', 0.0005, 'in bringup: kept free before the next tick',
                  0.0, 1.0, read_only=True),
    *PLANNER_CAPSULES,
)


def planner_parameters() -> ParameterTable:
    """Return the table; not yet declared."""
    return ParameterTable(SPECS)


def check_at_configure(values: ParameterTable) -> None:
    """Check what only concerns a start, before anything is loaded.

    :raises ConfigError: naming parameter, value and remedy.
    """
    check_capsules(values)


def document() -> str:
    """Return the text of doc/planner_parameters.md."""
    return (table_text('Parameters of the planner', ParameterTable(SPECS))
            + '\nThe exit status is that of the executor, see [parameters.md](parameters.md).\n')


if __name__ == '__main__':
    DOCUMENT.write_text(document(), encoding='utf-8')
