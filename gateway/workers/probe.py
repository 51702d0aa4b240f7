"""Questions to a worker over its own HTTP, on connections of their own."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

import httpx

_ANSWER_SECONDS = 5.0


class ProbeFailed(Exception):
    """The worker did not answer as asked; ``unreachable`` if no connection could be made, and
    ``refused`` if it answered that it will not, a 4xx."""

    def __init__(self, why: str, unreachable: bool = False, refused: bool = False) -> None:
        super().__init__(why)
        self.unreachable = unreachable
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine allows; None where it does not tell."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


class WorkerClient:
    """The control plane of one worker; proxy environment variables are ignored."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=4, keepalive_expiry=2.0)
        # The same trust as the data plane's, which follows SSL_CERT_FILE; none to load for http.
        trust = ssl.create_default_context() if url.startswith("https://") else False
        self._client = httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=_ANSWER_SECONDS, limits=limits, verify=trust
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def health(self) -> None:
        """Returns if ``/health`` answers 200; raises ProbeFailed."""
        await self._get("/health")

    async def models(self) -> list[dict[str, Any]]:
        """``data`` of ``/v1/models``; raises ProbeFailed."""
        data = _json(await self._get("/v1/models")).get("data")
        if not isinstance(data, list):
            raise ProbeFailed("/v1/models has no list of models")
        return [model for model in data if isinstance(model, dict)]

    async def metrics(self) -> str:
        """Prometheus text; raises ProbeFailed."""
        return (await self._get("/metrics")).text

    async def limits(self) -> Limits:
        """From ``/server_info``, which vLLM serves in its dev mode only; raises ProbeFailed."""
        info = _json(await self._get("/server_info?config_format=json"))
        config = info.get("vllm_config")
        scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
        if not isinstance(scheduler, dict):
            raise ProbeFailed("/server_info has no scheduler_config")
        seqs, tokens = scheduler.get("max_num_seqs"), scheduler.get("max_num_batched_tokens")
        return Limits(
            seqs if isinstance(seqs, int) else None, tokens if isinstance(tokens, int) else None
        )

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Token ids from ``POST /tokenize``, None where it refuses the body; raises ProbeFailed."""
        try:
            answer = await self._ask("POST", "/tokenize", body)
        except ProbeFailed as error:
            if error.refused:
                return None
            raise
        tokens = _json(answer).get("tokens")
        if not isinstance(tokens, list):
            raise ProbeFailed("/tokenize gave no tokens")
        return tokens

    async def reset_prefix_cache(self) -> bool:
        """False where blocks are in use and nothing was reset; raises ProbeFailed. vLLM serves it
        in its dev mode only."""
        answer = await self._ask("POST", "/reset_prefix_cache", None)
        # Releases before it told of success answered with nothing.
        return not answer.content or _json(answer).get("success") is not False

    async def _get(self, path: str) -> httpx.Response:
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.ConnectError as error:
            raise ProbeFailed(f"unreachable: {error}", unreachable=True) from error
        except httpx.HTTPError as error:
            raise ProbeFailed(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code != 200:
            refused = 400 <= answer.status_code < 500
            raise ProbeFailed(f"{path} answers {answer.status_code}", refused=refused)
        return answer


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError as error:
        raise ProbeFailed(f"{answer.url.path} is not JSON") from error
    if not isinstance(value, dict):
        raise ProbeFailed(f"{answer.url.path} is not a JSON object")
    return value
