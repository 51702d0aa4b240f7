"""Settings: flags, then ``GATEWAY_*`` variables, then ``gateway.toml``, then defaults."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from gateway.workers.kv_endpoints import parse_endpoints

PREFIX = "GATEWAY_"
FILE = Path("gateway.toml")

_NOT_SETTINGS = frozenset(("GATEWAY_TORCH_INDEX", "GATEWAY_GC_DIR", "GATEWAY_ENGINE_FREEZE"))
"""Variables of the build and of what runs inside vLLM."""

ShadowPolicy = Literal[
    "prefix_affinity", "least_work", "round_robin", "random",
    "cache_aware", "dynamo", "llm_d_precise", "sticky",
]  # fmt: skip
"""Ours, the controls, and those of other routers."""

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class SettingsError(Exception):
    """A setting is wrong or unknown; the message has a line for each, with what would be right."""


class Settings(BaseSettings):
    """All settings; each name is a flag (``--max-num-seqs``), a variable and a key of the file."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", toml_file=FILE, frozen=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    worker: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="URL of a running vLLM server; once for each (serve)."
    )
    worker_kv_events: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Where each worker publishes KV events, tcp://HOST:PORT[+REPLAY_PORT] or none,"
        " in the order of the workers (serve).",
    )
    kv_events: bool = Field(True, description="The workers tell what they have cached (up).")
    model: str | None = Field(None, description="Model folder or hub id for the workers (up).")
    gpus: Annotated[list[int] | None, NoDecode] = Field(
        None, description="GPUs to use, one worker on each, as 0,1; all by default (up)."
    )
    cpu_workers: Count = Field(2, description="Workers to start where there is no GPU (up).")
    policy: Literal["prefix_affinity", "least_work", "round_robin"] = Field(
        "prefix_affinity", description="How requests are placed."
    )
    shadow_policy: ShadowPolicy | None = Field(
        None, description="A second policy that only tells where it would have placed requests."
    )
    social_weight: float = Field(
        6.0, ge=0, description="How much a recomputed prefix is charged for each waiting request."
    )
    max_index_blocks: Count = Field(4_000_000, description="Cap of the prefix index, in blocks.")
    tokenizer: str | None = Field(
        None, description="Folder or hub id of the tokenizer; else the model's own folder."
    )
    chat_template: Path | None = Field(None, description="Chat template that the workers use.")
    max_num_seqs: Count | None = Field(None, description="Requests in a worker's batch.")
    max_num_batched_tokens: Count | None = Field(
        None, description="Tokens in one step of a worker's engine."
    )
    max_body_bytes: Count = Field(64 << 20, description="Largest request body.")
    connect_seconds: Seconds = Field(5.0, description="Limit for a connection to a worker.")
    head_seconds: Seconds = Field(
        900.0, description="Limit from a request to the head of its answer."
    )
    idle_seconds: Seconds = Field(300.0, description="Limit between two reads of an answer.")
    heartbeat_seconds: Seconds | None = Field(
        None, description="Silence after which a stream gets a comment line; off by default."
    )
    probe_seconds: Seconds = Field(1.0, description="Time between two looks at a worker.")
    scrape_seconds: Seconds = Field(5.0, description="Time between two scrapes of its metrics.")
    token_check_seconds: Seconds = Field(
        60.0, description="Time between two comparisons of a request's tokens with its worker's."
    )
    start_seconds: Seconds = Field(1800.0, description="Limit for a worker to become ready (up).")
    drain_seconds: Seconds = Field(30.0, description="What running requests get at SIGTERM.")
    state_dir: Path = Field(
        default_factory=lambda: _default_state_dir(),
        description="Folder for workers' logs and what they share with the gateway (up).",
    )
    admin_endpoints: bool = Field(
        False, description="Serve /admin/; workers of our own are started in vLLM's dev mode."
    )
    request_log: Path | None = Field(
        None, description="File for a line of hashes and lengths per request, to simulate with."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="What is logged."
    )

    @field_validator("worker", "worker_kv_events", "gpus", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Lists may be written with commas."""
        return (
            [p.strip() for p in value.split(",") if p.strip()] if isinstance(value, str) else value
        )

    @field_validator("worker")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an http:// or https:// URL")
        if len(set(value)) != len(value):
            raise ValueError("a worker is named twice")
        return value

    @field_validator("worker_kv_events")
    @classmethod
    def _endpoints(cls, value: list[str], info: ValidationInfo) -> list[str]:
        for text in value:
            parse_endpoints(text)
        workers = info.data.get("worker", [])
        if value and len(value) != len(workers):
            raise ValueError(f"{len(value)} given for {len(workers)} workers")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load_settings(given: dict[str, Any]) -> Settings:
    """Settings from all sources, ``given`` first; raises SettingsError."""
    unknown = [
        name for name in os.environ
        if name.upper().startswith(PREFIX) and name.upper() not in _NOT_SETTINGS
        and name.upper().removeprefix(PREFIX).lower() not in Settings.model_fields
    ]  # fmt: skip
    problems = [
        _unknown(name, name.upper().removeprefix(PREFIX).lower(), PREFIX) for name in unknown
    ]
    try:
        settings = Settings(**given)
    except ValidationError as error:
        problems += [_problem(detail) for detail in error.errors()]
    except ValueError as error:  # the file is not TOML
        problems.append(f"{FILE}: {error}")
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def _problem(detail: Any) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden":
        return _unknown(name, name, "")
    return f"{name} = {detail['input']!r}: {detail['msg']}"


def _unknown(shown: str, name: str, prefix: str) -> str:
    near = get_close_matches(name, Settings.model_fields, 1)
    hint = f"; did you mean {prefix}{near[0].upper() if prefix else near[0]}?" if near else ""
    return f"{shown}: there is no such setting{hint}"


def _default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "gateway"
