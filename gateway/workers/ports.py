"""Loopback ports that stay ours from before a worker listens until after it has died."""

import socket

LOOPBACK = "127.0.0.1"


class HeldPort:
    """A free port, bound but not listened on.

    With SO_REUSEADDR on both sides a worker can still bind it and listen, while the kernel gives it
    to nobody else: neither to a server that asks for any port, nor as the source port of a
    connection, which could connect a probe of a worker that is still loading to itself.
    """

    def __init__(self) -> None:
        self._socket = _unbound()
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]

    def is_free(self) -> bool:
        """Whether nobody listens on it."""
        with _unbound() as listener:
            try:
                listener.bind((LOOPBACK, self.number))
                listener.listen()
            except OSError:
                return False
        return True

    def close(self) -> None:
        self._socket.close()


def _unbound() -> socket.socket:
    unbound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return unbound
