"""What the executor tells /diagnostics: levels, counters and percentiles by component."""

from typing import Any

from flashrt_core.errors import FlashrtError
from flashrt_ros.diagnostics import ERROR
from flashrt_ros.diagnostics import Section
from flashrt_ros.diagnostics import WARN
from flashrt_ros.hold import Cause
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.session_report import SessionReport


class ExecutorReport(SessionReport):
    """Counters of one executor and the sections made of them."""

    def __init__(self, node: Any) -> None:
        """Create the updater.

        :param node: the executor node; read when a section is filled.
        """
        super().__init__(node, 'executor', '~/reset or ~/restore', ticks=self._ticks,
                         steps=self._steps, observations=self._observations)

    def stream_refused(self, stream: str, error: FlashrtError) -> None:
        """Note a refused message; one log line until the stream is good again."""
        if self.faults.set(f'stream {stream}', WARN, f'[{error.code}] {error}'):
            self._node.get_logger().warning(
                f'[{error.code}] {error}', throttle_duration_sec=1.0)

    def stream_accepted(self, stream: str) -> None:
        """Forget what was wrong with a stream."""
        if self.faults.clear(f'stream {stream}'):
            self._node.get_logger().info(f'{stream} is good again', throttle_duration_sec=1.0)

    # -- sections, on the executor thread -------------------------------------------------------

    def _state(self, section: Section) -> None:
        super()._state(section)
        node, control = self._node, self._node.control
        name = node.get_fully_qualified_name()
        if node.count_publishers(f'{name}/status') > 1:
            told = (f'another node is called {name} too and may command the same robot; end one '
                    'of them or give it a namespace (one that was killed counts for 20 s)')
            section.worsen(ERROR, told)
            if self.faults.set('twin', ERROR, told):
                node.get_logger().error(told)
        else:
            self.faults.clear('twin')
        if control is None:
            return
        for key, value in vars(control.progress).items():
            section.add(key, value)
        causes = control.holds.causes
        section.add('hold_causes', ', '.join(causes))
        section.add('latched', control.holds.latched)
        if causes and node.state_label == ACTIVE:
            section.worsen(WARN, f'holding: {", ".join(causes)}')

    def _ticks(self, section: Section) -> None:
        engine = self._node.engine
        section.add_counts(self.counters.snapshot())
        if engine is None:
            return
        for key, value in engine.book.facts.figures().items():
            section.add(key, value)
        section.add_stages({name: ring.summary() for name, ring in engine.times.rings.items()})
        misses = engine.watch.misses_in_a_row
        section.add('deadline_misses_in_a_row', misses)
        if engine.watch.level == 'error':
            section.worsen(ERROR, f'{misses} ticks in a row missed tick_deadline_s')
        elif engine.watch.level == 'warn':
            section.worsen(WARN, f'{misses} tick missed tick_deadline_s')

    def _steps(self, section: Section) -> None:
        thread, control = self._node.step_thread, self._node.control
        if thread is None or control is None:
            return
        report = thread.report()
        for key, value in vars(report).items():
            section.add(key, value)
        for key, value in control.player.timing.figures().items():
            section.add(key, value)
        if report.errors:
            section.worsen(ERROR, f'{report.errors} steps raised; see the log')

    def _observations(self, section: Section) -> None:
        engine, control = self._node.engine, self._node.control
        self.faults.fill(section)
        if engine is None or control is None:
            return
        observation = engine.observations.newest()
        now = engine.reading(observation)
        if not now.ready:
            section.worsen(WARN, 'ROS time is zero: not ready; start the publisher of /clock')
        for stream in engine.observations.streams:
            sample = observation.samples.get(stream)
            if sample is None:
                section.worsen(WARN, f'{stream} has sent nothing that could be used yet')
            else:
                section.add(f'{stream} age_s', (now.now_ns - sample.stamp_ns) / 1e9)
        if Cause.OBSERVATION in control.holds.causes:
            section.worsen(ERROR, 'holding: the observations cannot be used, see ~/events')
