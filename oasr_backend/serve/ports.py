"""Listening ports of this machine: whether one is free, and how to pick free ones."""

from __future__ import annotations

import random
import socket

from oasr_backend.errors import ServerError

# Below the range from which Linux takes ports of outgoing connections, so that a picked port is
# not lost to a client between the pick and the start of the server.
_PICK_RANGE = range(20_000, 32_000)
_PICK_ATTEMPTS = 1_000


def bind_error(host: str, port: int) -> OSError | None:
    """Why `host:port` cannot be listened on; None when it can."""
    try:
        with _bound_socket(host, port):
            return None
    except OSError as error:
        return error


def find_free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that are free at this moment. Raises ServerError when too few are."""
    picker = random.SystemRandom()
    ports: set[int] = set()
    for _ in range(_PICK_ATTEMPTS):
        if len(ports) == count:
            return sorted(ports)
        port = picker.choice(_PICK_RANGE)
        if bind_error(host, port) is None:
            ports.add(port)
    raise ServerError(
        f"only {len(ports)} of {count} free ports found in {_PICK_RANGE.start} to "
        f"{_PICK_RANGE.stop} on {host}; give the ports yourself"
    )


def reachable_host(host: str) -> str:
    """The address under which a client of this machine reaches a server that listens on `host`."""
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
    return wildcards.get(host, f"[{host}]" if ":" in host else host)


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections that linger from an earlier server do not make the port busy.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener
