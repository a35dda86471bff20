"""The store of a process group: its address and port, and the machines that it admits."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")


from backends.transfer.rendezvous import RendezvousStore, own_address, reserved_port  # noqa: E402


def listens_at(port: int) -> list[str]:
    return [
        one.laddr.ip for one in psutil.Process().net_connections("inet") if one.laddr.port == port and not one.raddr
    ]


def test_a_store_listens_at_a_reserved_port_of_one_address_only() -> None:
    with reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        store = RendezvousStore("127.0.0.1", port, timeout_s=600)
    assert store.port == port
    assert listens_at(port) == ["127.0.0.1"]


def test_a_store_drops_the_packets_of_strangers() -> None:
    """No packet of theirs gets through, not even the first one of a connection."""
    store = RendezvousStore("127.0.0.1", timeout_s=600, members=["127.0.0.1", "127.0.0.3"])
    for address in ("127.0.0.1", "127.0.0.3"):
        socket.create_connection(("127.0.0.1", store.port), timeout=600, source_address=(address, 0)).close()
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", store.port), timeout=0.3, source_address=("127.0.0.2", 0))
    member = torch.distributed.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=600))
    member.set("key", "by a member")
    assert store.get("key") == b"by a member"


def test_without_ray_the_address_is_one_of_this_machine() -> None:
    addresses = {one.address for of in psutil.net_if_addrs().values() for one in of}
    assert own_address() in addresses


@pytest.mark.parametrize(
    ("listed", "address"),
    [
        ("ib", "10.0.0.7"),
        ("eth1,ib", "10.0.0.7"),
        ("=ib0", "10.0.0.7"),
        ("=ib", None),
        ("^ib", None),
        ("", None),
    ],
)
def test_the_address_is_on_the_interface_that_nccl_is_to_use(
    listed: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Address(NamedTuple):
        family: int
        address: str

    interfaces = {
        "eth0": [Address(socket.AF_INET, "192.168.0.7")],
        "ib0": [Address(socket.AF_INET6, "fe80::1"), Address(socket.AF_INET, "10.0.0.7")],
    }
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    by_ray = own_address()
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", listed)
    assert own_address() == (address or by_ray)
