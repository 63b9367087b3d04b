"""Files in config/ that no node reads: they must name what exists."""

import json
from pathlib import Path
import re
import xml.etree.ElementTree as ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _enclave(name: str) -> ElementTree.Element:
    tree = ElementTree.parse(ROOT / 'config/sros2_policy.xml')
    (found,) = tree.findall(f".//enclave[@path='/flashrt/{name}']")
    return found


def _texts(enclave: ElementTree.Element, tag: str) -> set[str]:
    return {element.text for element in enclave.iter(tag)}


def test_the_security_policy_lists_every_service_of_the_conductor():
    pytest.importorskip('rclpy')
    from flashrt_ros.conductor import EXECUTOR_SERVICES
    from flashrt_ros.conductor import ROBOT_SERVICES

    assert {f'~/{name}' for name in EXECUTOR_SERVICES} <= _texts(_enclave('executor'), 'service')
    assert {f'~/{name}' for name in ROBOT_SERVICES} <= _texts(_enclave('tabletop'), 'service')
    asked = {f'/executor/{name}' for name in EXECUTOR_SERVICES}
    assert asked <= _texts(_enclave('operator'), 'service')


def test_the_security_policy_lists_what_the_planner_creates():
    sources = ''.join((ROOT / f'flashrt_ros/{name}.py').read_text() for name in (
        'planner_outputs', 'planner_node', 'planner_link', 'capsule_services'))
    topics = set(re.findall(r"(?:_publisher|_listen)\(\w+, '([^']+)'", sources))
    services = set(re.findall(r"\('(\w+)', srv\.", sources))
    assert {'subgoal_outcome', 'scene', '~/instruction', '~/status'} <= topics
    assert len(services) == 7
    assert topics <= _texts(_enclave('planner'), 'topic')
    assert {f'~/{name}' for name in services} <= _texts(_enclave('planner'), 'service')


def test_the_security_policy_lists_the_topics_the_executor_creates():
    source = (ROOT / 'flashrt_ros/executor_outputs.py').read_text()
    created = set(re.findall(r"_publisher\(\w+, '([^']+)'", source))
    assert created
    assert created <= _texts(_enclave('executor'), 'topic')


def test_the_foxglove_layout_arranges_every_panel_it_configures():
    layout = json.loads((ROOT / 'config/foxglove_layout.json').read_text())

    def leaves(node):
        return [node] if isinstance(node, str) else leaves(node['first']) + leaves(node['second'])

    assert sorted(leaves(layout['layout'])) == sorted(layout['configById'])


def test_the_requests_in_the_foxglove_layout_are_those_of_the_services():
    pytest.importorskip('rclpy')
    from flashrt_ros.conductor import EXECUTOR_SERVICES

    layout = json.loads((ROOT / 'config/foxglove_layout.json').read_text())
    for panel in layout['configById'].values():
        if 'serviceName' in panel:
            kind = EXECUTOR_SERVICES[panel['serviceName'].removeprefix('/executor/')]
            kind.Request(**json.loads(panel['requestPayload']))


def test_the_embodiment_of_the_demo_differs_from_the_robot_only_in_scale():
    pytest.importorskip('rclpy')
    from flashrt_ros.embodiment import load_embodiment

    plain = load_embodiment(ROOT / 'config/embodiments/tabletop.yaml')
    demo = load_embodiment(ROOT / 'config/embodiments/tabletop_untrained.yaml')
    assert demo.names == plain.names
    for mine, robots in zip(demo.joints, plain.joints, strict=True):
        assert (mine.minimum, mine.maximum) == (robots.minimum, robots.maximum)
        assert mine.max_velocity == robots.max_velocity
