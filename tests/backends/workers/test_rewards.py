"""A user's reward function in threads: results, errors, and hanging ones that are given up."""

import asyncio
import os
import subprocess
import sys
import threading
from queue import SimpleQueue

import pytest

from backends.workers.processes import WorkerFailedError
from backends.workers.rewards import RewardProcesses, RewardThreads, overlong_penalty
from pipelinerl.rl.config import TaskConfig


def test_what_the_function_returns_comes_back_as_a_float_and_what_it_raises_is_raised():
    assert asyncio.run(RewardThreads(2).call(lambda a, b: a + b, 1, 2, timeout_s=600)) == 3.0
    with pytest.raises(KeyError, match="no key"):
        asyncio.run(RewardThreads(2).call({}.__getitem__, "no key", timeout_s=600))


def test_no_more_calls_at_a_time_than_there_is_room_for():
    async def threads_of_21_calls():
        before, over, threads = set(threading.enumerate()), threading.Event(), RewardThreads(3)
        calls = [asyncio.create_task(threads.call(over.wait, timeout_s=600)) for _ in range(21)]
        for _ in range(100):
            await asyncio.sleep(0)
        found = set(threading.enumerate()) - before
        over.set()
        assert await asyncio.gather(*calls) == [1.0] * 21
        return len(found)

    assert asyncio.run(threads_of_21_calls()) == 3


def test_one_that_hangs_is_given_up_and_another_thread_takes_its_place():
    over, hung = threading.Event(), SimpleQueue()

    def hang():
        hung.put(threading.current_thread())
        over.wait(60)

    def answer():
        assert threading.current_thread() is not hung.get(timeout=60)
        return 7.0

    async def two():
        threads = RewardThreads(1)
        with pytest.raises(TimeoutError, match=r"^no reward after 0\.05 s \(train\.task\.reward_timeout_s\)$"):
            await threads.call(hang, timeout_s=0.05)
        return await threads.call(answer, timeout_s=600)

    assert asyncio.run(two()) == 7.0
    over.set()


def test_one_that_hangs_does_not_keep_the_process():
    program = """
import asyncio, time
from backends.workers.rewards import RewardThreads
try:
    asyncio.run(RewardThreads(1).call(time.sleep, 600, timeout_s=0.1))
except TimeoutError:
    print("given up")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert ended.stdout == "given up\n"


def processes(*, number=1, timeout_s=600.0, **settings):
    task = TaskConfig(name="games:Judge", settings=settings, reward_timeout_s=timeout_s, reward_workers=number)
    return RewardProcesses(task, number=number)


def rewards(pool, *calls):
    """Rewards of (index, answer), or the failure's message."""

    async def one(index, answer):
        try:
            return await pool.reward(index, answer, held_out=False)
        except WorkerFailedError as error:
            return str(error)

    async def all_of_them():
        try:
            return [await one(*call) for call in calls]
        finally:
            await pool.shutdown()

    return asyncio.run(all_of_them())


def test_a_process_knows_a_problem_by_its_index_and_whatever_becomes_of_it_the_next_reward_is_there():
    """The judge rewards an answer that is the index, and does what the answer says."""
    calls = [(3, "3"), (4, "3"), (0, "raise"), (0, "die"), (5, "5"), (0, "nonsense"), (6, "6")]
    assert rewards(processes(), *calls) == [
        1.0, 0.0, "its reward raised KeyError: 'no key'", "its process ended in its reward", 1.0,
        "its reward raised TypeError: float() argument must be a string or a real number, not 'object'", 1.0,
    ]  # fmt: skip


def test_a_process_that_hangs_is_killed_and_another_takes_its_place(tmp_path):
    """A machine may stand still for half a second, so the reward is asked for until it is there."""
    pool = processes(timeout_s=0.5, pids=str(tmp_path))
    hung, *others = rewards(pool, (0, "hang"), *[(3, "3")] * 20)
    late = "its reward took more than 0.5 s"
    assert hung == late
    assert set(others) - {late} == {1.0}
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 1 + [hung, *others[:-1]].count(late)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_task_that_cannot_be_made_there_costs_the_reward():
    assert rewards(processes(unknown=1), (0, "0")) == ["its process ended in its start"]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (101, -1), (1000, -1)]
)
def test_the_overlong_penalty_falls_to_minus_one_and_stays(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=100, overlong_tokens=20) == penalty
    assert overlong_penalty(num_tokens, max_tokens=100, overlong_tokens=0) == 0
