"""Instructions in plain English, the scene as text, and the plan that they ask for.

This is the language that the small planner is trained on: a generated grammar over the tabletop's
colours. The scene text is an oracle: it is written from the world's state, not seen by a camera.

``scene := "blocks: " C {", " C} ". zones: " C {", " C} "." {" " C " in " C "."}``
``plan := part {", then " part} "." | "cannot."``   (a part of the instruction each)
``part := goal {"; " goal}``                        (goals as in ``tasks``)
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import re
from typing import NamedTuple

import numpy as np

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.state import COLOURS
from flashrt_core.tabletop.state import MAX_BLOCKS
from flashrt_core.tabletop.state import MAX_ZONES
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import in_zone
from flashrt_core.tabletop.tasks import parse_task

CANNOT = 'cannot.'
AND = '; '        # between goals of one part of an instruction
THEN = ', then '  # between parts
MOST_GOALS = 4
_HELD_OUT_PAIRS = 6    # of the 36 pairs of block and zone colour
_HELD_OUT_CHAINS = 4   # of the ordered pairs of kinds of parts

# Text a person may type that the robot cannot do, whatever lies on the table.
_NONSENSE = (
    'sing a song', 'make me a coffee', 'what time is it', 'fly to the moon', 'open the door',
    'throw the table away', 'tell me a joke', 'stack all the chairs', 'paint the wall',
    'put the cat in the box', 'drive home', 'who are you', 'pick up the phone', 'eat the block',
)  # fmt: skip
_PUT = (
    'put the {b} block in the {z} zone', 'place the {b} block in the {z} zone',
    'move the {b} block to the {z} zone', 'bring the {b} block into the {z} zone',
    'the {b} block belongs in the {z} zone', 'put {b} in {z}',
    'take the {b} block and put it in the {z} zone',
    'pick up the {b} block and place it in the {z} zone',
)  # fmt: skip
_PICK = (
    'pick up the {b} block', 'grab the {b} block', 'lift the {b} block', 'take hold of {b}',
    'hold up the {b} block',
)  # fmt: skip
_HOME = ('go home', 'return home', 'go back to your home pose', 'move the arm home')
_ALL = (
    'put every block in the {z} zone', 'put all blocks into the {z} zone',
    'move everything to the {z} zone', 'everything goes in {z}',
)  # fmt: skip
_EXCEPT = (
    'put everything except the {b} block in the {z} zone',
    'move all blocks but the {b} one to the {z} zone',
)  # fmt: skip
_SORT = (
    'sort the blocks by colour', 'put each block in the zone of its colour',
    'every block goes to its own colour',
)  # fmt: skip
_EMPTY = (
    'move what is in the {y} zone to the {z} zone', 'empty the {y} zone into the {z} zone',
)  # fmt: skip
_LOOSE = (
    'put what lies on the table in the {z} zone', 'put the loose blocks in the {z} zone',
)  # fmt: skip
_CHAIN = ('{0}, then {1}', '{0} and then {1}', 'first {0}, then {1}', 'after you {0}, {1}')
_CHAIN_BACK = ('before you {1}, {0}', '{1}, but first {0}')
_POLITE = ('{0}', '{0}', '{0}', 'please {0}', '{0} please', 'robot, {0}', 'could you {0}')


@dataclass(frozen=True)
class Scene:
    """What lies where. ``places``: for each block the index of its zone, -1 on the table."""

    blocks: tuple[str, ...]
    zones: tuple[str, ...]
    places: tuple[int, ...]

    def __str__(self) -> str:
        inside = ''.join(
            f' {block} in {self.zones[place]}.'
            for block, place in zip(self.blocks, self.places, strict=True)
            if place >= 0
        )
        return f'blocks: {", ".join(self.blocks)}. zones: {", ".join(self.zones)}.{inside}'


@dataclass(frozen=True)
class Example:
    """One instruction in one scene.

    ``parts``: the goals of each part of the instruction, none where the robot cannot do it;
    ``kinds``: of the parts of the instruction, ``asked``: (block, zone) pairs that it asks for,
    possible or not; both for the choice of what is held out.
    """

    instruction: str
    scene: Scene
    parts: tuple[tuple[Goal, ...], ...]
    kinds: tuple[str, ...]
    asked: frozenset[tuple[str, str]] = frozenset()

    @property
    def plan(self) -> tuple[Goal, ...]:
        """Return the goals of all parts."""
        return tuple(goal for part in self.parts for goal in part)

    @property
    def answer(self) -> str:
        """Return the text that the planner is to write."""
        return format_plan(*self.parts)

    @property
    def held_out(self) -> bool:
        """Say whether it combines what no training example combines."""
        named = {(g.block, g.zone) for g in self.plan if g.verb == 'put'}
        chains = set(zip(self.kinds, self.kinds[1:]))
        return bool(named & HELD_OUT_PAIRS or chains & HELD_OUT_CHAINS)

    @property
    def shown(self) -> bool:
        """Say whether training may show it.

        What asks in vain for a pair that is held out is not shown either: a planner that saw such
        a pair only where it is impossible would learn that it always is.
        """
        return not (self.held_out or self.asked & HELD_OUT_PAIRS)


def _fixed_choice(items: Sequence[tuple[str, str]], count: int) -> frozenset[tuple[str, str]]:
    """Pick by a hash of the names, so that the choice is fixed without a list to keep."""
    ranked = sorted(items, key=lambda pair: hashlib.sha256('/'.join(pair).encode()).hexdigest())
    return frozenset(ranked[:count])


KINDS = ('put', 'pick', 'home', 'all', 'except', 'sort', 'empty', 'loose')
HELD_OUT_PAIRS = _fixed_choice([(b, z) for b in COLOURS for z in COLOURS], _HELD_OUT_PAIRS)
HELD_OUT_CHAINS = _fixed_choice(
    [(a, b) for a in KINDS for b in ('put', 'pick', 'home') if (a, b) != ('put', 'put')],
    _HELD_OUT_CHAINS,
)


def format_plan(*parts: Sequence[Goal]) -> str:
    """Return a plan as text, the goals of each part of an instruction; ``parse_plan`` reads it.

    A planner that writes where a part ends need not count goals to know which part it is in.
    """
    return THEN.join(AND.join(map(str, part)) for part in parts) + '.' if any(parts) else CANNOT


def parse_plan(text: str) -> tuple[Goal, ...]:
    """Return the goals of a plan's text, none for "cannot.".

    :raises ParameterInvalid: the text is no plan.
    """
    if text == CANNOT:
        return ()
    if not text.endswith('.'):
        raise ParameterInvalid(f'plan {text!r:.120} does not end with "."; it was cut short')
    goals = text[:-1].replace(THEN, AND).split(AND)
    return tuple(goal for text in goals for goal in parse_task(text))


def describe(state: WorldState) -> Scene:
    """Return the scene of a world's state: the oracle that stands in for a scene reader."""
    places = []
    for block in range(len(state.blocks)):
        within = [z for z in range(len(state.zones)) if in_zone(state, block, z)]
        places.append(within[0] if within else -1)
    return Scene(state.block_names, state.zone_names, tuple(places))


def prompt(scene: Scene, instruction: str) -> str:
    """Return the text that stands before the answer."""
    return f'{scene} say: {instruction}\nplan: '


def read_instruction(text: str) -> str:
    """Return an instruction as the planner was trained to read it: lower case, no full stop.

    What lies outside the trained language is not safe to try: the planner makes a plan of it.

    :raises ParameterInvalid: it is none of the language.
    """
    plain = ' '.join(text.lower().split()).rstrip('.! ')
    if _MARK in plain or _PART.sub(_MARK, plain) not in _LANGUAGE:
        raise ParameterInvalid(
            f'instruction is {text!r:.120}, which is outside of what the planner was trained to '
            f'read; {_SAY}')
    return plain


def why_not(instruction: str, scene: str) -> str:
    """Return in words why the robot cannot do an instruction, '' where that is not known.

    Known is that it is none of the language, or names a block or zone that the scene lacks;
    sorting needs a zone for each block.

    :param scene: as ``Scene`` writes it, '' for none; of another text nothing is known.
    """
    try:
        parts = [part[0] for part in _PART.finditer(read_instruction(instruction))]
    except ParameterInvalid:
        parts = []
    if not parts:
        return f'it asks for nothing of the language of tasks; {_SAY}'
    listed = _SCENE.match(scene) if scene else None
    if scene and listed is None:
        return ''
    there = {kind: (listed[kind] if listed else '').split(', ') for kind in ('block', 'zone')}
    named = [(kind[:-1] if kind == 'zone2' else kind, colour) for part in parts
             for form in _NAMED if (match := form.fullmatch(part))
             for kind, colour in match.groupdict().items()]
    if any(part in _SORT for part in parts):
        named += [('zone', colour) for colour in there['block'] if colour]
    lacks = dict.fromkeys((kind, colour) for kind, colour in named if colour not in there[kind])
    if not lacks:
        return ''
    listing = ', '.join(f'no {colour} {kind}' for kind, colour in lacks)
    return (f'the scene has {listing}, it is {listed[0]!r:.200}' if listed else
            f'no scene was given, so there is {listing}; give one in the goal or on topic scene')


def _forms(part: str) -> frozenset[str]:
    """Return every way in which ``_draw`` puts one to three parts together."""
    two = [form.format(part, part) for form in _CHAIN]
    three = [form.format(text, part) for form in _CHAIN[:2] for text in two]
    back = [form.format(part, part) for form in _CHAIN_BACK]
    return frozenset(dress.format(text) for dress in _POLITE
                     for text in (part, *two, *three, *back, *_NONSENSE))


_SAY = ('say it as "put the red block in the blue zone", "pick up the red block", "sort the '
        'blocks by colour" or "go home", up to three with ", then " between')
_COLOUR = '|'.join(COLOURS)
_FORMS = sorted((*_PUT, *_PICK, *_HOME, *_ALL, *_EXCEPT, *_SORT, *_EMPTY, *_LOOSE),
                key=len, reverse=True)
_PART = re.compile('|'.join(
    rf'\b{text.format(**dict.fromkeys("bzy", f"(?:{_COLOUR})"))}\b' for text in _FORMS))
_NAMED = tuple(re.compile(text.format(
    b=f'(?P<block>{_COLOUR})', z=f'(?P<zone>{_COLOUR})', y=f'(?P<zone2>{_COLOUR})'))
    for text in _FORMS)
_SCENE = re.compile(r'blocks: (?P<block>[^.]*)\. zones: (?P<zone>[^.]*)\.')
_MARK = '#'  # stands for a part
_LANGUAGE = _forms(_MARK)


def draw_example(rng: np.random.Generator, held_out: bool = False, first: str = '',
                 deep: bool = False) -> Example:
    """
    Draw one example, of the training set or, with ``held_out``, of what it never shows.

    :param first: kind of its first part, one of ``KINDS``; '' leaves it to chance.
    :param deep: its later parts are of any kind; else of the three simple ones.
    """
    while True:
        example = _draw(rng, first=first, deep=deep)
        if example.held_out if held_out else example.shown:
            return example


def draw_task(rng: np.random.Generator, scene: Scene, most_in_a_zone: int) -> Example:
    """Draw an instruction for this scene whose plan can be judged by where everything is after it.

    Every block is put once, at most ``most_in_a_zone`` of them into a zone, and then the arm may
    be asked to go home. What training holds out comes up too.
    """
    while True:
        plan = (example := _draw(rng, scene)).plan
        puts = plan[:-1] if plan and plan[-1] == Goal('home') else plan
        crowds = Counter(goal.zone for goal in puts)
        if (sorted(goal.block for goal in puts) == sorted(scene.blocks)
                and all(goal.verb == 'put' for goal in puts)
                and max(crowds.values()) <= most_in_a_zone):
            return example


def _draw(rng: np.random.Generator, scene: Scene | None = None, first: str = '',
          deep: bool = False) -> Example:
    scene = scene or _draw_scene(rng)
    if _chance(rng, 0.05) and not first:
        text = _pick(rng, _NONSENSE)
        return Example(_dress(rng, text), scene, (), ('nonsense',))
    parts = [_draw_part(rng, scene, simple=False, kind=first)]
    while len(parts) < 3 and _chance(rng, 0.4):
        parts.append(_draw_part(rng, scene, simple=not deep))
    if sum(len(part.goals) for part in parts if part.possible) > MOST_GOALS:
        parts = parts[:1]
    text = parts[0].text
    if len(parts) == 2 and _chance(rng, 0.25):
        text = _pick(rng, _CHAIN_BACK).format(parts[0].text, parts[1].text)
    else:
        for at, part in enumerate(parts[1:]):
            text = _pick(rng, _CHAIN if at == 0 else _CHAIN[:2]).format(text, part.text)
    goals = tuple(part.goals for part in parts)
    return Example(
        _dress(rng, text), scene, goals if all(part.possible for part in parts) else (),
        tuple(part.kind for part in parts),
        frozenset((goal.block, goal.zone) for part in goals for goal in part if goal.zone))


Asked = tuple[str, tuple[Goal, ...], bool]  # text, goals, whether the scene has what it names


class Part(NamedTuple):
    """A part of an instruction; ``possible``: the scene has what the text names."""

    kind: str
    text: str
    goals: tuple[Goal, ...]
    possible: bool


def _draw_part(rng: np.random.Generator, scene: Scene, simple: bool, kind: str = '') -> Part:
    kinds = ('put', 'put', 'pick', 'home') if simple else (*KINDS, 'put', 'put', 'put', 'pick')
    kind = kind or _pick(rng, kinds)
    makers: dict[str, Callable[[np.random.Generator, Scene], Asked]] = {
        'put': _put, 'pick': _pick_up, 'home': _home, 'all': _all, 'except': _except,
        'sort': _sort, 'empty': _empty, 'loose': _loose,
    }  # fmt: skip
    text, goals, possible = makers[kind](rng, scene)
    return Part(kind, text, goals, possible and bool(goals))


def _put(rng: np.random.Generator, scene: Scene) -> Asked:
    block, zone = _name(rng, scene.blocks), _name(rng, scene.zones)
    there = block in scene.blocks and zone in scene.zones
    text = _pick(rng, _PUT).format(b=block, z=zone)
    return text, (Goal('put', block, zone),), there


def _pick_up(rng: np.random.Generator, scene: Scene) -> Asked:
    block = _name(rng, scene.blocks)
    text = _pick(rng, _PICK).format(b=block)
    return text, (Goal('pick', block),), block in scene.blocks


def _home(rng: np.random.Generator, scene: Scene) -> Asked:
    return _pick(rng, _HOME), (Goal('home'),), True


def _all(rng: np.random.Generator, scene: Scene) -> Asked:
    zone = _name(rng, scene.zones)
    text = _pick(rng, _ALL).format(z=zone)
    return text, _puts(scene.blocks, zone), zone in scene.zones


def _except(rng: np.random.Generator, scene: Scene) -> Asked:
    block, zone = _name(rng, scene.blocks), _name(rng, scene.zones)
    text = _pick(rng, _EXCEPT).format(b=block, z=zone)
    rest = _puts([b for b in scene.blocks if b != block], zone)
    return text, rest, block in scene.blocks and zone in scene.zones


def _sort(rng: np.random.Generator, scene: Scene) -> Asked:
    text = _pick(rng, _SORT)
    goals = tuple(Goal('put', b, b) for b in scene.blocks)
    return text, goals, set(scene.blocks) <= set(scene.zones)


def _empty(rng: np.random.Generator, scene: Scene) -> Asked:
    source, zone = _shuffled(rng, COLOURS)[:2]
    if len(scene.zones) > 1 and not _chance(rng, 0.06):
        source, zone = _shuffled(rng, scene.zones)[:2]
    text = _pick(rng, _EMPTY).format(y=source, z=zone)
    at = scene.zones.index(source) if source in scene.zones else len(scene.zones)
    inside = [b for b, place in zip(scene.blocks, scene.places, strict=True) if place == at]
    return text, _puts(inside, zone), zone in scene.zones


def _loose(rng: np.random.Generator, scene: Scene) -> Asked:
    zone = _name(rng, scene.zones)
    text = _pick(rng, _LOOSE).format(z=zone)
    loose = [b for b, place in zip(scene.blocks, scene.places, strict=True) if place < 0]
    return text, _puts(loose, zone), zone in scene.zones


def _puts(blocks: Sequence[str], zone: str) -> tuple[Goal, ...]:
    return tuple(Goal('put', b, zone) for b in blocks)


def _draw_scene(rng: np.random.Generator) -> Scene:
    blocks = _colours(rng, 1 + _below(rng, MAX_BLOCKS))
    zones = _colours(rng, 1 + _below(rng, MAX_ZONES))
    if _chance(rng, 0.15):  # scenes that can be sorted are rare by chance
        zones = _shuffled(rng, (*blocks, *(z for z in zones if z not in blocks))[:MAX_ZONES])
    places = tuple(
        _below(rng, len(zones)) if _chance(rng, 0.35) else -1 for _ in blocks
    )
    return Scene(blocks, zones, places)


def _name(rng: np.random.Generator, there: Sequence[str]) -> str:
    """Draw a colour, mostly one that is there."""
    return _pick(rng, COLOURS) if _chance(rng, 0.06) else _pick(rng, there)


def _dress(rng: np.random.Generator, text: str) -> str:
    return _pick(rng, _POLITE).format(text)


def _colours(rng: np.random.Generator, count: int) -> tuple[str, ...]:
    return _shuffled(rng, COLOURS)[:count]


def _shuffled(rng: np.random.Generator, items: Sequence[str]) -> tuple[str, ...]:
    keys = rng.random(len(items)).tolist()
    return tuple(items[i] for i in sorted(range(len(items)), key=keys.__getitem__))


def _pick(rng: np.random.Generator, items: Sequence[str]) -> str:
    return items[_below(rng, len(items))]


def _below(rng: np.random.Generator, count: int) -> int:
    # Only Generator.random is drawn from, whose stream NumPy keeps.
    return int(rng.random() * count)


def _chance(rng: np.random.Generator, probability: float) -> bool:
    return bool(rng.random() < probability)
