from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.cost import (
    CPU_SPEED,
    GPU_SPEED,
    Coefficients,
    DecodeEstimate,
    PrefillFit,
    Speed,
)

SIZES = [(n, c) for n in (1, 30, 200, 900, 2500, 8000) for c in (0, 640, 4096, 20000)]
SPEEDS = [pytest.param(GPU_SPEED, id="gpu"), pytest.param(CPU_SPEED, id="cpu")]

TOKENS = st.integers(1, 200_000)
CACHED = st.integers(0, 200_000)
DURATIONS = st.floats(1e-6, 600)


class Engine:
    """Computes one prompt after another, with pauses, and tells the fit."""

    def __init__(self, fit: PrefillFit) -> None:
        self.fit = fit
        self.now = 0.0

    def prompt(self, uncached_tokens: int, cached_tokens: int, seconds: float) -> None:
        began, self.now = self.now, self.now + seconds
        self.fit.observe(uncached_tokens, cached_tokens, began, self.now)
        self.now += 100 * seconds

    def step(self, prompts: list[tuple[int, int]], seconds: float) -> None:
        """Prompts computed together: their first tokens come in one burst."""
        began, self.now = self.now, self.now + seconds
        for uncached_tokens, cached_tokens in prompts:
            self.fit.observe(uncached_tokens, cached_tokens, began, self.now)
            began, self.now = self.now, self.now + seconds / 1000
        self.now += 100 * seconds


def observed(fit: PrefillFit, truth: Coefficients, noise: float, times: int) -> PrefillFit:
    """`fit` after requests of many sizes on an engine of which `truth` holds."""
    chance = random.Random(7)
    engine = Engine(fit)
    for _ in range(times):
        n, c = size(chance)
        engine.prompt(n, c, truth.seconds(n, c) * chance.uniform(1 - noise, 1 + noise))
    return fit


def size(chance: random.Random) -> tuple[int, int]:
    return int(10 ** chance.uniform(0.5, 4)), chance.choice((0, 0, 500, 4000, 20000))


def test_prefill_grows_with_tokens_and_with_what_they_attend_to() -> None:
    cost = Coefficients(1.0, 0.1, 0.01)
    assert cost.seconds(10, 0) == pytest.approx(1.0 + 1.0 + 0.01 * 10 * 5)
    assert cost.seconds(10, 100) == pytest.approx(1.0 + 1.0 + 0.01 * 10 * 105)


@pytest.mark.parametrize("start", SPEEDS)
@pytest.mark.parametrize(
    "truth",
    [
        Coefficients(0.02, 4e-5, 2e-9),
        Coefficients(0.3, 2e-3, 5e-8),
        Coefficients(0.0, 1e-5, 0.0),
        Coefficients(0.01, 5e-6, 1e-9),
    ],
    ids=str,
)
def test_the_fit_finds_what_the_engine_costs(start: Speed, truth: Coefficients) -> None:
    fit = observed(PrefillFit(start.prefill), truth, 0.0, 1000)
    for n, c in SIZES:
        assert fit.seconds(n, c) == pytest.approx(truth.seconds(n, c), rel=0.05, abs=0.002)
    assert fit.observations == 1000
    assert fit.residual_seconds < 0.02 * truth.seconds(10_000, 20_000)


def test_noise_moves_the_fit_little_and_shows_in_the_residual() -> None:
    truth = Coefficients(0.02, 4e-5, 2e-9)
    fit = observed(PrefillFit(GPU_SPEED.prefill), truth, 0.3, 2000)
    for n, c in SIZES:
        assert fit.seconds(n, c) == pytest.approx(truth.seconds(n, c), rel=0.35, abs=0.03)
    exact = observed(PrefillFit(GPU_SPEED.prefill), truth, 0.0, 2000)
    assert fit.residual_seconds > 5 * exact.residual_seconds


def test_an_engine_that_becomes_slower_is_followed() -> None:
    before, after = Coefficients(0.01, 2e-5, 1e-9), Coefficients(0.03, 8e-5, 4e-9)
    fit = observed(observed(PrefillFit(GPU_SPEED.prefill), before, 0.0, 2000), after, 0.0, 400)
    assert fit.seconds(3000, 500) == pytest.approx(after.seconds(3000, 500), rel=0.05)


def test_prompts_computed_in_one_step_are_one_observation() -> None:
    truth = Coefficients(0.02, 4e-5, 2e-9)
    fit = PrefillFit(GPU_SPEED.prefill)
    engine = Engine(fit)
    chance = random.Random(7)
    for _ in range(1000):
        prompts = [size(chance) for _ in range(chance.randint(1, 6))]
        engine.step(prompts, sum(truth.seconds(n, c) for n, c in prompts))
    for n, c in SIZES:
        assert fit.seconds(n, c) == pytest.approx(truth.seconds(n, c), rel=0.05, abs=0.002)


def test_no_engine_is_taken_to_need_no_time() -> None:
    fit = PrefillFit(GPU_SPEED.prefill)
    engine = Engine(fit)
    for _ in range(500):
        engine.prompt(1000, 0, 1e-9)
    assert fit.seconds(1000, 0) > 1e-3


@given(st.lists(st.tuples(TOKENS, CACHED, DURATIONS), max_size=60), st.sampled_from(SIZES))
def test_no_observation_makes_a_coefficient_negative(seen, size) -> None:
    fit = PrefillFit(GPU_SPEED.prefill)
    engine = Engine(fit)
    for n, c, seconds in seen:
        engine.prompt(n, c, seconds)
        found = fit.coefficients
        assert min(found.a, found.b, found.e) >= 0
        assert math.isfinite(fit.seconds(*size))
    assert fit.residual_seconds >= 0


@pytest.mark.parametrize("tokens", [1, 16, 256, 500, 1024, 2000, 4096])
@pytest.mark.parametrize("cached", [0, 640])
def test_one_size_of_prompt_for_hours_is_fitted(tokens: int, cached: int) -> None:
    fit = PrefillFit(GPU_SPEED.prefill)
    engine = Engine(fit)
    for _ in range(3000):
        engine.prompt(tokens, cached, 0.03)
    assert fit.seconds(tokens, cached) == pytest.approx(0.03, rel=0.05)


@pytest.mark.parametrize("tokens", [1, 16, 100, 900])
def test_one_size_of_prompt_for_hours_says_little_of_other_sizes(tokens: int) -> None:
    start = GPU_SPEED.prefill
    fit = PrefillFit(start)
    engine = Engine(fit)
    for _ in range(1000):
        engine.prompt(tokens, 0, start.seconds(tokens, 0) * 2)
    for other in (10, 2000, 20_000):
        assert start.seconds(other, 0) / 4 < fit.seconds(other, 0) < start.seconds(other, 0) * 4


def test_decode_is_the_mean_answer_unless_the_request_allows_less() -> None:
    decode = DecodeEstimate(0.01, output_tokens=100)
    assert decode.seconds(None) == decode.seconds(5000) == pytest.approx(1.0)
    assert decode.seconds(20) == pytest.approx(0.2)
    assert decode.seconds(0) == 0
    for _ in range(200):
        decode.observe(40)
    assert decode.seconds(None) == pytest.approx(0.4, rel=0.01)


def test_the_decode_rate_follows_what_is_seen() -> None:
    decode = DecodeEstimate(0.01)
    for _ in range(200):
        decode.observe_rate(busy_seconds=2.0, output_tokens=1000)
    assert decode.seconds_per_token == pytest.approx(0.002, rel=0.01)
