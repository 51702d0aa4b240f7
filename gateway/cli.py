"""The command line: `gateway up`, `serve`, `config`, `explain`, `simulate`."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape

from gateway.config import Settings, SettingsError, load_settings
from gateway.simulated import Scenario, SimulationFailed, compare, draw, show

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible gateway in front of vLLM servers, with prefix affinity.",
)

_UP_ONLY = frozenset(("model", "gpus", "cpu_workers", "kv_events", "start_seconds", "state_dir"))
_SERVE_ONLY = frozenset(("worker", "worker_kv_events"))


_ONE_PROCESS = (
    "--workers: the gateway is one process by design: a second one would have an index of its own"
    " and send the same prefix elsewhere (one --worker URL for each vLLM server)"
)


def main() -> None:
    ours = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    runs = ours[1:2] in (["serve"], ["up"])
    if runs and any(argument.split("=")[0] == "--workers" for argument in ours):
        _fail(_ONE_PROCESS)
    app()


def serve(**given: Any) -> None:
    """Run the gateway alone, in front of vLLM servers that are already there."""
    settings = _settings(given)
    _setup(settings)
    from gateway.run import run_serve

    _run(run_serve(settings), settings)


def up(ctx: typer.Context, **given: Any) -> None:
    """Start one vLLM server per GPU (without GPUs: on CPU cores), and the gateway in front.

    What follows `--` goes to vLLM unchanged.
    """
    arguments = list(ctx.args)
    if given["model"] is not None and given["model"].startswith("-"):
        arguments.insert(0, given["model"])
        given["model"] = None
    settings = _settings(given)
    if settings.model is None:
        _fail("which model? gateway up MODEL, or GATEWAY_MODEL, or model in gateway.toml")
    _setup(settings)
    from gateway.run import run_up
    from gateway.workers.devices import DeviceError
    from gateway.workers.launch import LaunchError

    try:
        plans, on_cpu = _plans(settings, tuple(arguments))
    except (DeviceError, LaunchError) as error:
        _fail(str(error))
    _run(run_up(settings, plans, on_cpu), settings)


def config(**given: Any) -> None:
    """Print the effective settings."""
    settings = _settings(given)
    for name, value in settings.model_dump(mode="json").items():
        shown = "" if value is None else _toml(value)
        print(f"{name} = {shown}" if shown else f"# {name} is not set")


def explain(
    file: Annotated[Path, typer.Argument(help="A request's JSON body; - for standard input.")],
    url: Annotated[str, typer.Option(help="The running gateway.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="The answer as it is.")] = False,
) -> None:
    """Ask a running gateway how it would place a request, without sending it."""
    from gateway.explained import ExplainFailed, ask, table

    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        answer = ask(url, body)
    except OSError as error:
        _fail(f"{file}: {error.strerror or error}")
    except ExplainFailed as error:
        _fail(str(error))
    console = _console()
    console.print_json(json.dumps(answer)) if as_json else console.print(table(answer))


def simulate(
    trace: Annotated[Path, typer.Argument(help="Request log: Mooncake's form or the gateway's.")],
    as_json: Annotated[bool, typer.Option("--json", help="A list, a row for each policy.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A picture as well (.png, .svg).")] = None,
    **given: Any,
) -> None:
    """Replay a request log in simulated time, under this gateway's placement and others'.

    The default engine is an 8B model on one data-centre GPU.
    """
    try:
        rows = compare(trace, {name: value for name, value in given.items() if value is not None})
        show(rows, _console(), trace.name, as_json)
        if plot is not None:
            draw(rows, plot)
    except SimulationFailed as error:
        _fail(str(error))


def _console() -> Console:
    # A pipe has no width of its own, and tables need more than the 80 columns it is taken for.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _plans(settings: Settings, arguments: tuple[str, ...]) -> tuple[list[Any], bool]:
    """One launch plan per worker, and whether they run on CPU cores."""
    from gateway.workers import devices, launch
    from gateway.workers.prompt_options import given_options

    assert settings.model is not None
    if settings.chat_template is not None and "--chat-template" not in given_options(arguments):
        arguments = (*arguments, "--chat-template", str(settings.chat_template))
    request = launch.LaunchRequest(
        settings.model,
        arguments,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.kv_events,
        settings.admin_endpoints,
    )
    gpus = devices.visible_gpus(os.environ)
    if settings.gpus is not None:
        gpus = devices.select_gpus(gpus, settings.gpus)
    if gpus:
        return launch.plan_gpu_workers(request, gpus, os.environ), False
    shares = devices.core_shares(settings.cpu_workers)
    return launch.plan_cpu_workers(request, shares, os.environ), True


def _run(main: Any, settings: Settings) -> None:
    """Run on uvloop; failures that the operator can mend end with one line, not a traceback."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each request in flight takes two descriptors, and the usual soft limit is 1024.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    import uvloop

    from gateway.observe.request_log import LogFileFailed
    from gateway.prompt.tokenizer import TokenizerMissing
    from gateway.workers.supervisor import StateFolderInUse

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    except (TokenizerMissing, StateFolderInUse, LogFileFailed) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{settings.host}:{settings.port}: {error.strerror or error}")


def _setup(settings: Settings) -> None:
    from gateway.observe.logs import setup_logging

    setup_logging(settings.log_level)


def _settings(given: dict[str, Any]) -> Settings:
    try:
        return load_settings(
            {name: value for name, value in given.items() if value not in (None, [])}
        )
    except SettingsError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error:[/] {escape(message)}")
    sys.exit(2)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, (int, float)):
        return str(value)
    # TOML's strings are JSON's, but for the one control character that JSON leaves as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_settings(
    command: Callable[..., None],
    left_out: frozenset[str],
    fields: Mapping[str, FieldInfo] = Settings.model_fields,
) -> Callable[..., None]:
    """Give a command one option for each setting; none has a default here, so that what was not
    given is left to the environment, the file and the settings' own defaults."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field)
        )
        for name, field in fields.items()
        if name not in left_out
    ]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *options]}
    return command


def _option(name: str, field: FieldInfo) -> Any:
    """How typer reads a setting: numbers stay text, so that the settings judge them."""
    if name == "model":
        return Annotated[str | None, typer.Argument(help=field.description, show_default=False)]
    default = field.get_default()
    help_text = field.description or ""
    if default is not None and not isinstance(default, list) and default is not ...:
        help_text += f" Default: {default}." if field.default_factory is None else ""
    many = get_origin(field.annotation) is list and str in get_args(field.annotation)
    kind: Any = list[str] if many else str
    option = typer.Option(f"--{name.replace('_', '-')}", help=help_text, show_default=False)
    return Annotated[kind | None, option]


app.command()(_with_settings(serve, _UP_ONLY))
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(
    _with_settings(up, _SERVE_ONLY)
)
app.command()(_with_settings(config, frozenset()))
app.command()(explain)
app.command()(_with_settings(simulate, frozenset(), Scenario.model_fields))
