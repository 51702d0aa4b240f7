"""What ``gateway simulate`` replays, and how it shows what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from gateway.bench.report import PlotFailed, plot, row, table
from gateway.bench.simulate import MODEL_SPEED, POLICIES, Setting, pooled_hit, simulate
from gateway.bench.trace import Arrival, TraceError, read_trace
from gateway.core.cost import Coefficients, Speed

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_MODEL = MODEL_SPEED.prefill


class SimulationFailed(Exception):
    """Nothing can be simulated so; the message says why, in one line."""


class Scenario(BaseModel):
    """Options of the command: the fleet, the model of its engines and what is compared."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: Count = Field(2, description="Workers to simulate.")
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="How many times faster than recorded requests arrive."
    )
    cache_tokens: Count = Field(850_944, description="Size of each worker's cache, in tokens.")
    request_seconds: Weight = Field(_MODEL.a, description="Prefill seconds of a request as such.")
    token_seconds: Weight = Field(_MODEL.b, description="Prefill seconds per uncached token.")
    pair_seconds: Weight = Field(
        _MODEL.e, description="Prefill seconds per uncached token and token before it (attention)."
    )
    output_token_seconds: Weight = Field(
        MODEL_SPEED.decode_seconds_per_token, description="Busy seconds per generated token."
    )
    social_weight: Weight = Field(
        6.0,
        description="How much a recomputed prefix is charged for each waiting request.",
    )

    @property
    def setting(self) -> Setting:
        prefill = Coefficients(self.request_seconds, self.token_seconds, self.pair_seconds)
        return Setting(
            workers=self.workers,
            time_factor=self.speed,
            cache_tokens=self.cache_tokens,
            speed=Speed(prefill, self.output_token_seconds),
            social_weight=self.social_weight,
        )


def compare(trace: Path, given: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each policy, the gateway's own first; raises SimulationFailed."""
    setting, arrivals = _read(trace, given)
    pooled = pooled_hit(arrivals, setting)
    return [row(simulate(policy, arrivals, setting), pooled) for policy in POLICIES]


def show(rows: list[dict[str, Any]], console: Console, title: str, as_json: bool) -> None:
    if as_json:
        # Not through the console: it would fold long lines.
        print(json.dumps(rows, indent=1), file=console.file)
    else:
        console.print(table(rows, title))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Raises SimulationFailed."""
    try:
        plot(rows, path)
    except PlotFailed as error:
        raise SimulationFailed(str(error)) from error


def _read(trace: Path, given: dict[str, Any]) -> tuple[Setting, list[Arrival]]:
    try:
        return Scenario(**given).setting, read_trace(trace)
    except ValidationError as error:
        wrong = (
            f"--{str(one['loc'][0]).replace('_', '-')} {one['input']}: {one['msg']}"
            for one in error.errors()
        )
        raise SimulationFailed("; ".join(wrong)) from None
    except TraceError as error:
        raise SimulationFailed(str(error)) from error
