"""The store of a group: who may come in, and until when."""

from __future__ import annotations

import socket

import pytest

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")


from backends.transfer.meeting import MeetingStore, own_address  # noqa: E402


def listens_at(port: int) -> list[str]:
    return [
        one.laddr.ip for one in psutil.Process().net_connections("inet") if one.laddr.port == port and not one.raddr
    ]


def test_a_store_listens_on_one_address_only() -> None:
    store = MeetingStore("127.0.0.1", timeout_s=5)
    assert listens_at(store.port) == ["127.0.0.1"]


def test_a_store_can_have_the_port_that_was_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert MeetingStore("127.0.0.1", port, timeout_s=5).port == port


def test_without_ray_the_address_is_one_of_this_machine() -> None:
    addresses = {one.address for of in psutil.net_if_addrs().values() for one in of}
    assert own_address() in addresses
