"""What ``gateway explain`` asks a running gateway, and how it shows the answer."""

from __future__ import annotations

from typing import Any

import httpx
from rich.console import Group
from rich.table import Table
from rich.text import Text

_SECONDS = 30.0
_TIMES = ("prefill_ahead", "decode", "prefill", "delay_to_others", "cost")


class ExplainFailed(Exception):
    """The gateway could not be asked, or refused; the message says why."""


def ask(url: str, body: bytes) -> dict[str, Any]:
    """The answer of ``POST /route/explain``; raises ExplainFailed."""
    headers = {"content-type": "application/json"}
    try:
        with httpx.Client(trust_env=False, timeout=_SECONDS) as client:
            answer = client.post(f"{url.rstrip('/')}/route/explain", content=body, headers=headers)
            told = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ExplainFailed(f"{url}: {error or type(error).__name__}") from error
    except ValueError:
        raise ExplainFailed(f"{url}: status {answer.status_code}, not a gateway's answer") from None
    if answer.status_code != 200:
        raise ExplainFailed(f"{url}: {told.get('error', {}).get('message', answer.status_code)}")
    return dict(told)


def table(answer: dict[str, Any]) -> Group:
    """The reason in a sentence, then a row for each worker."""
    rows = Table("worker", "cached", "uncached", *(f"{name}, s" for name in _TIMES), "")
    for one in answer["candidates"]:
        chosen = "goes here" if one["worker"] == answer["worker"] else ""
        times = (f"{one[f'{name}_seconds']:.4f}" for name in _TIMES)
        note = chosen if one["available"] else f"not available: {one['reason']}"
        rows.add_row(
            one["worker"], str(one["cached_tokens"]), str(one["uncached_tokens"]), *times, note
        )
    why = f" ({answer['fallback']})" if answer["fallback"] else ""
    size = f", blocks of {answer['block_size']}" if answer["block_size"] else ""
    read = f"{answer['prompt_tokens']} prompt tokens, read as {answer['mode']}{why}{size}"
    return Group(Text(answer["reason"]), Text(read), rows)
