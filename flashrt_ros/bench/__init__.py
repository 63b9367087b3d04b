"""Benches over real ROS: ``python -m flashrt_core.bench tick`` and ``... reset`` run these."""
