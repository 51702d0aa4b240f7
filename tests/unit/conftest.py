"""Settings of hypothesis for all unit tests: no time limit per example on a shared machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")
