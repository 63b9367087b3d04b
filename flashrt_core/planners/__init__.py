"""Planners: one LLM family a folder, all behind ``protocol.Planner``; the session is shared."""

from __future__ import annotations
