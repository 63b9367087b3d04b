"""A bound planner: prefill, append, decode, fork, all on one lane; the same for every family."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleInfo
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Mark
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import PromptTooLong
from flashrt_core.planners import appending
from flashrt_core.planners import layout
from flashrt_core.planners.branches import Branches
from flashrt_core.planners.branches import BranchRoom
from flashrt_core.planners.chunks import Chunk
from flashrt_core.planners.followed import Followed
from flashrt_core.planners.followed import NONE
from flashrt_core.planners.followed import words_of
from flashrt_core.planners.grammar import compiled_grammar
from flashrt_core.planners.grammar import Grammar
from flashrt_core.planners.grammar import Matcher
from flashrt_core.planners.operations import Inputs
from flashrt_core.planners.operations import Job
from flashrt_core.planners.operations import Mirror
from flashrt_core.planners.operations import Operation
from flashrt_core.planners.operations import Runner
from flashrt_core.planners.options import Options
from flashrt_core.planners.protocol import Appended
from flashrt_core.planners.protocol import Settings
from flashrt_core.planners.protocol import Step
from flashrt_core.planners.sampling import check_mask
from flashrt_core.planners.sampling import check_sampled
from flashrt_core.planners.sampling import open_mask
from flashrt_core.planners.stream import Stream
from flashrt_core.planners.text import Tokenizer
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Lane
from flashrt_core.runtime import LaneFuture
from flashrt_core.runtime import Plan

DEFAULTS = Options()


class PlannerSession:
    """Buffers, plans and boundary of one planner; made by a family's ``bind``.

    One operation at a time: a second raises LaneBusy until the first one's future is done. All
    methods may be called from any thread; what they do to the device happens on the lane thread.
    A plan that fails or is dropped leaves the last committed boundary, and the session usable.
    """

    def __init__(
        self,
        config: Any,
        settings: Settings,
        buffers: BufferSet,
        lane: Lane,
        plans: Mapping[tuple[Any, ...], Plan],
        boundary: Boundary,
        runner: Runner,
        room: BranchRoom | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.settings = settings
        self.buffers = buffers
        self.lane = lane
        self.boundary = boundary
        self.runner = runner
        self.tokenizer = tokenizer
        self.mtp = layout.MTP_KV in buffers
        self.vocab = int(config.vocab)
        self.context = int(config.context)
        self.ports = layout.ports(self.context, self.vocab)
        self._plans = dict(plans)
        self._room = room
        self._open = open_mask(self.vocab, settings.known_tokens or None)
        self._mask_is_open = False
        self._redo: Job | None = None
        boundary.on_restore.append(self._restored)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def mirror(self) -> Mirror:
        """What the host knows of the state."""
        return self.runner.mirror

    @property
    def position(self) -> int:
        """Tokens in the state."""
        return self.mirror.position

    @property
    def pending(self) -> int | None:
        """The token given out that is not in the state yet, or None."""
        return self.mirror.pending

    @property
    def busy(self) -> str:
        """What runs now, or ''."""
        return self.runner.busy

    def plans_of(self, chunks: Sequence[Chunk]) -> list[Plan]:
        """Return the plans of chunks to be taken in; a step before can no more be taken back."""
        self._redo = None
        return [self._plans['chunk', *chunk.key] for chunk in chunks]

    def memory(self) -> dict[str, int]:
        """Return bytes by purpose, see ``layout.memory_report``."""
        branches = None if self._room is None else self._room.buffers
        return layout.memory_report(self.buffers, branches, self.runner.undo.nbytes)

    # -- operations -----------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int]) -> Operation[Appended]:
        """Reset the state and take ``tokens`` in. Raises and answers as ``append``."""
        return appending.append(self, tokens, fresh=True)

    def append(self, tokens: Sequence[int]) -> Operation[Appended]:
        """Take ``tokens`` in, after the pending one if there is one.

        A boundary is committed after each chunk: a cancel, drop or failure keeps the last one.

        :raises PromptTooLong, PromptEmpty, TokenUnknown: before anything runs.
        :raises LaneBusy, BranchesLive, SessionPoisoned, LaneClosed: not now.
        """
        return appending.append(self, tokens, fresh=False)

    def restore_and_append(self, store: CapsuleStore, id: str, tokens: Sequence[int], *,
                           numerics: str = 'same') -> Operation[Appended]:
        """Restore a capsule of this session and take ``tokens`` in behind it, as one operation.

        The state is that of ``store.restore``, then ``append``. From host memory the copies run
        beside the first chunk, each layer of which waits for its own state: together they take
        about as long as the longer one. A cancel before it starts leaves the state as it was; a
        cancel later, the last committed chunk. As a restore, it lifts poison and ends branches;
        unlike one, it does not end what runs. ``Appended.restored`` is the restore's report.

        :param numerics: as of ``store.restore``.
        :raises CapsuleNotFound, IdentityMismatch, CapsuleCorrupt, BudgetFull: state untouched; by
            its future, too, where the capsule went or changed before the lane came to it.
        :raises SessionPoisoned: by its future, the copies failed: restore again.
        :raises PromptTooLong, PromptEmpty, TokenUnknown: before anything runs.
        :raises LaneBusy, LaneClosed: not now.
        """
        return appending.restore_and_append(self, store, id, tokens, numerics)

    def decode(
        self,
        options: Options | None = None,
        *,
        drafts: Sequence[int] = (),
        limit: int | None = None,
        mask: Tensor | None = None,
        matcher: Matcher | None = None,
        revocable: bool = False,
        epoch: int | None = None,
    ) -> Operation[Step]:
        """Feed the pending token, if any, and sample what follows: the tokens of one step.

        With ``options.draft_tokens`` a step gives one to that many plus one tokens, the same ones
        as without. The noise of a token depends on seed, branch and position alone.

        :param options: None keeps the parameters and the seed that the state holds.
        :param drafts: proposals for the tokens after the pending one, in place of MTP's.
        :param limit: tokens that the step may give out at most.
        :param mask: int32 ``[words]`` on the CPU, see ``sampling.mask_words``; without drafts.
        :param matcher: of ``follow``, in place of a mask: each token keeps to its grammar and is
            noted as followed in the state; the caller has the matcher accept what was given out.
            With MTP's drafts the step is two plans: the host makes their masks in between.
        :param revocable: keeps what ``keep`` needs to take some of the tokens back.
        :param epoch: of the operation that this one goes on from; its future raises TickDropped
            if a restore, rollback or reset came between.
        :raises PromptEmpty: nothing in the state. :raises PromptTooLong: the context is full.
        :raises ConfigError: more drafts than captured, or drafts without an MTP head.
        :raises PlannerError: the matcher is not where the state is, or allows no token.
        Otherwise as ``append``; its future raises ContractError if no token can be chosen.
        """
        ids = appending.check_tokens(drafts, self.vocab)
        if mask is not None:
            check_mask(mask, self.vocab, 'the mask')
        with self.runner.starting() as now:
            K = self._drafts_of(options, ids, limit, mask)
            greedy = options is not None and options.greedy
            fed = self.pending is not None
            inputs = Inputs(options, K + 1, None if mask is None else mask[None], ids[:K])
            jobs = []
            if matcher is not None:
                self.mirror.followed.check(matcher.grammar.source, len(matcher.tokens))
                inputs.words = words_of(matcher.grammar.source)
                inputs.keep_to(matcher)
                if K and not ids.size:
                    land = partial(self._land_drafts, inputs, matcher, K)
                    fill = partial(self.fill_sampler, inputs)
                    jobs.append(Job(self._plans['propose', K, greedy], fill, land))
            if K:
                given = ids.size or jobs
                kind: tuple[Any, ...] = ('given' if given else 'draft', K, greedy)
            else:
                kind = ('step' if fed else 'sample', greedy)
            fill = partial(self.fill_sampler, inputs, revocable)
            jobs.append(Job(self._plans[kind], fill, partial(self._land_step, fed, K)))
            operation = self.runner.launch('decode', jobs, now if epoch is None else epoch, _step)
            self._redo = jobs[-1] if revocable else None
            return operation

    def keep(self, count: int) -> Operation[Step]:
        """Take back all but the first ``count`` tokens of the last step, which was revocable.

        The step runs again from where it began and gives out fewer: nothing stays ahead.

        :raises ConfigError: no such step was the last thing done.
        """
        with self.runner.starting() as epoch:
            job, point = self._redo, self.runner.point
            if job is None or point is None or count < 1:
                raise ConfigError(
                    f'keep({count}) is refused: it follows a revocable decode, with 1 token or '
                    'more to keep'
                )
            self._redo = None

            def fill() -> None:
                self.runner.go_back(point)
                job.fill()
                control = self.buffers['host.control'].tensor
                control[layout.LIMIT] = min(count, int(control[layout.LIMIT]))

            again = Job(job.plan, fill, job.land)
            return self.runner.launch('keep', [again], epoch, _step)

    def reset(self) -> LaneFuture[None]:
        """Make the state empty and drop what runs or waits; lifts poison. Branches end.

        :raises LaneBusy: another verb waits. :raises LaneClosed: the lane has ended.
        """

        def apply() -> None:
            self.make_empty()
            self._new_epoch()

        return self.lane.at_segment_end(apply, 'reset')

    def fork(self, seeds: Sequence[int], numbers: Sequence[int] | None = None) -> Branches:
        """Return branches of the state, one per seed, that share its KV; the trunk stands still.

        Waits for a copy of the small state: not on the lane thread.

        :param numbers: branch numbers, part of the noise; None keeps the trunk's, so that equal
            seeds give equal tokens.
        :raises ConfigError: no seeds, or more than ``settings.branches``.
        :raises PromptEmpty: the state is empty. Otherwise as ``append``.
        """
        if self._room is None:
            raise ConfigError('fork is refused: bind with branches 1 or more')
        with self.runner.starting() as epoch:
            self._check_begun()
            branches = Branches(self, self._room, epoch, seeds, numbers)
            begin = Job(None, lambda: None, branches.begin)
            copied = self.runner.launch('fork', [begin], epoch, lambda operation: None)
            self.runner.tenant = branches
            self._redo = None
        try:
            copied.result()
        except BaseException:
            branches.drop()
            raise
        return branches

    def stream(
        self,
        options: Options | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        before: Sequence[int] = (),
    ) -> Stream:
        """Return a stream that decodes as it is asked for tokens, see ``Stream``.

        :param tokenizer: gives the tokens' text; None takes the session's, if it has one.
        :param before: tokens of the text that this stream goes on with.
        :raises ConfigError: stop texts or a grammar without a tokenizer; otherwise as ``Grammar``.
        """
        chosen = DEFAULTS if options is None else options
        tokenizer = tokenizer or self.tokenizer
        if chosen.stop and tokenizer is None:
            raise ConfigError('stop texts need a tokenizer; give one or name it in the config')
        grammar = None
        if chosen.grammar is not None:
            if tokenizer is None:
                raise ConfigError('a grammar needs a tokenizer; give one or name it in the config')
            grammar = compiled_grammar(chosen.grammar, tokenizer, self.vocab)
        return Stream(self, chosen, tokenizer, grammar, before)

    def follow(self, grammar: Grammar) -> tuple[Matcher, int]:
        """Return a matcher that stands where the state does, and the epoch that it is of.

        It has followed what the state's last tokens have of the grammar's text, nothing where they
        were not sampled under one. Waits for the lane: not on its thread.

        :raises PlannerError: the state is inside the text of another grammar.
        """

        def read() -> tuple[Followed, list[int], int, int]:
            mirror = self.mirror
            tokens = self.buffers['history'].row(0)[: mirror.followed.count].tolist()
            position = mirror.position + (mirror.pending is not None)
            return mirror.followed, tokens, position, mirror.epoch

        followed, tokens, position, epoch = self.lane.call(read).result()
        followed.check(grammar.source)
        return grammar.matcher(tokens, position - len(tokens)), epoch

    def close(self) -> None:
        """Drop what runs at its segment's end and end the lane. Closing twice is allowed."""
        self.lane.close()

    # -- inputs and outputs: lane thread ----------------------------------------------------------

    def fill_sampler(self, inputs: Inputs, undo: bool = False) -> None:
        """Write the inputs of one decode step; lane thread."""
        b, masks = self.buffers, inputs.masks
        control = b['host.control'].tensor
        chosen = DEFAULTS if inputs.options is None else inputs.options
        control[layout.LATCH] = inputs.options is not None
        control[layout.SEED] = chosen.signed_seed
        control[layout.LIMIT] = inputs.limit
        under = inputs.words != NONE
        control[layout.HISTORY] = self.mirror.followed.count if under else self.context
        control[layout.GRAMMAR :] = torch.tensor(inputs.words)
        b['host.parameters'].tensor.copy_(torch.tensor(chosen.parameters()))
        b['host.drafts'].tensor[: inputs.drafts.size].copy_(torch.from_numpy(inputs.drafts))
        if masks is not None or not self._mask_is_open:
            b['host.mask'].tensor.copy_(self._open.expand_as(b['host.mask'].tensor))
            if masks is not None:
                b['host.mask'].tensor[: len(masks)].copy_(masks)
            self._mask_is_open = masks is None
        if undo:
            self.runner.take()

    def land(self, expected: int) -> list[int]:
        """Read the report and set the mirror; raises ContractError where the device is elsewhere.

        State kept under another position than its own spoils every later use of it: say so.
        """
        report: list[int] = self.buffers['host.report'].tensor.tolist()
        position, pending = report[layout.POSITION], report[layout.PENDING]
        self.mirror.position = position
        self.mirror.pending = pending if pending >= 0 else None
        words = self.buffers['host.control'].tensor[layout.GRAMMAR :].tolist()
        self.mirror.followed = Followed.read([report[layout.FOLLOWED], *words], self.context)
        if position != expected:
            raise ContractError(
                f'the device is at position {position}, the host expected {expected}; restore a '
                'capsule or reset, and report it'
            )
        return report

    def _land_drafts(self, inputs: Inputs, matcher: Matcher, K: int) -> None:
        """Have the matcher judge what MTP proposes, before the rows are verified."""
        inputs.drafts = self.buffers['drafts'].tensor[:K].cpu().numpy().copy()
        inputs.keep_to(matcher)

    def _land_step(self, fed: bool, drafted: int) -> Step:
        given = int(self.buffers['host.report'].tensor[layout.GIVEN])
        report = self.land(self.mirror.position + (given if fed else 0))
        tokens = report[layout.REPORT_HEAD :][:given]
        check_sampled(tokens, self.mirror.position - given + 1)
        return Step(tuple(tokens), self.mirror.position, drafted, given - 1 if drafted else 0)

    def make_empty(self) -> None:
        """Write the empty state; lane thread."""
        reset_state(self.buffers)
        self.boundary.note_kv_rewrite(0)
        self.boundary.adopt('', True)
        self.mirror.position, self.mirror.pending = 0, None
        self.mirror.followed = Followed()

    def _restored(self, info: CapsuleInfo | Mark, rows: tuple[int, ...]) -> None:
        """Follow a restore or rollback; a state under another position is refused here."""
        if isinstance(info, Mark):
            self.mirror.return_to(info)
        else:
            self.read_mirror()
            if self.mirror.position != info.position:
                raise CapsuleCorrupt(
                    f'the state says position {self.mirror.position}, its capsule '
                    f'{info.position}; drop it'
                )
        self._new_epoch()

    def read_mirror(self) -> None:
        """Learn from the state what the host knows of it, by one read; lane thread."""
        b, mirror = self.buffers, self.mirror
        parts = [b['position'].tensor, b['pending'].tensor, b['followed'].row(0)]
        mirror.position, pending, *followed = torch.cat(parts).tolist()
        mirror.pending = pending if pending >= 0 else None
        mirror.followed = Followed.read(followed, self.context)

    def _new_epoch(self) -> None:
        self.runner.new_epoch()
        self._redo = None

    # -- checks: any thread ---------------------------------------------------------------------

    def _check_begun(self) -> None:
        if self.position == 0:
            raise PromptEmpty('the state is empty: prefill a prompt or restore a capsule first')

    def check_room(self, position: int, fed: bool) -> int:
        """Return how many tokens can be given out after these; raises PromptTooLong for none."""
        room = self.context - position - fed
        if room < 1:
            raise PromptTooLong(
                f'the context of {self.context} tokens is full; restore an earlier capsule, '
                'reset, or bind with a longer context'
            )
        return room

    def _drafts_of(self, options: Options | None, drafts: np.ndarray, limit: int | None,
                   mask: Tensor | None) -> int:
        """Return K of the next step: as many drafts as asked for, given, fitting and allowed."""
        self._check_begun()
        room = self.check_room(self.position, self.pending is not None)
        if limit is not None and limit < 1:
            raise ConfigError(f'limit is {limit}; a step gives out at least 1 token')
        asked = int(drafts.size) or (0 if options is None else options.draft_tokens)
        if asked > self.settings.draft_tokens or (asked and not drafts.size and not self.mtp):
            raise ConfigError(
                f'{asked} drafts are asked for; this session was bound with draft_tokens '
                f'{self.settings.draft_tokens} and {"an" if self.mtp else "no"} MTP head'
            )
        if drafts.size and mask is not None:
            raise ConfigError('drafts and a mask are given: the mask of a draft is not known')
        if self.pending is None or mask is not None:
            return 0
        return min(asked, room - 1, (limit or room) - 1)


def reset_state(buffers: BufferSet) -> None:
    """Write the state of a fresh session; lane thread. KV beyond the extent is never read."""
    buffers.arena.zero_()
    buffers['pending'].tensor.fill_(layout.NOTHING_PENDING)
    buffers['parameters'].tensor.copy_(torch.tensor(DEFAULTS.parameters()))


def _step(operation: Operation[Step]) -> Step:
    value: Step = operation.results[-1].value
    us = sum(sum(result.segments_us.values()) for result in operation.results)
    return replace(value, us=us, epoch=operation.epoch)
