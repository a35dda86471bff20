"""A user's reward function in threads: results, errors, and hanging ones that are given up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from backends.rewards import RewardThreads


def test_what_the_function_returns_comes_back_as_a_float():
    assert asyncio.run(RewardThreads(2).call(lambda a, b: a + b, 1, 2, timeout_s=5)) == 3.0


def test_what_the_function_raises_is_raised():
    def fail():
        raise KeyError("no key")

    with pytest.raises(KeyError, match="no key"):
        asyncio.run(RewardThreads(2).call(fail, timeout_s=5))


def test_no_more_calls_at_a_time_than_there_is_room_for():
    running, most = 0, 0
    lock = threading.Lock()

    def count():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return 1.0

    async def all_of_them():
        threads = RewardThreads(3)
        return await asyncio.gather(*(threads.call(count, timeout_s=5) for _ in range(20)))

    assert sum(asyncio.run(all_of_them())) == 20
    assert 1 < most <= 3


def test_one_that_hangs_is_given_up_and_its_place_is_free_again():
    over = threading.Event()

    async def two():
        threads = RewardThreads(1)
        with pytest.raises(TimeoutError, match=r"^no reward after 0\.05 s \(train\.task\.reward_timeout_s\)$"):
            await threads.call(lambda: over.wait(30), timeout_s=0.05)
        return await threads.call(lambda: 7.0, timeout_s=5)

    assert asyncio.run(two()) == 7.0
    over.set()


def test_one_that_hangs_does_not_keep_the_process():
    program = """
import asyncio, time
from backends.rewards import RewardThreads

async def main():
    try:
        await RewardThreads(1).call(lambda: time.sleep(600), timeout_s=0.1)
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "given up\n"
