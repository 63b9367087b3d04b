"""Which models the demo runs: the trained ones where they are shipped, else untrained ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrt_core.config_files import read_yaml
from flashrt_core.tabletop.models import trained
from flashrt_ros.config_files import find_embodiment
from flashrt_ros.config_files import here_or_below_config
from flashrt_ros.embodiment import load_embodiment

UNTRAINED_POLICY, UNTRAINED_PLANNER = 'tiny', 'planner_bytes/planner.yaml'
MOST_BRANCHES = 4
# An untrained planner answers "cannot" when it is greedy; with these it writes plans, at random.
_BABBLE: dict[str, object] = {'temperature': 2.0, 'seed': 4}


@dataclass(frozen=True)
class Brain:
    """Two models and how the demo uses them."""

    policy_config: str
    planner_config: str
    policy_trained: bool
    planner_trained: bool
    branches: int  # of a fork

    @property
    def untrained(self) -> str:
        """Which of the two have random weights, in words."""
        names = {'policy': self.policy_trained, 'planner': self.planner_trained}
        return ' and '.join(name for name, is_trained in names.items() if not is_trained)

    @property
    def policy_name(self) -> str:
        """The policy in words."""
        return f'pi0 {"trained" if self.policy_trained else "untrained"}'

    @property
    def planner_name(self) -> str:
        """The planner in words."""
        return f'qwen3_5 {"trained" if self.planner_trained else "untrained"}'

    @property
    def subgoal_limit(self) -> int:
        """Steps that a subgoal may take, as in evaluations; an untrained policy never ends one."""
        return 260 if self.policy_trained else 45

    def steps(self, quick: bool) -> int:
        """Steps that an episode may take."""
        if self.policy_trained:
            return 400
        return 60 if quick else 120

    def executor(self) -> dict[str, object]:
        """Parameters of the executor."""
        kind = 'trained' if self.policy_trained else 'untrained'
        return {'policy_config': self.policy_config,
                'embodiment': f'embodiments/tabletop_{kind}.yaml'}

    def units(self) -> dict[str, str]:
        """Unit of each joint's target by the joint's name: rad, m or ratio."""
        robot = load_embodiment(find_embodiment(str(self.executor()['embodiment'])))
        return {joint.name: joint.unit for joint in robot.joints}

    def planner(self) -> dict[str, object]:
        """Parameters of the planner."""
        return {'planner_config': self.planner_config,
                **({} if self.planner_trained else _BABBLE)}


def find_brain(policy: str = '', planner: str = '') -> Brain:
    """Return the models to run; their configs are read, not checked: the nodes do that.

    :param policy: a name or file instead of the shipped policy; ``planner`` likewise. A config
        that names weights counts as trained.
    :raises ConfigError: a file is no YAML.
    """
    policy = here_or_below_config(policy or _shipped('policy', UNTRAINED_POLICY))
    planner = here_or_below_config(planner or _shipped('planner', UNTRAINED_PLANNER))
    mind, words = _settings(policy), _settings(planner)
    captured = [MOST_BRANCHES] if policy == UNTRAINED_POLICY else mind.get('row_keys', [])
    return Brain(
        policy, planner, bool(mind.get('weights')), bool(words.get('weights')),
        max((n for n in captured if n <= MOST_BRANCHES), default=1))


def _settings(config: str) -> dict[str, Any]:
    path = Path(config)
    return read_yaml(path, 'config') if path.is_file() else {}


def _shipped(name: str, otherwise: str) -> str:
    found: Path | None = trained(name)
    return otherwise if found is None else str(found)
