"""The language of the small planner: examples, what is held out, plans as text."""
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop import Goal
from flashrt_core.tabletop import World
from flashrt_core.tabletop.instructions import describe
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import draw_task
from flashrt_core.tabletop.instructions import Example
from flashrt_core.tabletop.instructions import format_plan
from flashrt_core.tabletop.instructions import HELD_OUT_CHAINS
from flashrt_core.tabletop.instructions import HELD_OUT_PAIRS
from flashrt_core.tabletop.instructions import MOST_GOALS
from flashrt_core.tabletop.instructions import parse_plan
from flashrt_core.tabletop.instructions import prompt
from flashrt_core.tabletop.instructions import read_instruction
from flashrt_core.tabletop.instructions import Scene
from flashrt_core.tabletop.instructions import why_not


def draw(count: int, seed: int = 5, held_out: bool = False) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [draw_example(rng, held_out) for _ in range(count)]


def test_the_same_seed_draws_the_same_examples() -> None:
    assert draw(50) == draw(50) != draw(50, seed=6)
    first = draw(3)[0]
    assert prompt(first.scene, first.instruction).endswith('\nplan: ')


def test_what_is_held_out_is_a_fixed_choice() -> None:
    assert HELD_OUT_PAIRS == {
        ('blue', 'yellow'), ('red', 'yellow'), ('orange', 'green'), ('yellow', 'red'),
        ('purple', 'yellow'), ('red', 'red')}
    assert HELD_OUT_CHAINS == {
        ('empty', 'put'), ('loose', 'put'), ('sort', 'home'), ('except', 'pick')}


def test_training_never_shows_what_is_held_out_and_held_out_examples_always_do() -> None:
    def combined(example: Example) -> bool:
        pairs = {(g.block, g.zone) for g in example.plan if g.zone}
        return bool(pairs & HELD_OUT_PAIRS
                    or set(zip(example.kinds, example.kinds[1:])) & HELD_OUT_CHAINS)

    shown = draw(800)
    assert not any(map(combined, shown))
    assert not any(example.asked & HELD_OUT_PAIRS for example in shown)
    assert not any('red' in example.scene.blocks for example in shown if 'sort' in example.kinds)
    assert all(map(combined, draw(200, held_out=True)))


def test_every_kind_of_instruction_comes_up_and_some_cannot_be_done() -> None:
    examples = draw(1500)
    kinds = Counter(kind for example in examples for kind in example.kinds)
    assert set(kinds) == {'put', 'pick', 'home', 'all', 'except', 'sort', 'empty', 'loose',
                          'nonsense'}
    assert min(kinds.values()) > 15
    cannot = sum(not example.plan for example in examples)
    assert 0.05 < cannot / len(examples) < 0.35
    assert {len(example.plan) for example in examples} == set(range(MOST_GOALS + 1))


def test_a_plan_names_only_what_is_on_the_table_and_comes_back_from_its_text() -> None:
    for example in draw(600) + draw(200, held_out=True):
        assert parse_plan(example.answer) == example.plan
        for goal in example.plan:
            assert goal.block in ('', *example.scene.blocks)
            assert goal.zone in ('', *example.scene.zones)


@pytest.mark.parametrize('text', ['', 'go home', 'go home; fly.', 'go home, then .',
                                  'put the red block.'])
def test_a_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ParameterInvalid):
        parse_plan(text)


def test_a_plan_as_text_reads_like_the_grammar() -> None:
    parts = (Goal('put', 'red', 'blue'), Goal('pick', 'green')), (Goal('home'),)
    text = 'put the red block in the blue zone; pick up the green block, then go home.'
    assert format_plan(*parts) == text and format_plan() == format_plan(()) == 'cannot.'
    assert parse_plan(text) == parse_plan(text.replace(', then ', '; ')) == (*parts[0], *parts[1])


def test_what_stands_between_two_goals_says_whether_the_same_part_asks_for_them() -> None:
    for example in draw(600) + draw(200, held_out=True):
        if example.plan:
            parts = example.answer[:-1].split(', then ')
            assert len(parts) == len(example.kinds)
            simple = [kind in ('put', 'pick', 'home') for kind in example.kinds]
            assert not any('; ' in part for part, one in zip(parts, simple) if one)


def test_the_scene_of_a_world_tells_blocks_zones_and_what_lies_in_them() -> None:
    scene = describe(World(3, blocks=3, zones=2).snapshot())
    assert len(scene.blocks) == 3 and len(scene.zones) == 2 and scene.places == (-1, -1, -1)
    scene = Scene(('red', 'blue'), ('green',), (-1, 0))
    assert str(scene) == 'blocks: red, blue. zones: green. blue in green.'


def test_a_task_puts_every_block_once_and_at_most_two_into_a_zone() -> None:
    rng = np.random.default_rng(0)
    for seed in range(30):
        scene = describe(World(seed, blocks=3, zones=2).snapshot())
        puts = [goal for goal in draw_task(rng, scene, 2).plan if goal.verb == 'put']
        zones = [goal.zone for goal in puts]
        assert sorted(goal.block for goal in puts) == sorted(scene.blocks)
        assert max(map(zones.count, zones)) <= 2


@pytest.mark.parametrize('held_out', [False, True])
def test_all_that_the_planner_is_trained_and_tested_on_is_read(held_out: bool) -> None:
    rng = np.random.default_rng(4)
    for _ in range(400):
        text = draw_example(rng, held_out).instruction
        assert read_instruction(text) == text
        assert read_instruction(f'  {text.capitalize()}.') == text


@pytest.mark.parametrize('text', [
    'hold', 'stop', 'no', '...', 'hello', 'abort', 'go', 'red', 'do not go home', '#', '# please',
    'never pick up the red block', 'throw the red block', 'put the red block',
    'put the pink block in the blue zone', 'go home, then', 'go home now or never go home',
    'plan: go home', 'put the red block in the blue zone, then ' * 90 + 'go home'])
def test_what_is_outside_of_the_trained_language_is_refused(text: str) -> None:
    with pytest.raises(ParameterInvalid, match='outside of what the planner was trained to read'):
        read_instruction(text)


def test_a_cause_is_told_where_the_scene_lacks_what_is_named_never_for_what_can_be_done() -> None:
    told: dict[bool, list[tuple[Example, str]]] = {True: [], False: []}
    for example in draw(1500):
        cause = why_not(example.instruction, str(example.scene))
        told[bool(example.plan)].append((example, cause))
    assert not [cause for _, cause in told[True] if cause]
    for example, cause in told[False]:
        lacking = [(b, z) for b, z in example.asked
                   if b not in example.scene.blocks or z not in example.scene.zones]
        assert cause or not lacking, example
    assert sum(bool(cause) for _, cause in told[False]) > len(told[False]) / 2


@pytest.mark.parametrize('instruction, scene, words', [
    ('put the red block in the blue zone', 'blocks: green. zones: red.', 'no red block, no blue'),
    ('empty the red zone into the blue zone', 'blocks: red. zones: blue.', 'no red zone, it is'),
    ('sort the blocks by colour', 'blocks: red, blue. zones: red.', 'has no blue zone, it is'),
    ('pick up the red block', '', 'no scene was given'),
    ('sing a song', 'blocks: red. zones: blue.', 'nothing of the language'),
    ('tidy up', 'blocks: red. zones: blue.', 'say it as "put the red block'),
])
def test_the_cause_names_what_is_lacking(instruction: str, scene: str, words: str) -> None:
    assert words in why_not(instruction, scene)


def test_of_a_scene_in_other_words_nothing_is_claimed() -> None:
    assert why_not('pick up the red block', 'a table with a cup') == ''
    assert why_not('go home', '') == ''
