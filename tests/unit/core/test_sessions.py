from __future__ import annotations

import pytest

from gateway.core import sessions as module
from gateway.core.reservation import WorkerId
from gateway.core.sessions import Sessions

A, B = WorkerId("a"), WorkerId("b")


def test_a_session_is_where_it_was_last() -> None:
    sessions = Sessions()
    assert sessions.home("s") is None and sessions.home(None) is None
    sessions.placed("s", A)
    sessions.placed("t", B)
    sessions.placed("s", B)
    assert (sessions.home("s"), sessions.home("t")) == (B, B)


def test_the_least_recently_seen_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SESSIONS", 2)
    sessions = Sessions()
    for name in ("s", "t", "s", "u"):
        sessions.placed(name, A)
    assert [sessions.home(name) for name in "stu"] == [A, None, A]
