"""Seconds of prefill and decode: the one unit in which placements are compared."""

from __future__ import annotations

from dataclasses import dataclass

_FORGET = 0.98
"""Weight of the past at each observation: a mean over about the last 50."""

_PRIOR_WEIGHT = 0.05
"""Pull of the starting coefficients, in observations of one second of each term."""

_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True)
class Coefficients:
    """``prefill(n, c) = a + b*n + e*n*(c + n/2)`` seconds for n uncached tokens behind c cached.

    ``a``: seconds per request; ``b``: seconds per token; ``e``: seconds per token pair (attention).
    """

    a: float
    b: float
    e: float

    def seconds(self, uncached_tokens: int, cached_tokens: int) -> float:
        n = uncached_tokens
        return self.a + self.b * n + self.e * n * (cached_tokens + n / 2)


@dataclass(frozen=True, slots=True)
class Speed:
    """What an engine is taken to cost until it has been observed."""

    prefill: Coefficients
    decode_seconds_per_token: float


GPU_SPEED = Speed(Coefficients(0.005, 2.5e-5, 1.5e-9), 2e-4)
"""An 8B model on one current data-centre GPU."""

CPU_SPEED = Speed(Coefficients(0.05, 1e-3, 1e-8), 1e-2)
"""A model of 0.1B parameters on one core."""


_LEAST = Coefficients(1e-4, 1e-6, 0.0)
"""No engine is faster: a fit that ran to nothing would draw all traffic to its worker."""

_SAME_STEP_SHARE = 0.1

_EACH_AT_FIRST, _THEN_EVERY = 50, 10
"""Steps after which the coefficients are solved for: later ones change them little."""

Terms = tuple[float, float, float]


@dataclass(slots=True)
class _Step:
    """Prompts whose first tokens came together on one worker, not yet learnt from."""

    terms: Terms
    began: float
    ended: float

    def add(self, terms: Terms, ended: float) -> None:
        (a, b, e), (more_a, more_b, more_e) = self.terms, terms
        self.terms = (a + more_a, b + more_b, e + more_e)
        self.ended = ended


class PrefillFit:
    """Recursive least squares of prefill seconds.

    Engines compute several prompts in one step, whose first tokens then come together. Prompts
    that end within a tenth of the first one's time behind it are therefore one observation: the
    sum of their terms took the time from the beginning of the first to the end of the last.

    Starts from default coefficients and is pulled from them by observations. Terms are scaled to
    thousands of tokens so that the three are of like size.
    """

    def __init__(self, start: Coefficients) -> None:
        self.coefficients = start
        self.residual_seconds = 0.0
        self.observations = 0
        self._prior = (start.a, start.b * 1e3, start.e * 1e6)
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._steps: dict[str, _Step] = {}
        self._learnt = 0

    def seconds(self, uncached_tokens: int, cached_tokens: int) -> float:
        return self.coefficients.seconds(uncached_tokens, cached_tokens)

    def observe(
        self, uncached_tokens: int, cached_tokens: int, began: float, ended: float, worker: str = ""
    ) -> None:
        """One prompt was computed on ``worker`` from ``began`` to ``ended``, at the longest."""
        error = abs(ended - began - self.seconds(uncached_tokens, cached_tokens))
        self.residual_seconds += (error - self.residual_seconds) * _SMOOTHING
        self.observations += 1
        n, c = uncached_tokens / 1e3, cached_tokens / 1e3
        terms = (1.0, n, n * (c + n / 2))
        step = self._steps.get(worker)
        if step is not None:
            late = ended - step.ended
            if 0 <= late <= (step.ended - step.began) * _SAME_STEP_SHARE:
                step.add(terms, ended)
                return
            self._learn(step.terms, step.ended - step.began)
        self._steps[worker] = _Step(terms, began, ended)

    def _learn(self, terms: Terms, seconds: float) -> None:
        for row, products_of in zip(self._squares, terms, strict=True):
            row[:] = [_FORGET * s + products_of * t for s, t in zip(row, terms, strict=True)]
        pairs = zip(self._products, terms, strict=True)
        self._products = [_FORGET * p + t * seconds for p, t in pairs]
        self._learnt += 1
        if self._learnt > _EACH_AT_FIRST and self._learnt % _THEN_EVERY:
            return
        a, b, e = self._solve()
        self.coefficients = Coefficients(
            max(a, _LEAST.a), max(b / 1e3, _LEAST.b), max(e / 1e6, _LEAST.e)
        )

    def _solve(self) -> list[float]:
        """Least squares over the terms that are not negative, the last dropped first."""
        # The prior is added here, and so never forgotten: prompts of one size for hours leave the
        # squares singular.
        weight = _PRIOR_WEIGHT
        right = [p + weight * v for p, v in zip(self._products, self._prior, strict=True)]
        active = [0, 1, 2]
        while True:
            matrix = [
                [self._squares[i][j] + (weight if i == j else 0.0) for j in active] for i in active
            ]
            found = _solve(matrix, [right[i] for i in active])
            negative = [i for i, value in zip(active, found, strict=True) if value < 0]
            if not negative:
                values = dict(zip(active, found, strict=True))
                return [values.get(i, 0.0) for i in range(3)]
            active.remove(negative[-1])


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a small positive definite system (no pivoting needed)."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [x - factor * y for x, y in zip(rows[j], rows[i], strict=True)]
    result = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * result[j] for j in range(i + 1, size))
        result[i] = (rows[i][size] - known) / rows[i][i]
    return result


@dataclass(frozen=True, slots=True)
class Estimates:
    """What is known of the speed of like engines, from all of their answers together.

    Workers that serve the same models share one. Fits of their own would run apart by themselves:
    a step takes long whether it has few prompts or many, so the worker that got more of them would
    look the faster one, and get more still.
    """

    prefill: PrefillFit
    decode: DecodeEstimate


class DecodeEstimate:
    """Expected decode seconds of a request: mean output tokens times busy seconds per token."""

    def __init__(self, seconds_per_token: float, output_tokens: float = 128.0) -> None:
        self.seconds_per_token = seconds_per_token
        self.output_tokens = output_tokens

    def seconds(self, max_tokens: int | None) -> float:
        expected = self.output_tokens
        if max_tokens is not None and max_tokens < expected:
            expected = max_tokens
        return expected * self.seconds_per_token

    def observe(self, output_tokens: int) -> None:
        self.output_tokens += (output_tokens - self.output_tokens) * _SMOOTHING

    def observe_rate(self, busy_seconds: float, output_tokens: int) -> None:
        """``busy_seconds``: duration of a decode divided by the requests that shared the engine."""
        rate = busy_seconds / output_tokens
        self.seconds_per_token += (rate - self.seconds_per_token) * _SMOOTHING
