"""The store of a group: who may come in, and until when."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")

from torch.distributed import TCPStore  # noqa: E402

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


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_once_closed_nobody_comes_in_and_members_go_on() -> None:
    store = MeetingStore("127.0.0.1", timeout_s=5)
    member = TCPStore("127.0.0.1", store.port, None, is_master=False, timeout=timedelta(seconds=5))
    socket.create_connection(("127.0.0.1", store.port), timeout=1).close()
    store.close_to_others()
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", store.port), timeout=0.3)
    member.set("name", "value")
    assert store.get("name") == member.get("name") == b"value"


def test_without_ray_the_address_is_one_of_this_machine() -> None:
    addresses = {one.address for of in psutil.net_if_addrs().values() for one in of}
    assert own_address() in addresses
