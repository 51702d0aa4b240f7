from __future__ import annotations

import pytest

from gateway.prompt.trust import MOST_KINDS, Kind, Trust

CHAT, TEXT = Kind("chat"), Kind("completions")


def kind(*features: str, endpoint: str = "chat") -> Kind:
    return Kind(endpoint, frozenset(features))


def test_all_is_admitted_at_first() -> None:
    trust = Trust()
    assert trust.exact and trust.mismatches == 0
    for one in (CHAT, TEXT, kind("tools", "parts"), kind("ids", endpoint="completions")):
        assert trust.admits(one)


def test_a_feature_that_failed_its_probes_takes_all_kinds_with_it() -> None:
    trust = Trust()
    trust.withdraw("tools")
    assert trust.exact and trust.mismatches == 1
    assert not trust.admits(kind("tools"))
    assert not trust.admits(kind("parts", "tools", endpoint="messages"))
    assert trust.admits(kind("parts")) and trust.admits(CHAT)


def test_a_kind_that_is_answered_otherwise_goes_alone() -> None:
    trust = Trust()
    said = trust.mismatched(kind("tools", "parts"))
    assert said == "prompts of the kind chat+parts+tools"
    assert not trust.admits(kind("parts", "tools"))
    for other in (CHAT, TEXT, kind("tools"), kind("parts"), kind("parts", endpoint="messages")):
        assert trust.admits(other)
    assert trust.exact


@pytest.mark.parametrize("plain", [CHAT, TEXT])
def test_a_plain_prompt_speaks_for_the_model(plain: Kind) -> None:
    trust = Trust()
    assert trust.mismatched(plain) == "all its prompts"
    assert not trust.exact
    assert not any(trust.admits(one) for one in (CHAT, TEXT, kind("tools")))


@pytest.mark.parametrize("other", [Kind("messages"), Kind("responses")])
def test_a_translated_prompt_speaks_for_its_endpoint(other: Kind) -> None:
    trust = Trust()
    assert trust.mismatched(other) == f"prompts of the kind {other.endpoint}"
    assert trust.exact and trust.admits(CHAT)


def test_several_kinds_speak_for_the_model() -> None:
    trust = Trust()
    for number in range(MOST_KINDS):
        assert trust.exact
        trust.mismatched(kind(f"feature {number}"))
    assert not trust.exact and trust.mismatches == MOST_KINDS


def test_what_was_under_way_is_counted_and_says_nothing_new() -> None:
    trust = Trust()
    for _ in range(MOST_KINDS + 1):
        trust.mismatched(kind("tools"))
    assert trust.exact and trust.mismatches == MOST_KINDS + 1
    assert trust.mismatched(kind("tools")) is None


def test_all_may_be_withdrawn() -> None:
    trust = Trust()
    trust.withdraw_all()
    assert not trust.exact and not trust.admits(CHAT)
