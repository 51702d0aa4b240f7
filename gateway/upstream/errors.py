"""What can go wrong between the gateway and a worker, by phase."""


class UpstreamError(Exception):
    """Root. ``processed`` is False only where the worker cannot have seen a whole request."""

    processed = True


class ConnectFailed(UpstreamError):
    """No connection: refused, unreachable or not within the connect limit."""

    processed = False


class StaleConnection(UpstreamError):
    """A reused idle connection died before any byte of an answer: the worker had closed it."""

    processed = False


class NoAnswer(UpstreamError):
    """The connection died after the request was sent and before the head was complete."""


class BadAnswer(UpstreamError):
    """The worker's bytes are not HTTP, or exceed a limit."""


class Truncated(UpstreamError):
    """The body ended before its announced or chunked end."""


class HeadTimeout(UpstreamError):
    """No head within the head limit."""


class IdleTimeout(UpstreamError):
    """No byte of the body within the idle limit."""
