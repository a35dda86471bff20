"""Tasks: their problems, held-out problems, right answers."""

import json
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import ConfigError, install
from pipelinerl.rl import tasks as mathtask
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.problems import Problem, Task, shuffled
from pipelinerl.rl.tasks import COUNTERS, Arithmetic, Chain, Math, load_task


def prompts(task: Arithmetic | Math, *, held_out: bool) -> list[str]:
    count = task.num_held_out if held_out else task.num_training
    return [task.problem(index, held_out=held_out).prompt for index in range(count)]


def test_no_held_out_problem_is_trained_on_and_none_is_left_out() -> None:
    task = Arithmetic(largest_operand=5, operators="+-*")
    held_out, training = prompts(task, held_out=True), prompts(task, held_out=False)
    assert sorted(held_out + training) == sorted(f"{a}{o}{b}=" for o in "+-*" for a in range(6) for b in range(6))
    assert (task.num_held_out, task.num_training) == (10, 98)


def test_problems_wrap_around() -> None:
    task = Arithmetic()
    assert (task.num_held_out, task.num_training) == (250, 2250)
    assert task.problem(2250 + 3, held_out=False) == task.problem(3, held_out=False)
    assert task.problem(250 + 3, held_out=True) == task.problem(3, held_out=True)


def test_the_seed_decides_which_problems_are_held_out() -> None:
    first, again, other = (set(prompts(Arithmetic(seed=seed), held_out=True)) for seed in (0, 0, 1))
    assert first == again
    assert len(first & other) < 100


@pytest.mark.parametrize(("operator", "value"), [("+", 10), ("-", -4), ("*", 21)])
def test_the_expected_answer_is_the_number(operator: str, value: int) -> None:
    task = Arithmetic(largest_operand=7, operators=operator)
    problems = [task.problem(index, held_out=held_out) for index in range(64) for held_out in (True, False)]
    assert Problem(prompt=f"3{operator}7=", expected=str(value)) in problems


@pytest.mark.parametrize(("answer", "reward"), [("19", 1), (" 19\n", 1), ("019", 0), ("1", 0), ("", 0), ("19=", 0)])
def test_only_the_number_is_right(answer: str, reward: float) -> None:
    assert Arithmetic().reward(Problem(prompt="12+7=", expected="19"), answer) == reward


def test_a_chain_is_the_sum_of_its_steps() -> None:
    task = Chain(fewest_steps=3, most_steps=3)
    assert (task.num_held_out, task.num_training) == (10, 90)
    problems = [task.problem(index, held_out=held_out) for held_out in (True, False) for index in range(90)]
    assert sorted({problem.prompt for problem in problems}) == [f"c{a}+{b}=" for a in range(10) for b in range(10)]
    assert task.worked_answer(Problem("c7+5=", expected="a2")) == "c2b7a2"
    assert Problem("c7+5=", expected="a2") in problems


@given(index=st.integers(0, 10_000), held_out=st.booleans(), fewest=st.integers(1, 42))
def test_a_worked_answer_is_right_and_two_characters_a_step(index: int, held_out: bool, fewest: int) -> None:
    task = Chain(fewest_steps=fewest)
    problem = task.problem(index, held_out=held_out)
    answer = task.worked_answer(problem)
    assert 2 * fewest <= len(answer) <= 84
    assert answer[::2] == COUNTERS[: len(answer) // 2][::-1]
    assert task.reward(problem, answer) == 1


@pytest.mark.parametrize(("answer", "reward"), [("a2", 1), ("c9b9a2\n", 1), ("c2b7a3", 0), ("c2b7", 0), ("", 0)])
def test_only_the_result_of_a_chain_is_judged(answer: str, reward: float) -> None:
    assert Chain().reward(Problem("c7+5=", expected="a2"), answer) == reward


@given(count=st.integers(1, 300), seed=st.integers(0, 10))
def test_shuffled_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled(place, count=count, seed=seed) for place in range(count)) == list(range(count))


class Fails:
    def __init__(self, *, kind: type[Exception] = RuntimeError, why: str = "no database today\nat all") -> None:
        raise kind(why)


def load(name: str, **settings: Any) -> Task:
    return load_task(TaskConfig(name=name, settings=settings))


def test_a_task_is_loaded_by_name_or_path() -> None:
    assert load("arithmetic", largest_operand=9).num_held_out == 10
    assert load("pipelinerl.rl.tasks:Arithmetic", largest_operand=9).num_held_out == 10


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sums", {}, r"train\.task\.name must be arithmetic, chain, math or package\.module:attribute, got 'sums'"),
        ("a:", {}, "got 'a:'"),
        ("no_such_module:Task", {}, "must be importable, got 'no_such_module:Task' .*No module named"),
        (
            "pipelinerl.rl.tasks:Sums",
            {},
            "must name an attribute of pipelinerl.rl.tasks, got 'pipelinerl.rl.tasks:Sums'",
        ),
        ("pipelinerl.rl.tasks:BUILT_IN", {}, "must be a class or a function"),
        ("builtins:dict", {}, "must be a task with problem and reward"),
        ("arithmetic", {"largest": 3}, r"train\.task\.settings must suit arithmetic: .*'largest', got {'largest': 3}"),
        ("arithmetic", {"largest_operand": 2}, "largest_operand must be at least 3, got 2"),
        ("arithmetic", {"largest_operand": "9"}, "largest_operand must be a whole number, got '9'"),
        ("arithmetic", {"operators": "/"}, "operators must be some of"),
        ("arithmetic", {"operators": "++"}, "operators must not repeat"),
        *(
            ("chain", steps, "fewest_steps and most_steps must be 1 to 42, in order")
            for steps in ({"fewest_steps": 0}, {"most_steps": 43}, {"fewest_steps": 5, "most_steps": 4})
        ),
        ("math", {}, "settings must suit math: .*'path'"),
        (f"{__name__}:Fails", {}, r"train\.task\.name='.*:Fails' cannot be made: RuntimeError: no database today$"),
        (f"{__name__}:Fails", {"kind": OSError}, "cannot be made: OSError: no database today$"),
        (f"{__name__}:Fails", {"kind": TimeoutError, "why": ""}, "cannot be made: TimeoutError$"),
        (f"{__name__}:Raises", {}, r"be a task with num_held_out, got '.*:Raises' \(OSError: no file\)$"),
        *(
            (
                f"{__name__}:Count",
                {"num_held_out": wrong},
                f"num_held_out is a count of problems or None, got {wrong} from",
            )
            for wrong in (-1, 0.5)
        ),
    ],
)
def test_a_wrong_task_is_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(name, **settings)
    assert "\n" not in str(caught.value)


class Count:
    def __init__(self, *, num_held_out: Any) -> None:
        self.num_held_out = num_held_out

    def problem(self, index: int, *, held_out: bool) -> Problem:
        return Problem(prompt="")

    def reward(self, problem: Problem, answer: str) -> float:
        return 0.0


class Raises(Count):
    def __init__(self) -> None:
        pass

    @property
    def num_held_out(self) -> int:
        raise OSError("no file\nat all")


@pytest.mark.parametrize("count", [None, 0, 3])
def test_a_users_task_may_hold_out_any_number_of_problems(count: int | None) -> None:
    assert load(f"{__name__}:Count", num_held_out=count).num_held_out == count


@pytest.mark.parametrize(
    ("package", "needs"),
    [("math_verify", "name='math' needs math-verify"), ("datasets", "path='folder' needs datasets")],
)
def test_without_its_packages_the_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str, needs: str
) -> None:
    if package != "math_verify":
        pytest.importorskip("math_verify")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(f"{needs}: {install('math')}")):
        load("math", path="folder")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pytest.importorskip("math_verify")
    path = tmp_path / "problems.jsonl"
    rows = [{"problem": f"What is {n}/2?", "answer": f"\\frac{{{n}}}{{2}}"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n", encoding="utf-8")
    return path


def test_a_share_of_the_file_is_held_out(file: Path) -> None:
    task = Math(path=str(file), held_out_share=0.25, template="Q: {problem}\nA:")
    held_out, training = prompts(task, held_out=True), prompts(task, held_out=False)
    assert (len(held_out), len(training)) == (5, 15)
    assert set(held_out + training) == {f"Q: What is {n}/2?\nA:" for n in range(20)}
    assert task.problem(15, held_out=False) == task.problem(0, held_out=False)


def test_questions_of_the_held_out_file_are_not_trained_on(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "held_out.jsonl"
    other.write_text('{"problem": "What is 3/2?", "answer": 1.5}\n', encoding="utf-8")
    task = Math(path=str(file), held_out_path=str(other))
    assert task.problem(0, held_out=True) == Problem(prompt="What is 3/2?", expected="1.5")
    assert task.num_training == 19
    assert "What is 3/2?" not in prompts(task, held_out=False)


def test_without_held_out_problems_asking_for_one_is_an_error(file: Path) -> None:
    with pytest.raises(ValueError, match="no problem is held out"):
        Math(path=str(file), held_out_share=0.0).problem(0, held_out=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [
        ("\\frac{1}{2}", "so it is $0.5$", 1),
        ("\\frac{1}{2}", "so it is $\\boxed{\\frac{2}{4}}$.", 1),
        ("0.5", "1/2", 1),
        ("First $2 + 2 = 4$, so $\\boxed{4}$", "4", 1),
        ("\\frac{1}{2}", "$\\frac{1}{3}$", 0),
        ("\\frac{1}{2}", "", 0),
        ("\\frac{1}{2}", "$\\frac{1", 0),
    ],
)
def test_answers_are_compared_as_mathematics_in_a_thread(file: Path, expected: str, answer: str, reward: float) -> None:
    task = Math(path=str(file))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(task.reward, Problem(prompt="?", expected=expected), answer).result() == reward


def test_an_expected_answer_that_cannot_be_read_is_an_error(file: Path) -> None:
    with pytest.raises(ValueError, match="the expected answer must be an expression, got ''"):
        Math(path=str(file)).reward(Problem(prompt="?", expected=""), "1")


TOWER = "$9^{9^{9^{9}}}$"


@pytest.mark.slow
def test_an_answer_that_never_ends_is_wrong_by_the_alarm_and_others_come_back_right(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mathtask, "VERIFY_LIMIT_S", 9.0)  # so a step may take 3 s
    monkeypatch.setattr(mathtask, "MAX_PROCESSES", 2)
    task = Math(path=str(file))
    problem = Problem(prompt="?", expected="\\frac{1}{2}")
    with ThreadPoolExecutor(4) as threads:
        rewards = list(threads.map(lambda answer: task.reward(problem, answer), [TOWER, "$0.5$", "2", "1/2", "$0.5$"]))
    assert rewards == [0, 1, 0, 1, 1]


@pytest.mark.slow
def test_an_answer_that_never_ends_is_wrong_by_the_kill_and_the_task_goes_on(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Math(path=str(file))
    problem = Problem(prompt="?", expected="4")
    assert task.reward(problem, "4") == 1
    with monkeypatch.context() as patch:
        patch.setattr(mathtask, "VERIFY_LIMIT_S", 0.5)  # the alarm needs 1 s
        assert task.reward(problem, TOWER) == 0
    assert task.reward(problem, "$2 + 2$") == 1


def test_a_task_can_be_pickled(file: Path) -> None:
    task = Math(path=str(file))
    task.reward(Problem(prompt="?", expected="4"), "4")
    again = pickle.loads(pickle.dumps(task))
    assert again.problem(3, held_out=False) == task.problem(3, held_out=False)
    assert again.reward(Problem(prompt="?", expected="4"), "4") == 1


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ('{"problem": "a", "answer": 1}\n{"problem"\n', {}, r"bad\.jsonl line 2 is not valid JSON: "),
        ("[1]\n", {}, r"bad\.jsonl line 1 must be a JSON object, got '\[1\]'"),
        ('{"question": "a", "answer": 1}\n', {}, r"line 1 must have a text under 'problem' \(prompt_key\), got None"),
        ('\n{"problem": "a"}\n', {}, r"line 2 must have a text or a number under 'answer' \(answer_key\), got None"),
        ("", {}, r"settings\.path must have problems that are not held out"),
        (None, {}, r"cannot read train\.task\.settings\.path .*/bad\.jsonl: No such file"),
        (None, {"template": "Q"}, r"settings\.template must contain {problem}, got 'Q'"),
        (None, {"held_out_share": 1}, r"settings\.held_out_share must be in \[0, 1\), got 1"),
    ],
)
def test_a_bad_file_or_setting_of_math_is_named(tmp_path: Path, text: str, settings: Any, message: str) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load("math", path=str(path), **settings)


def test_a_saved_data_set_is_read_like_a_file(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"q": ["1+1", "1+2"], "a": ["2", "3"]})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "splits"))
    for folder in ("one", "splits"):
        task = Math(path=str(tmp_path / folder), prompt_key="q", answer_key="a")
        assert sorted(prompts(task, held_out=False)) == ["1+1", "1+2"]
    with pytest.raises(ConfigError, match=r"settings\.path must be a file or data set that can be read, .*'test'"):
        Math(path=str(tmp_path / "splits"), split="test")
