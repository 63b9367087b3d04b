"""
Benches: ``python -m flashrt_core.bench NAME`` gives a table and a JSON file.

A bench is a module ``flashrt_core/bench/NAME.py`` with ``add_arguments(parser)`` and
``run(arguments) -> Report``. Figures belong to the machine they name; no test asserts them.
"""
from flashrt_core.bench._report import percentiles
from flashrt_core.bench._report import Report

__all__ = ['Report', 'percentiles']
