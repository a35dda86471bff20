"""Broken files of every kind, for all that read them: one line (a run file: a line per key), status 2, soon, in little
memory.

``BROKEN_FILES=2000 python -m pytest tests/project/test_broken_files.py`` tries as many; each seed is one of them.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import in_memory
import pytest
from command_line import TINY, Command, Result
from model_configs import ARCHITECTURES
from tiny_comparison import CONVENTIONAL, PIPELINE
from tiny_comparison import run as tiny_run
from tiny_plan import priced_plan

from backends.driver.checkpoint import FOLDER, read_newest
from pipelinerl.config.run import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import EnvironmentsReport, EnvironmentsRow
from pipelinerl.records.reports import Bottleneck, RolloutSeconds
from pipelinerl.records.run_folder import write_json
from pipelinerl.records.validation_report import PredictedRow, UnusableRow
from sim.compare import compare
from sim.run import simulate
from sim.validation.predict import validation_report

NUMBER = int(os.environ.get("BROKEN_FILES", "120"))
MOST_S, MOST_KB = 2.0, 500_000
"""Of one command: seconds of the processor, beyond the imports, and kilobytes."""
TOKENS = [
    *(b"nan", b"-1", b"1e999", b"9" * 5000, b"null", b"{}", b"[]", b'"\\ud800"', b"\x00", b"\xff", b"\r", b"\x1b[2J"),
    *(b"<img src=x onerror=alert(1)>", b"true", b",", b"=", b'"', b"[" * 5000, b"a." * 5000, b"../../etc", b""),
]
LOG = b"".join(
    b"step:%d - timing_s/step:60.0 - timing_s/gen:30.0 - timing_s/update_actor:20 - perf/total_num_tokens:51200 - "
    b"response_length/mean:100.0 - response_length/max:400.0 - prompt_length/mean:100.0\n" % number
    for number in range(1, 4)
)
TIMES = b"kind,batch,ctx,seconds\n" + b"".join(b"decode,%d,%d,0.0%d\n" % (n, 100 * n, n + 10) for n in range(1, 9))
METRICS = b"".join(
    b'{"step": %d, "reward/mean": 0.5, "ess/lag_0": 0.9, "ess/token_raw": 0.9}\n' % n for n in range(1, 7)
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of every kind, all whole."""
    root = tmp_path_factory.mktemp("whole")
    (root / "run.toml").write_text(TINY)
    simulate(load_run(root / "run.toml"), out=root / "run", trace=True)
    (root / "run" / "metrics.jsonl").write_bytes(METRICS)
    (root / "faults.toml").write_text('[[faults]]\nkind = "slow"\nstep = 2\nseconds = 1.0\nfactor = 2.0\n')
    (root / "verl.log").write_bytes(LOG)
    (root / "times.csv").write_bytes(TIMES)
    (root / "lengths.csv").write_text("prompt_id,response_tokens,prompt_tokens\n1,5,9\n1,6,9\n2,7,9\n2,8,9\n")
    for name in ("slime_older.log", "nemo_rl_async.log", "prime_rl_orchestrator.log", "areal.log", "c550.toml"):
        shutil.copy(LOGS / name, root / name.replace("c550", "gpu"))
    (root / "verl.jsonl").write_text("".join(f"{json.dumps({'step': n, 'data': VERL})}\n" for n in range(3)))
    (root / "verl.csv").write_text(f"_step,{','.join(VERL)}\n" + "".join(f"{n},60,30,1e3,100,400\n" for n in range(3)))
    events = [{"ph": "X", "name": "train.rollout", "dur": 9, "args": {"global_step": n}} for n in range(3)]
    (root / "areal.json").write_text(json.dumps({"traceEvents": events}))
    (root / "logged.csv").write_text("step,step_s,generation_s,length_mean\n1,60,30,100\n2,60,30,100\n")
    (root / "config.json").write_text(json.dumps(ARCHITECTURES["Qwen2.5-7B"][0]))
    turns = {"group": 1, "stream": 0, "prompt_len": 20, "out_lens": [12, 30], "obs_lens": [5], "tool_times": [2.5]}
    (root / "turns.jsonl").write_text("".join(json.dumps(turns | {"group": n // 4}) + "\n" for n in range(16)))
    for name in ("mooncake_sessions", "dynamo", "applied_compute", "unirl/workload"):
        shutil.copy(LOGS.parent / "traces" / f"{name}.jsonl", root / f"{Path(name).name}.jsonl")
    shutil.copy(LOGS.parent / "traces" / "unirl" / "manifest.json", root)
    (root / "published.csv").write_text("id,system,hw,model\na,verl,H100,Qwen2.5-7B\n")
    compare(tiny_run(arms=[PIPELINE, CONVENTIONAL], baseline="conventional"), out=root / "compared", workers=1)
    in_memory.run(CHECKPOINTED, root / "trained", in_memory.parts_of(CHECKPOINTED))
    for folder in ("plan", "numbers", "validation"):
        (root / folder).mkdir()
    write_json(root / "plan" / "plan.json", priced_plan().to_dict())
    write_json(root / "numbers" / "environments.json", ENVIRONMENTS.to_dict())
    write_json(root / "validation" / "validation.json", validation_report(PUBLISHED).to_dict())
    shutil.copytree(root / "run", root / "numbers" / "run")
    shutil.copy(root / "run.toml", root / "plan" / "recommended.toml")
    return root


LOGS = Path(__file__).parents[1] / "data" / "logs"
VERL = {"timing_s/step": 60.0, "timing_s/gen": 30.0, "perf/total_num_tokens": 1e3, "response_length/mean": 100.0,
        "response_length/max": 400.0}  # fmt: skip
CHECKPOINTED = in_memory.config_of(steps=2, train={"checkpoint": {"every": 2, "keep": 1}})
ENVIRONMENTS = EnvironmentsReport(
    accelerators=4, slots=12, knee=16, verdict="the knee is at 16", failures=[], complete=True,
    rows=[
        EnvironmentsRow(
            count=count, rollouts_per_hour=rate, in_use_mean=count, generation=0.5, training=0.1, lag_mean=1.0,
            seconds=RolloutSeconds(environment=1.0, waiting=0.0, engine=1.0, scoring=0.0), folder="run",
            bottleneck=Bottleneck.ENVIRONMENT, usd_per_1000_rollouts=3.0,
        )
        for count, rate in ((8, 50.0), (16, 100.0))
    ],
)  # fmt: skip
PUBLISHED = [
    PredictedRow(
        id="one", family="one", quantity="s/step", assumed=("no cv",), mode="", gpus=8, answer_tokens=None,
        fitted_to=(), inputs=(), error=0.1, measured=10.0, predicted=11.0, low=9.0, high=13.0, alone=None,
        alone_low=None, alone_high=None,
    ),
    UnusableRow(id="e", reason="no"),
]  # fmt: skip
SIMULATE = ("simulate", "run.toml")
LENGTHS = ("--set", "workload.length.kind=empirical", "--set", "workload.length.source=lengths.csv")
PAGE = ("--out", "page.md")
BY_NAME = ("--set", "hardware={ gpu = 'H100', model = 'Qwen2.5-7B' }", "--set", "workload.length.max=50")
TURNS = (
    "--set",
    "environment={ count = 4, turns = { kind = 'recorded', source = 'turns.jsonl', max = 2, "
    "observation_max = 9, context_max = 90 } }",
    "--set",
    "workload.length.max=50",
)
JOB = ("--model", "Qwen2.5-7B", "--gpu", "H100", "--accelerators", "4")
BATCH = "scheduler.train_batch_size=16"
SHORT = ("--set", "workload.length={ kind = 'uniform', max = 400 }")
READERS: list[tuple[str, tuple[str, ...]]] = [
    ("run.toml", SIMULATE),
    ("run/summary.json", ("report", "run", *PAGE)),
    ("run/profile.json", ("report", "run", *PAGE)),
    ("run/steps.csv", ("report", "run", *PAGE)),
    ("run/metrics.jsonl", ("report", "run", *PAGE)),
    ("run/trace.jsonl.gz", ("replay", "run")),
    ("run/trace.jsonl.gz", ("timeline", "run", "--out", "timeline.json")),
    ("run/trace.jsonl.gz", ("calibrate", "run")),
    ("times.csv", ("calibrate", "times.csv")),
    ("lengths.csv", (*SIMULATE, *LENGTHS)),
    ("verl.log", ("calibrate", "--from", "verl", "verl.log", *JOB)),
    ("run.toml", (*SIMULATE, "--hardware", "run.toml")),
    ("faults.toml", (*SIMULATE, "--faults", "faults.toml")),
    *(
        (log, ("calibrate", "--from", name, log, *JOB, "--set", BATCH, *SHORT * (name in ("areal", "nemo-rl"))))
        for log, name in (
            *(
                ("verl.jsonl", "verl"),
                ("verl.csv", "verl"),
                ("slime_older.log", "slime"),
                ("nemo_rl_async.log", "nemo-rl"),
            ),
            *(("prime_rl_orchestrator.log", "prime-rl"), ("areal.log", "areal"), ("areal.json", "areal")),
            ("logged.csv", "csv"),
        )
    ),
    ("compared/comparison.json", ("report", "compared", *PAGE)),
    ("compared/as_given/pipeline/run.toml", ("report", "compared", *PAGE)),
    ("plan/plan.json", ("report", "plan", *PAGE)),
    ("plan/recommended.toml", ("report", "plan", *PAGE)),
    ("numbers/environments.json", ("report", "numbers", *PAGE)),
    ("validation/validation.json", ("report", "validation", *PAGE)),
    ("config.json", (*SIMULATE, *BY_NAME, "--set", "hardware.model=config.json")),
    ("gpu.toml", (*SIMULATE, *BY_NAME, "--set", "hardware.gpu=gpu.toml")),
    ("turns.jsonl", (*SIMULATE, *TURNS)),
    *((f"{name}.jsonl", ("calibrate", f"{name}.jsonl")) for name in ("mooncake_sessions", "dynamo", "workload")),
    ("mooncake_sessions.jsonl", (*SIMULATE, "--workload", "mooncake_sessions.jsonl", "--set", "workload.group_size=1")),
    ("applied_compute.jsonl", (*SIMULATE, "--workload", "applied_compute.jsonl", "--set", "workload.group_size=1")),
    ("manifest.json", ("calibrate", "manifest.json")),
    ("published.csv", ("validate", "published.csv")),
    ("times.csv", (*SIMULATE, "--measured", "times.csv")),
    ("run/steps.csv", (*SIMULATE, "--measured", "run")),
    *((f"trained/{FOLDER}/step_000002/{name}", ("checkpoint",)) for name in ("manifest.json", "run.pickle", "driver")),
]


def edited(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with one to four changes: flipped, cut, doubled, spliced, of another type or size."""
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        match chance.randrange(6):
            case 0 if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:to] + data[at:]
            case 3:
                data = data[:at] + data[to:]
            case 4:
                data = data[:at] + chance.choice(TOKENS) + data[at:]
            case _:
                words = data.split(b" ")
                words[chance.randrange(len(words))] = chance.choice(TOKENS)
                data = b" ".join(words)
    return data


def huge(path: Path, chance: random.Random) -> None:
    path.write_bytes(
        chance.choice([b"[" * 10**6, b"a" * 10**7, b"{}," * 10**6, b"\n" * 10**6, b"a=1\n" * 10**6, bytes(10**7)])
    )


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def replace(path: Path, _: random.Random) -> None:
        path.unlink()
        make(path)

    return replace


PLACES: list[Callable[[Path, random.Random], None]] = [
    huge,
    replaced_by(lambda path: path.mkdir()),
    replaced_by(os.mkfifo),
    replaced_by(lambda path: path.symlink_to("/dev/zero")),
    replaced_by(lambda path: path.symlink_to(path)),
    replaced_by(lambda path: None),
    replaced_by(lambda path: path.touch()),
    lambda path, _: (shutil.rmtree(path.parent), path.parent.touch()) if path.parent != Path.cwd() else path.unlink(),
    lambda path, _: (path if os.getuid() else path.parent).chmod(0),
]


def memory_kb(name: str) -> int:
    """Return a figure of this process from the kernel (kB)."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{name}:")]
    return int(line.split()[1])


def newest_checkpoint() -> Result:
    """Read it, as ``train --resume`` does first."""
    try:
        read_newest(Path("trained"), CHECKPOINTED)
    except ConfigError as error:
        return Result(2, "", "".join(f"pipelinerl: {line}\n" for line in str(error).splitlines()))
    return Result(0, "", "")


def fault_of(result: Result, name: str) -> str:
    """Return the promise that is broken, or nothing. A changed file may be valid, and a changed run may fail."""
    lines = [line for line in result.err.splitlines() if not line.startswith("pipelinerl: warning: ")]
    keys = {line.partition(" must ")[0].partition(" is ")[0] for line in lines}
    if result.status not in (0, 1, 2):
        return "another status"
    if result.status == 2 and result.out:
        return "results beside an error"
    if result.status and not (len(lines) == 1 or (name.endswith(".toml") and 1 < len(keys) == len(lines) <= 21)):
        return f"{len(lines)} lines"
    if not result.status and lines:
        return "lines without an error"
    return "a long line" if any(len(line) > 1100 for line in lines) else ""


@pytest.mark.slow
def test_whole_files_are_read(whole: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the other test would say nothing; three logs are of larger jobs than the one they are fitted to."""
    shutil.copytree(whole, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    results = {(name, one): newest_checkpoint() if one == ("checkpoint",) else command(*one) for name, one in READERS}
    told = [(name, result.err) for name, result in results.items() if result.status]
    assert [one for one in told if "is out of reach" not in one[1]] == []
    assert len(told) == 3


@pytest.mark.slow(seconds=20)
def test_a_broken_file_is_one_line(
    whole: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    faults, refused = [], 0
    for seed in range(NUMBER):
        chance = random.Random(seed)
        name, arguments = READERS[seed % len(READERS)]
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(whole, work)
        monkeypatch.chdir(work)
        path = (work / name).resolve()
        if chance.random() < 0.2:
            chance.choice(PLACES)(path, chance)
        elif path.suffix == ".gz" and chance.random() < 0.8:
            path.write_bytes(gzip.compress(edited(gzip.decompress(path.read_bytes()), chance), 1))
        else:
            path.write_bytes(edited(path.read_bytes(), chance))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before_kb, begin_s = memory_kb("VmRSS"), time.process_time()
        try:
            result = newest_checkpoint() if arguments == ("checkpoint",) else command(*arguments)
            fault = fault_of(result, name)
        except BaseException as error:  # what the command line would show as a traceback
            result, fault = Result(3, "", ""), repr(error)
        took_s, more_kb = time.process_time() - begin_s, memory_kb("VmHWM") - before_kb
        if fault or took_s > MOST_S or more_kb > MOST_KB:
            what = f"seed {seed}, {name}, {arguments[0]}: {fault or 'costs much'}, status {result.status}"
            faults.append(f"{what}, {took_s:.1f} s, {more_kb} kB: {result.err[:300]}"[:600])
        refused += result.status == 2
    assert not faults, "\n".join(faults)
    assert refused > NUMBER / 3
