"""The store of a group: who may come in, and until when."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")


from backends.transfer.rendezvous import RendezvousStore, own_address, reserved_port  # noqa: E402


def listens_at(port: int) -> list[str]:
    return [
        one.laddr.ip for one in psutil.Process().net_connections("inet") if one.laddr.port == port and not one.raddr
    ]


def test_a_store_listens_on_one_address_only() -> None:
    store = RendezvousStore("127.0.0.1", timeout_s=600)
    assert listens_at(store.port) == ["127.0.0.1"]


def test_a_store_can_have_the_port_that_was_asked_for() -> None:
    with reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        assert RendezvousStore("127.0.0.1", port, timeout_s=600).port == port


def test_a_store_does_not_hear_strangers() -> None:
    """No packet of theirs gets through, not even the first one of a connection."""
    store = RendezvousStore("127.0.0.1", timeout_s=600, members=["127.0.0.1", "127.0.0.3"])
    for address in ("127.0.0.1", "127.0.0.3"):
        socket.create_connection(("127.0.0.1", store.port), timeout=600, source_address=(address, 0)).close()
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", store.port), timeout=0.3, source_address=("127.0.0.2", 0))
    member = torch.distributed.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=600))
    member.set("said", "by a member")
    assert store.get("said") == b"by a member"


def test_without_ray_the_address_is_one_of_this_machine() -> None:
    addresses = {one.address for of in psutil.net_if_addrs().values() for one in of}
    assert own_address() in addresses
