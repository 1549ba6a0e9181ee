from __future__ import annotations

import errno
import socket

import pytest

from oasr_backend.errors import ServerError
from oasr_backend.serve.ports import bind_error, find_free_ports, reachable_host


def test_free_ports_are_distinct_and_can_be_bound() -> None:
    ports = find_free_ports(3)
    assert len(set(ports)) == 3
    assert all(bind_error("127.0.0.1", port) is None for port in ports)


def test_a_port_that_something_listens_on_is_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        error = bind_error("127.0.0.1", listener.getsockname()[1])
    assert error is not None
    assert error.errno == errno.EADDRINUSE


def test_a_port_is_free_again_after_its_connections_linger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listener.accept()
        accepted.close()
        client.close()
    assert bind_error("127.0.0.1", port) is None


def test_an_address_of_another_machine_has_no_free_ports() -> None:
    with pytest.raises(ServerError, match="0 of 1 free ports"):
        find_free_ports(1, host="192.0.2.1")


@pytest.mark.parametrize(
    ("host", "reachable"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")],
)
def test_a_wildcard_address_is_reached_over_loopback(host: str, reachable: str) -> None:
    assert reachable_host(host) == reachable
