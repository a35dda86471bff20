"""What the way to the engines' machines is measured with: sender and receivers as threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from needs import need

need("ray", "torch")

import backends.transfer.group  # noqa: E402
from backends.transfer.group import LinkSender, receive  # noqa: E402


def test_all_machines_get_all_bytes_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.transfer.group, "PART_BYTES", 10_000)
    sender, num_bytes = LinkSender(), 123_456
    rendezvous = sender.open()
    with ThreadPoolExecutor() as threads:
        ends = [threads.submit(receive, rendezvous, worker, num_bytes) for worker in (1, 2)]
        assert sender.gb_s(2, num_bytes) > 0
        for end in ends:
            end.result()
