"""What of a model is still read exactly: probes before it is used, answers and samples after.

Requests are of *kinds*: the endpoint and the features that their prompts have. One kind that the
worker reads otherwise is switched to bytes alone: tools that are rendered in another way say
nothing of plain text. A plain prompt that is read otherwise says all, and so do several kinds.
"""

from __future__ import annotations

from typing import NamedTuple

FEATURES = frozenset((
    "billing", "continue", "developer", "documents", "effort", "extras", "kwargs",
    "no_tool_choice", "parts", "reasoning", "special", "tool_calls", "tools",
))  # fmt: skip
"""What a conversation may have beyond plain text; each has probes of its own, but for
``no_tool_choice``, which ``/tokenize`` does not take: it is seen in answers only."""

PLAIN = frozenset(("chat", "completions"))
MOST_KINDS = 5
"""So many kinds read otherwise switch the model."""


class Kind(NamedTuple):
    endpoint: str
    features: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """For logs: ``chat+parts+tools``."""
        return "+".join((self.endpoint, *sorted(self.features)))


class Trust:
    """One model's; all its names share it. ``exact`` is False once nothing of it is."""

    def __init__(self) -> None:
        self.exact = True
        self.mismatches = 0
        self._features: set[str] = set()
        self._kinds: set[Kind] = set()
        self._all = True

    def admits(self, kind: Kind) -> bool:
        if self._all:
            return True
        return self.exact and kind not in self._kinds and self._features.isdisjoint(kind.features)

    def withdraw(self, feature: str) -> None:
        """Probes with this feature were read otherwise."""
        self.mismatches += 1
        self._all = False
        self._features.add(feature)

    def withdraw_all(self) -> None:
        self.mismatches += 1
        self._all = self.exact = False

    def mismatched(self, kind: Kind) -> str | None:
        """A request of this kind was read otherwise. Returns what is read as bytes from now on,
        None if nothing that was not before."""
        self.mismatches += 1
        if not self.admits(kind):
            return None  # it was under way when the kind was switched
        self._all = False
        self._kinds.add(kind)
        plain = kind.endpoint in PLAIN and not kind.features
        if plain or len(self._kinds) >= MOST_KINDS:
            self.exact = False
            return "all its prompts"
        return f"prompts of the kind {kind.name}"
