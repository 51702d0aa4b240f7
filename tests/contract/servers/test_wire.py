"""Bytes both ways, on other servers."""

from tests.contract.test_wire import *  # noqa: F403
from tests.gateway_process import GatewayProcess

del test_c58_every_split_of_the_usage_event  # noqa: F821  (long, and of the filter: no server's)


def test_it_is_that_server(gateway: GatewayProcess, server: tuple[str, str]) -> None:
    """Else all of this folder would be in vain."""
    protocol, loop = server
    assert f"on uvicorn.protocols.http.{protocol}_impl." in gateway.log()
    assert f" and {loop}." in gateway.log()
