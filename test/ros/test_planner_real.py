"""The planner node over an untrained model of the real architecture: the same plan to the bit."""

from pathlib import Path
import re
import shutil
import threading

from _planner_rig import planner_rig
from _planner_rig import TWO
from _ros_fixtures import wait_until
import pytest

from flashrt_core.tabletop.instructions import parse_plan
from flashrt_ros.config_files import here_or_below_config
from flashrt_ros.ros_environment import SOURCE_ROOT

pytestmark = pytest.mark.ros
SCENE = 'blocks: red. zones: blue.'
DEVICES = pytest.mark.parametrize(
    'device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])


def plan_of(goal) -> str:
    result = goal.result()
    assert result.success or result.code == 'cannot', result.message

    def text() -> str:  # a token is a byte; the last feedback may come after the result
        return ''.join(f.text for f in goal.feedback)

    wait_until(lambda: len(text().encode()) >= result.tokens, 'all feedback')
    return text()


@DEVICES
@pytest.mark.parametrize('form', ['tabletop', 'plain'])
def test_plans_are_of_the_grammar_and_the_same_after_whatever_came_between(
        tmp_path: Path, form: str, device: str) -> None:
    with planner_rig(tmp_path, real=True, device=device, prompt_form=form, temperature=1.0,
                     seed=5) as (planner, _):
        first = plan_of(planner.goal(TWO, scene=SCENE, dry_run=True))
        parse_plan(first)
        others = {plan_of(planner.goal(f'pick up the {colour} block', dry_run=True))
                  for colour in ('red', 'green', 'blue', 'purple')}
        assert len(others | {first}) > 1, 'the instruction matters'
        slow = planner.goal('go home', scene=SCENE, dry_run=True)
        threading.Event().wait(0.01)
        slow.cancel()
        slow.result()
        again = planner.goal(TWO, scene=SCENE, dry_run=True)
        assert plan_of(again) == first
        result = again.result()
        assert result.capsule_hit and result.tokens == len(first.encode())
        assert (result.context_tokens > 0) == (form == 'plain')


@DEVICES
def test_a_plan_written_with_drafts_is_the_one_without(tmp_path: Path, device: str) -> None:
    shipped = here_or_below_config('planner_bytes/planner.yaml')
    copied = shutil.copytree(Path(shipped).parent, tmp_path / 'drafting') / 'planner.yaml'
    copied.write_text(re.sub('draft_tokens: 0', 'draft_tokens: 3', copied.read_text()))
    plans, steps = [], []
    for drafts in (0, 3):
        with planner_rig(
                tmp_path, real=True, device=device, prompt_form='tabletop', seed=5,
                temperature=1.0, draft_tokens=drafts, planner_config=str(copied),
        ) as (planner, _):
            session = planner.session
            real, drafted = session.decode, []
            session.decode = lambda options, *, of=real, to=drafted, **more: (
                to.append(options.draft_tokens), of(options, **more))[1]
            plans.append(plan_of(planner.goal(TWO, scene=SCENE, dry_run=True)))
            steps.append(drafted)
    assert plans[0] == plans[1] and parse_plan(plans[0]) is not None
    assert set(steps[0]) == {0} and set(steps[1]) == {3}


@DEVICES
def test_a_plan_from_a_context_in_host_memory_is_the_one_from_the_device(
        tmp_path: Path, device: str) -> None:
    with planner_rig(tmp_path, real=True, device=device, prompt_form='plain') as (planner, _):
        first = plan_of(planner.goal(TWO, scene=SCENE, dry_run=True))
        store, name = planner.node.store, planner.session.boundary.session
        store.move('context', 'host', name)
        again = planner.goal(TWO, scene=SCENE, dry_run=True)
        assert plan_of(again) == first and again.result().capsule_hit
        assert store.get('context', name).tier == 'gpu', 'it moved up on the way'


@DEVICES
def test_a_plan_goes_on_from_a_capsule_as_it_went_on_before(tmp_path: Path, device: str) -> None:
    with planner_rig(tmp_path, real=True, device=device, prompt_form='plain') as (planner, _):
        plan_of(planner.goal(TWO, dry_run=True))
        session = planner.session
        end = session.position
        assert planner.call('snapshot', id='after').success
        assert planner.call('rollback', boundaries=1).success
        before = session.position
        assert before < end, 'the mark before the first token'
        assert planner.call('restore', id='after').success and session.position == end
        listed = planner.call('list_capsules')
        assert {c.id for c in listed.capsules} == {'context', 'after'}
        context = next(c for c in listed.capsules if c.id == 'context')
        assert context.pinned and context.position == planner.node.engine.context_tokens


def test_random_weights_are_told_once_with_the_parameter_that_gives_trained_ones(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with planner_rig(tmp_path, real=True):
        pass
    told = [line for line in ''.join(capfd.readouterr()).splitlines() if 'are random' in line]
    for node, parameter in (('[executor]', 'give checkpoint'), ('[planner]', 'planner_config')):
        assert [parameter in line for line in told if node in line] == [True], told
    settings = Path('resource/models/planner/planner.yaml')
    assert all(str(settings) in line for line in told if '[planner]' in line)
    assert 'weights:' in (SOURCE_ROOT / settings).read_text()


def test_the_capsule_services_refuse_as_the_executors_do(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, _):
        assert planner.call('drop', id='context').code == 'parameter_invalid'
        assert planner.call('pin', id='context', pinned=False).code == 'parameter_invalid'
        assert planner.call('restore', id='nowhere').code == 'capsule_not_found'
        assert planner.call('snapshot', id='../x').code == 'capsule_id_invalid'
        assert planner.call('rollback').code == 'parameter_invalid'
        assert planner.call('snapshot', id='a', tier='disk').code == 'tier_unavailable'
        assert planner.call('snapshot', id='a').info.id == 'a'
        assert planner.call('move', id='a', tier='host').info.tier == 'host'
        assert planner.call('pin', id='a', pinned=True).info.pinned
        assert 'unpin' in planner.call('drop', id='a').message
        assert planner.call('pin', id='a', pinned=False).success
        assert planner.call('drop', id='a').success
        planner.model.switches.step_s = 0.02
        goal = planner.goal(TWO).until('decode')
        for verb, fields in (('restore', {'id': 'context'}), ('rollback', {'boundaries': 1}),
                             ('snapshot', {})):
            reply = planner.call(verb, **fields)
            assert reply.code == 'busy' and 'cancel' in reply.message, verb
        goal.cancel()
        goal.result()
        wait_until(lambda: planner.node.report.sections()['refusals'].values.get('busy') == '3',
                   'the refusals to be counted')


def test_every_service_answers_wrong_state_before_configure(tmp_path: Path) -> None:
    from _fake_planner import FakePlanner
    model = FakePlanner(bind_error=RuntimeError('no such weights'))
    with planner_rig(tmp_path, model) as (planner, _):
        assert planner.node.phase == 'failed'
        for verb in ('snapshot', 'restore', 'rollback', 'list_capsules', 'pin', 'drop', 'move'):
            assert planner.call(verb).code == 'wrong_state', verb
        assert planner.goal(TWO).result().code == 'wrong_state'
        wait_until(lambda: planner.statuses and planner.statuses[-1].phase == 'failed', 'status')


def test_a_lost_device_asks_for_the_documented_exit_status(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, _):
        planner.model.switches.lost = True
        assert not planner.goal(TWO).result().success
        wait_until(planner.stop_request.is_set, 'the request to end')
        assert planner.stop_request.exit_code == 75
