"""``train --check``: all of it, in the order in which it can fail.

Theory of operation. The task and its data need no package and come first. Then a run of a few optimizer steps on the
engines and the trainer of the run file, where they will be; when they are up, and before the first rollout, the
machines are measured. So every number is one of the calls that the run itself makes.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from backends.huggingface_codec import load_codec
from backends.interface import Backend, Codec, Parts, RankFacts, Sample, SelfTest, TrainResult
from backends.kinds import RayBackend, backend_of, own_share, with_local_model
from backends.owner import driving
from backends.preflight import check_run, evaluation_task, task_of
from backends.run import drive
from backends.workers.environments import EnvironmentPool
from backends.workers.processes import WorkerFailedError
from backends.workers.rewards import RewardThreads
from pipelinerl.calibration.calibrate import HARDWARE_FILE, calibrate_trace, doubts, hardware_toml, write_hardware
from pipelinerl.calibration.solve import HardwareFit
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.config.resolve import named_coefficients
from pipelinerl.config.run import RunConfig, check_config
from pipelinerl.errors import BackendError, ConfigError, RunFailedError, RunInterruptedError, install
from pipelinerl.hardware.catalogue import Gpu, LanguageModel, find_model, gpu_of_device
from pipelinerl.hardware.coefficients import Coefficients, Level, coefficients
from pipelinerl.hardware.costs import loading_s
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_training, derive_transport, ring_bytes_s
from pipelinerl.hardware.transport import FILE, WeightTransferConfig
from pipelinerl.records.reports import CheckReport, CheckRow, RunReport, UpdateReport, compared, unchecked, wrong
from pipelinerl.records.run_folder import CHECK_FILE, LOGS_FOLDER, TRACE_FILE, check_vacant, make_folder, write_json
from pipelinerl.records.steps import StepRow
from pipelinerl.records.trace import Trace
from pipelinerl.rl.environments import Content, Turn
from pipelinerl.rl.problems import Problem, Task
from pipelinerl.rl.segments import Segment, generated_tokens
from pipelinerl.rl.tasks import load_environment
from pipelinerl.scheduler.events import EnvironmentFault, RolloutScored, StartRollout
from pipelinerl.util.user_code import kind_and_line

NOT_KNOWN = "nothing: the hardware catalogue does not have this device"


@dataclass(frozen=True, slots=True)
class Expected:
    """The catalogue's expectation of a run on these machines: its central level; slow is below the pessimistic one."""

    config: RunConfig
    gpu: Gpu | None
    model: LanguageModel | None

    @classmethod
    def of(cls, config: RunConfig, device_name: str) -> Self:
        """Return expectations for a run on devices with this driver name."""
        try:
            model = find_model(f"{config.train_table.model.path}/config.json")
        except ConfigError:  # of a kind whose parameters the catalogue cannot count
            model = None
        return cls(config, gpu_of_device(device_name), model)

    def rate(self, what: str, gb_s: float, least: Callable[[Gpu, Coefficients], float], advice: str) -> CheckRow:
        """Return the row of a speed (GB/s), given the catalogue's (bytes/s)."""
        text = f"{gb_s:.3g} GB/s"
        if self.gpu is None:
            return CheckRow(what=what, measured=text, expected=NOT_KNOWN)
        central, floor = (least(self.gpu, self._values(level)) / 1e9 for level in (Level.CENTRAL, Level.PESSIMISTIC))
        expected = f"{central:.3g} GB/s; slow below {floor:.3g}"
        return compared(what, text, expected, slow=gb_s < floor, advice=advice)

    def seconds(
        self, what: str, text: str, seconds: float, most: Callable[[Coefficients], float], advice: str
    ) -> CheckRow:
        """Return the row of a time (seconds), given the catalogue's."""
        if self.gpu is None or self.model is None:
            return CheckRow(what=what, measured=text, expected=NOT_KNOWN)
        central, limit = (most(self._values(level)) for level in (Level.CENTRAL, Level.PESSIMISTIC))
        expected = f"{central:.3g} s; slow above {limit:.3g} s"
        return compared(what, text, expected, slow=seconds > limit, advice=advice)

    def pack_s(self, lengths: list[int], layers: float | None = None) -> Callable[[Coefficients], float]:
        """Return the seconds of one pack on every rank, so many layers recomputed (None: by the run file)."""

        def seconds(values: Coefficients) -> float:
            assert self.gpu is not None and self.model is not None  # noqa: PT018  # not a test
            ranks, shared = self.config.trainer_ranks, self.config.train_table.trainer.sequence_parallel
            known = {} if layers is None else {"recomputation": layers / self.model.layers}
            values = values.model_copy(update=NOTHING_BESIDE | known)
            cost = derive_training(
                self.gpu, self.model, training_accelerators=ranks, coefficients=values, sequence_parallel=shared
            )
            squares = sum(length**2 for length in lengths)
            return cost.micro_batch_s + (cost.token_s * sum(lengths) + cost.token_squared_s * squares) / shared

        return seconds

    def weights(self, values: Coefficients) -> WeightTransferConfig:
        """Return the seconds of a weight update by the run's transport."""
        assert self.gpu is not None and self.model is not None  # noqa: PT018
        return derive_transport(
            self.gpu,
            self.model,
            self.config.train_transport,
            tensor_parallel=self.config.cluster.tensor_parallel,
            training_accelerators=self.config.trainer_ranks,
            colocated=self.config.colocated,
            zero_stage=self.config.train_table.trainer.zero_stage,
            coefficients=values,
        )

    def usable_gb(self, memory_gb: float) -> float:
        """Return what may be used of a device's memory (GB)."""
        return self._values(Level.CENTRAL).memory_share * memory_gb

    def _values(self, level: Level) -> Coefficients:
        return coefficients(level, named_coefficients(self.config))


SOCKET = "Socket"
"""NCCL's name of plain TCP."""
ATTENTION_ERROR = {"cpu": 1e-5, "gpu": 2e-2}
"""Largest error of attention over its largest value: float32 and bfloat16 have 2^-24 and 2^-9, and some hops."""


def machine_rows(config: RunConfig, test: SelfTest, own: dict[str, str], weights_gb: float) -> list[CheckRow]:
    """Compare the reports of the machines; ``own`` are the driver's versions, ``weights_gb`` as engines hold them."""
    others = {
        f"{one.machine}: {name} {one.versions.get(name)}"
        for one in test.places
        for name in own.keys() | one.versions.keys()
        if one.versions.get(name) != own.get(name)
    }
    text = ", ".join(f"{name} {number}" for name, number in own.items())
    rows = [CheckRow(what="versions", measured=text, expected="the same on all machines")]
    if others:
        rows = [wrong("versions", f"{text}; but {', '.join(sorted(others))}", "install the same on all machines")]
    for one in test.places:
        free = f"{one.free_memory_gb:.0f} of {one.memory_gb:.0f} GB free, {one.free_shared_gb:.0f} GB in /dev/shm"
        rows.append(CheckRow(what=f"machine {one.machine}", measured="; ".join([free, *one.gpus])))
    if any(one.sees_folder is False for one in test.places):
        blind = ", ".join(one.machine for one in test.places if one.sees_folder is False)
        rows.append(
            wrong("--out", f"{blind} does not see it", "take a folder that all machines share: ranks write checkpoints")
        )
    writer = test.ranks[0].host if config.train_transport.in_folder else None  # only its machine has a copy
    having = [one for one in test.places if writer in (None, one.machine.split()[0])]
    free_gb = min((one.free_memory_gb for one in having), default=math.inf)
    if free_gb < weights_gb:
        advice = f"weights of {weights_gb:.1f} GB lie there in every update; with train.transport = {FILE.name!r} and "
        advice += "train.weights_folder on a disk on rank 0's machine only"
        rows.append(wrong("host memory", f"{free_gb:.1f} GB are free", advice))
    rows += _rank_rows(config, test.ranks, one_node=len(test.places) == 1)
    if test.to_engines_gb_s is not None:
        expected, size_gb = Expected.of(config, test.ranks[0].device), test.ranks[0].link_gb
        what = f"broadcast of {size_gb:.3g} GB to the engines' machines"
        advice = "look at the network that leads to rank 0's address: one stream of TCP, verified by the host's cores"
        rows.append(
            expected.rate(
                what, test.to_engines_gb_s, lambda gpu, values: min(values.stream_bandwidth, gpu.network), advice
            )
        )
    return rows


def _rank_rows(config: RunConfig, ranks: Sequence[RankFacts], *, one_node: bool) -> list[CheckRow]:
    first, expected = ranks[0], Expected.of(config, ranks[0].device)
    most, errors = ATTENTION_ERROR[config.train_table.device], [one.attention_error for one in ranks]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    text = f"{first.kernel}; differs from plain attention by {error:.1e} of its largest value"
    kernel = CheckRow(what="attention kernel", measured=text, expected=f"at most {most:.0e}")
    if not error <= most:
        kernel = wrong("attention kernel", text, f"at most {most:.0e} is rounding: torch and driver do not fit")
    rows = [kernel]
    if len({one.host for one in ranks}) > 1 and config.train_table.device == "gpu":
        rows.append(_network_row([one.network for one in ranks]))
    if all(one.same_checksum for one in ranks):
        rows.append(CheckRow(what="checksum of weights", measured="the same bits on device and host"))
    else:
        rows.append(wrong("checksum of weights", "other bits on device and host", "engines would refuse all weights"))
    if first.reduce_gb_s is None:
        rows.append(unchecked("all-reduce", "the trainer has one rank"))
    else:
        backend = "NCCL" if config.train_table.device == "gpu" else "gloo"
        advice = "look at NCCL_DEBUG=INFO: which network it takes, and whether over GPUDirect RDMA"

        def link_bytes_s(gpu: Gpu, values: Coefficients) -> float:
            return values.allreduce_share * ring_bytes_s(gpu, one_node=one_node)

        reduced = [one.reduce_gb_s for one in ranks if one.reduce_gb_s is not None]
        sent = [one.broadcast_gb_s for one in ranks if one.broadcast_gb_s is not None]
        for what, speeds in (
            (f"all-reduce of {len(ranks)} ranks ({backend})", reduced),
            (f"broadcast of {first.link_gb:.3g} GB to {len(ranks)} ranks ({backend})", sent),
        ):
            rows.append(expected.rate(what, min(speeds), link_bytes_s, advice))
    if first.to_host_gb_s is not None:
        speed = min(one.to_host_gb_s for one in ranks if one.to_host_gb_s is not None)
        advice = "weights cross to the host at every update: look at PCIe lanes and at the NUMA node of the process"
        rows.append(expected.rate("GPU to pinned memory", speed, lambda _, values: values.host_bandwidth, advice))
    return rows


def _network_row(networks: Sequence[str | None]) -> CheckRow:
    what, text = "NCCL between machines", ", ".join(sorted({str(one) for one in networks}))
    if None in networks:
        return unchecked(what, "no log of NCCL", "leave NCCL_DEBUG and NCCL_DEBUG_FILE unset for the check")
    if SOCKET in networks:
        advice = "install libibverbs and give containers /dev/infiniband, --network host and --ulimit memlock=-1"
        return wrong(what, f"{text}: 5 to 20 times slower than RDMA", advice)
    return CheckRow(what=what, measured=text)


# -------------------------------------------------------------------------------------------- the longest pack


def longest_pack(config: RunConfig, prompt: Sequence[int]) -> tuple[list[Sample], list[int]]:
    """Return samples that fill every rank's longest row with repeated ``prompt``, and the lengths of a row (tokens)."""
    trainer, prompts = config.train_table.trainer, config.train_table.task.max_prompt_tokens
    longest = config.room_tokens
    lengths = [longest] * (trainer.row_tokens // longest)
    if (rest := trainer.row_tokens % longest) > 1:
        lengths.append(rest)

    def sample(number: int, length: int) -> Sample:
        token_N = np.resize(np.array(prompt, dtype=np.int64), length)
        num_prompt = min(prompts, length // 2)
        nothing_T = np.zeros(length - num_prompt, dtype=np.float32)
        return Sample(
            rollout_id=number,
            prompt_P=token_N[:num_prompt],
            segments=(Segment.generated(token_N[num_prompt:], nothing_T),),
            reward=0.0,
            advantage=0.0,
            reference_logprob_T=nothing_T,
        )

    on_all = [length for length in lengths for _ in range(config.trainer_ranks // trainer.sequence_parallel)]
    return [sample(-1 - number, length) for number, length in enumerate(on_all)], lengths


def taught(samples: Sequence[Sample], result: TrainResult) -> list[Sample]:
    """Return trained samples as if the policy had sampled them, all of them good: every loss has a gradient then."""
    return [
        replace(
            sample,
            segments=(Segment.generated(generated_tokens(sample.segments), logprob_T),),
            reward=1.0,
            advantage=1.0,
            reference_logprob_T=logprob_T,
        )
        for sample, logprob_T in zip(samples, result.logprob_T, strict=True)
    ]


def pack_rows(
    config: RunConfig, result: TrainResult, lengths: list[int], rank: RankFacts, preflight_gb: float | None
) -> list[CheckRow]:
    """Judge training on one longest pack (tokens); ``preflight_gb`` None: no estimate for this device."""
    expected, metrics = Expected.of(config, rank.device), result.metrics
    phases = {name: _slowest(metrics, f"{name}_s") for name in ("forward", "backward", "optimizer")}
    spent_s = sum(phases.values())
    times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phases.items())
    what = f"a pack of {sum(lengths)} tokens"
    if "flop_sum" in metrics and "peak_flops" in metrics and spent_s:
        mfu = metrics["flop_sum"] / config.trainer_ranks / spent_s / metrics["peak_flops"]
        times += f"; {mfu:.0%} of the peak FLOP/s"
    advice = "look at clocks and power (nvidia-smi -q -d PERFORMANCE), other processes, and the all-reduce above"
    pack_s = expected.pack_s(lengths, metrics.get("recomputed_layers"))
    rows = [expected.seconds(what, times, phases["forward"] + phases["backward"], pack_s, advice)]
    peak_gb = _slowest(metrics, "peak_memory_gb")
    if math.isnan(peak_gb):
        return rows
    text = f"{peak_gb:.2f} GB at most"
    if rank.total_gb is None or preflight_gb is None:
        return [*rows, CheckRow(what="  its memory", measured=text, expected="of the whole process")]
    usable_gb = expected.usable_gb(rank.total_gb)
    row = CheckRow(
        what="  its memory", measured=text, expected=f"preflight {preflight_gb:.1f} GB; {usable_gb:.0f} GB usable"
    )
    if peak_gb > usable_gb:
        row = wrong(row.what, f"{text} of {usable_gb:.0f} GB usable", "train.trainer.pack_tokens must be smaller")
    return [*rows, row]


def _slowest(metrics: dict[str, Any], name: str) -> float:
    return max((value for key, value in metrics.items() if key.rpartition("/")[2] == name), default=math.nan)


SAMPLE = 64
SOLVED = 1.0


def task_rows(config: RunConfig, task: Task, codec: Codec | None, why_not: str = "") -> list[CheckRow]:
    """Check a sample of the training problems; ``why_not``: why there is no codec."""
    try:
        problems = [task.problem(index, held_out=False) for index in range(SAMPLE)]
        prompts = [problem.prompt for problem in problems]
        empty = sum(not prompt for prompt in prompts)
    except Exception as error:  # the user's own task may raise anything
        return [wrong("prompts", f"a problem raised {kind_and_line(error)}", "mend problem() of the task")]
    first = prompts[0] if len(prompts[0]) <= 60 else prompts[0][:60] + "..."
    text = f"{len(set(prompts))} different among {SAMPLE}; the first: {first!r}"
    rows = [CheckRow(what="prompts", measured=text)]
    if empty:
        rows = [wrong("prompts", f"{empty} of {SAMPLE} are empty", "mend problem() of the task")]
    rows.append(asyncio.run(_reward_row(config, task, problems)))
    if codec is None:
        rows.append(unchecked("lengths in tokens", why_not))
    else:
        rows += _length_rows(config, problems, codec)
    return rows


async def _reward_row(config: RunConfig, task: Task, problems: Sequence[Problem]) -> CheckRow:
    """Reward expected answers, plain and boxed, and empty ones: the expected must earn more."""
    threads, timeout_s = RewardThreads(), config.train_table.task.reward_timeout_s
    begin_s = time.perf_counter()

    async def reward(problem: Problem, answer: str) -> float | str:
        try:
            return await threads.call(task.reward, problem, answer, timeout_s=timeout_s)
        except (Exception, SystemExit) as error:
            return kind_and_line(error)

    given = [one for one in problems if isinstance(one.expected, str)]
    calls = [[reward(one, text) for text in _answers(one)] for one in given or problems]
    earned = await asyncio.gather(*(asyncio.gather(*some) for some in calls))
    threads.close()
    each_s = (time.perf_counter() - begin_s) / sum(map(len, earned))
    raised = [some for some in earned if isinstance(some[0], str)]
    if len(raised) == len(earned):
        return wrong("rewards", f"all of {len(earned)} raised: {raised[0][0]}", "mend reward() of the task")
    failed = f"; {len(raised)} raised, the first: {raised[0][0]}" if raised else ""
    advice = "a rollout whose reward raises fails, and its group is given up" if raised else ""
    if not given:
        text = f"of empty answers only, since expected ones are no texts{failed}"
        return CheckRow(what="rewards", measured=text, advice=advice)
    better = sum(_number(max(some[1:], key=_number)) > _number(some[0]) for some in earned)
    text = f"{better} of {len(earned)} expected answers earn more than an empty one, {1e3 * each_s:.2g} ms each{failed}"
    if not better and min(_number(some[0]) for some in earned) >= SOLVED:
        return wrong("rewards", text, "whatever is answered is right: compare reward() with the expected answers")
    if not better:
        return unchecked(
            "rewards", text, "reward() may want more than the answer alone; samples.jsonl has rewarded ones"
        )
    return CheckRow(what="rewards", measured=text, expected="all", advice=advice)


def _answers(problem: Problem) -> list[str]:
    expected = problem.expected
    return ["", expected, f"\\boxed{{{expected}}}"] if isinstance(expected, str) else [""]


def _number(earned: float | str) -> float:
    return -np.inf if isinstance(earned, str) else earned


def _length_rows(config: RunConfig, problems: Sequence[Problem], codec: Codec) -> list[CheckRow]:
    longest, cut = config.train_table.task.max_prompt_tokens, config.workload.length.max
    lengths = [len(codec.encode(one.prompt)) for one in problems]
    failing = sum(not 0 < length <= longest for length in lengths)
    rows = [lengths_row("prompt tokens", lengths, failing, f"1 to train.task.max_prompt_tokens = {longest}", "fail")]
    answers: list[Any] = [one.expected for one in problems if isinstance(one.expected, str)]
    if answers:
        around = len(codec.encode(""))  # a chat template puts it around prompts
        lengths = [len(codec.encode(answer)) - around for answer in answers]
        too_long = sum(length >= cut for length in lengths)  # the end token comes on top
        rows.append(
            lengths_row("expected answer tokens", lengths, too_long, f"below workload.length.max = {cut}", "be cut")
        )
    return rows


def lengths_row(what: str, lengths: Sequence[int], num_wrong: int, expected: str, fate: str) -> CheckRow:
    """Return the row of some lengths (tokens), so many of which are not as expected."""
    text = f"mean {np.mean(lengths):.0f}, largest {max(lengths)}"
    if not num_wrong:
        return CheckRow(what=what, measured=text, expected=expected)
    share = f"; {num_wrong} of {len(lengths)} would {fate}"
    advice = f"{expected.rpartition(' = ')[0].rpartition(' ')[2]} must be larger, or such problems left out"
    if num_wrong == len(lengths):
        return wrong(what, text + share, advice)
    return CheckRow(what=what, measured=text + share, expected=expected, advice=advice)


# ------------------------------------------------------------------------------------- environments
# A few training problems are played in processes of their own, as in the run. An environment with a method
# ``worked_episode(index)`` gives the turns of a right episode: texts, and whether each is the model's. Any other gets
# empty texts until it ends the episode, or the limit on turns does.

EPISODES = 8
"""Played one after the other: nobody holds an environment up."""
SLOW, SHORT_S = 2.0, 0.01
"""An environment is slow above this multiple of the run file's seconds, and these more."""


@dataclass(slots=True)
class _Played:
    prompts: list[Content] = field(default_factory=list)
    observed: list[Content] = field(default_factory=list)
    episodes: list[list[Content]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    start_s: float = 0.0
    """Of its process and the first reset."""
    reset_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    given: bool = True
    """Whether the turns came from worked episodes."""


def environment_rows(config: RunConfig, codec: Codec | None, why_not: str = "") -> list[CheckRow]:
    """Play a few episodes; ``why_not``: why there is no codec."""
    assert config.environment is not None
    played = asyncio.run(_played(config, config.environment))
    if not played.prompts:
        return [wrong("environment", f"it never opened: {played.failures[0]}", "mend reset() of the environment")]
    rows = [CheckRow(what="environment", measured=f"{played.start_s:.2g} s until its first prompt")]
    if played.failures:
        num_played = len(played.failures) + len(played.rewards)
        text = f"{len(played.failures)} of {num_played} episodes failed, the first: {played.failures[0]}"
        if played.rewards:
            advice = "a rollout whose environment fails is given up, with its group"
            rows.append(CheckRow(what="episodes", measured=text, advice=advice))
        else:
            rows.append(wrong("episodes", text, "mend step() of the environment"))
    rows += [_episode_reward_row(played), *_time_rows(config.environment, played)]
    return rows + (
        [unchecked("lengths in tokens", why_not)] if codec is None else _episode_length_rows(config, codec, played)
    )


async def _played(config: RunConfig, environment: EnvironmentConfig) -> _Played:
    played = _Played()
    worked = getattr(load_environment(config.train_table.task), "worked_episode", None)
    played.given = worked is not None
    pool = EnvironmentPool(config.train_table.task, environment, number=1)
    try:
        for index in range(EPISODES):
            turns = [text for text, own in worked(index) if own] if worked else [""] * environment.turns.max
            try:
                await _play(pool, index, turns[: environment.turns.max], played)
            except WorkerFailedError as error:
                played.failures.append(str(error))
                if error.fault is EnvironmentFault.TIMEOUT:
                    break  # the others would take as long
    finally:
        await pool.shutdown()
    return played


async def _play(pool: EnvironmentPool, index: int, turns: Sequence[str], played: _Played) -> None:
    begin_s = time.perf_counter()
    prompt = (await pool.open(index, index)).content
    seconds = time.perf_counter() - begin_s
    if played.prompts:
        played.reset_s.append(seconds)
    else:
        played.start_s = seconds
    played.prompts.append(prompt)
    episode: list[Content] = [prompt]
    played.episodes.append(episode)
    reward = 0.0
    try:
        for number, text in enumerate(turns, start=1):
            begin_s = time.perf_counter()
            answer = await pool.step(index, Turn((), text))
            played.step_s.append(time.perf_counter() - begin_s)
            episode.append(text)
            reward += answer.reward
            if answer.done or number == len(turns):
                break
            played.observed.append(answer.content)
            episode.append(answer.content)
        played.rewards.append(reward)
    finally:
        pool.release(index)


def _episode_reward_row(played: _Played) -> CheckRow:
    if not played.rewards:
        return unchecked("rewards", "no episode came to its end")
    right = sum(one >= SOLVED for one in played.rewards)
    if not played.given:
        text = f"{right} of {len(played.rewards)} episodes with empty answers earn {SOLVED:g} or more"
        if right == len(played.rewards):
            return wrong("rewards", text, "whatever is answered is right: look at step() of the environment")
        return CheckRow(what="rewards", measured=text)
    text = f"{right} of {len(played.rewards)} worked episodes earn {SOLVED:g} or more"
    if not right:
        return wrong("rewards", text, "compare step() of the environment with its worked_episode()")
    return CheckRow(what="rewards", measured=text, expected="all")


def _time_rows(environment: EnvironmentConfig, played: _Played) -> list[CheckRow]:
    """Compare with the seconds of the run file, which ``simulate`` and ``plan`` use."""
    step_s = environment.step_s if environment.turns.kind == "lognormal" else None
    rows = []
    for key, seconds, expected_s in (
        ("reset_s", played.reset_s, environment.reset_s),
        ("step_s", played.step_s, step_s),
    ):
        if not seconds:
            continue
        mean_s, what = float(np.mean(seconds)), f"seconds of a {key[:-2]}"
        text = f"mean {mean_s:.2g} s, largest {max(seconds):.2g} s"
        if expected_s is None:
            rows.append(CheckRow(what=what, measured=text, expected="none: recorded turns have times of their own"))
            continue
        limit_s = SLOW * expected_s + SHORT_S
        expected = f"environment.{key} = {expected_s:g}; slow above {limit_s:.2g} s"
        advice = f"environment.{key} = {mean_s:.2g} has simulate and plan reckon with that"
        rows.append(compared(what, text, expected, slow=mean_s > limit_s, advice=advice))
    return rows


def _episode_length_rows(config: RunConfig, codec: Codec, played: _Played) -> list[CheckRow]:
    assert config.environment is not None
    turns = config.environment.turns

    def tokens(content: Content) -> int:
        return len(codec.encode(content) if isinstance(content, str) else content)

    longest, prompts = config.train_table.task.max_prompt_tokens, [tokens(one) for one in played.prompts]
    failing = sum(not 0 < one <= min(longest, turns.context_max - 1) for one in prompts)
    limit = f"1 to train.task.max_prompt_tokens = {longest}"
    if longest >= turns.context_max:
        limit = f"below environment.turns.context_max = {turns.context_max}"
    rows = [lengths_row("prompt tokens", prompts, failing, limit, "fail")]
    if played.observed:
        observed = [tokens(one) for one in played.observed]
        cut = sum(one > turns.observation_max for one in observed)
        limit = f"at most environment.turns.observation_max = {turns.observation_max}"
        rows.append(lengths_row("observation tokens", observed, cut, limit, "be cut"))
    whole = [_episode_tokens(config, one, tokens) for one in played.episodes]
    limit = f"at most environment.turns.context_max = {turns.context_max}"
    if played.given:
        return [
            *rows,
            lengths_row("episode tokens", whole, sum(one > turns.context_max for one in whole), limit, "end early"),
        ]
    text = f"mean {np.mean(whole):.0f}, largest {max(whole)} if all turns are the longest"
    return [*rows, CheckRow(what="episode tokens", measured=text, expected=f"{limit}, where an episode ends early")]


def _episode_tokens(config: RunConfig, episode: Sequence[Content], tokens: Any) -> int:
    """Turns that are not known count as the longest, end tokens as one each."""
    assert config.environment is not None
    most, total = config.environment.turns.observation_max, tokens(episode[0])
    for number, content in enumerate(episode[1:]):
        own = number % 2 == 0
        longest = config.workload.length.max if own else most
        total += min(longest, tokens(content) + own if content else longest)
    return int(total)


MOST_LOST = 0.1
"""Share of the effective sample size that arithmetic may cost: more, and engine and trainer have different weights.

Weights w = pi/mu of log-normal spread have KL = s^2 / 2 and ESS = exp(-s^2), so ESS = exp(-2 KL).
"""


def run_rows(
    report: RunReport, folder: Path, expected: Expected, *, weights: dict[str, Any], weights_gb: float
) -> list[CheckRow]:
    """Judge a run of a few steps, recorded in ``folder``.

    ``weights``: the table ``hardware.weights`` fitted to them; empty: nothing was published. ``weights_gb``: as an
    engine holds them.
    """
    text = f"{report.optimizer_steps}, {report.tokens_per_s:,.0f} tokens/s, {report.rollouts.failed} rollouts failed"
    rows = [CheckRow(what="optimizer steps", measured=text)]
    if weights and report.updates is not None:
        rows += _weight_rows(report.updates, expected, weights, weights_gb)
    rows += _agreement(report, expected.config)
    taught = expected.config.train_table.loss.teacher is not None  # by log-probabilities, not by rewards
    return rows if taught else [*rows, _signal_row(expected.config, folder)]


def _weight_rows(
    update: UpdateReport, expected: Expected, weights: dict[str, Any], weights_gb: float
) -> list[CheckRow]:
    way_s = loading_s(WeightTransferConfig.model_validate(weights))
    text = f"{weights_gb:.3g} GB in {way_s:.3g} s ({weights_gb / way_s if way_s else math.inf:.3g} GB/s)"
    advice = "look at the network that leads to rank 0's address, at train.transport, and at rank 0's log"

    times = {name: getattr(update, name) for name in ("pause_s", "transfer_s", "resume_s")}
    still = ", ".join(f"{name[:-2]} {seconds:.3g} s" for name, seconds in times.items())
    return [
        expected.seconds(
            "weights, trainer to all engines", text, way_s, lambda values: loading_s(expected.weights(values)), advice
        ),
        expected.seconds(
            "  an engine stands still", still, sum(times.values()), lambda of: expected.weights(of).pause_s, advice
        ),
    ]


def _agreement(report: RunReport, config: RunConfig) -> list[CheckRow]:
    floor = None if report.mismatch is None else report.mismatch.kl_at_lag_0
    if floor is None:
        return []
    most = -math.log(1 - MOST_LOST) / 2
    text = f"{floor:.1e} nats per token between engine and trainer, of the same weights"
    if config.train_table.sampling.leaves_words_out:
        return [CheckRow(what="agreement", measured=text, expected="nothing: sampling leaves words out")]
    if not floor <= most:
        return [wrong("agreement", text, f"above {most:.2g} it is no rounding: engines have other weights or settings")]
    return [CheckRow(what="agreement", measured=text, expected=f"at most {most:.2g}: costs {MOST_LOST:.0%} of the ESS")]


def _signal_row(config: RunConfig, folder: Path) -> CheckRow:
    prompts: dict[int, int] = {}
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for record in Trace(folder / TRACE_FILE).records():
        if isinstance(record.command, StartRollout):
            prompts[record.command.rollout_id] = record.command.prompt_id
        elif isinstance(record.event, RolloutScored):
            rewards[prompts[record.event.rollout_id]].append(record.event.reward)
    size = config.workload.group_size
    whole = [some for some in rewards.values() if len(some) == size]
    equal = sum(len(set(some)) == 1 for some in whole)
    text = f"{equal} of {len(whole)} groups have equal rewards"
    if size == 1 or not equal:
        return CheckRow(what="signal", measured=text)
    if equal == len(whole):
        return wrong("signal", text, "nothing can be learned: take other problems, or another model")
    filtered = config.scheduler.filter_no_signal
    advice = "" if filtered else "scheduler.filter_no_signal = true trains on the others only"
    return CheckRow(what="signal", measured=text, advice=advice)


MARKER = ".seen"
"""All machines are asked for this file of the folder."""
LINK_BYTES = {"cpu": 64_000_000, "gpu": 1_000_000_000}


def check(
    config: RunConfig,
    *,
    out: Path,
    shared: bool = True,
    backend: Backend | None = None,
    on_step: Callable[[StepRow, dict[str, float]], None] | None = None,
) -> CheckReport:
    """Check a run on its own machines; without the training packages only its task.

    ``out``: new folder for the report, a hardware.toml and the few steps, seen by all machines if ``shared``.
    ``backend`` None: of the run file.

    Raises:
        ConfigError: If the input is wrong; nothing has been started or written then.
        RunInterruptedError: After Ctrl-C.
    """
    train = check_run(config)
    task = task_of(config)
    evaluation_task(config, task)
    backend = backend or backend_of(train)
    missing = backend.missing() if isinstance(backend, RayBackend) else []
    if not missing:
        config = with_local_model(config)
        backend.check(config)
    check_vacant(out)
    if (out / HARDWARE_FILE).exists():
        raise ConfigError(f"--out must be a folder without a {HARDWARE_FILE}, got {out}")
    codec, why_not = _codec(config)
    rows = environment_rows(config, codec, why_not) if task is None else task_rows(config, task, codec, why_not)
    if missing:
        advice = install(f"train-{train.device}")
        why = f"{', '.join(missing)} not installed"
        rows += [unchecked(what, why, advice) for what in ("machines and links", "training", "engines and weights")]
    else:
        make_folder(out)
        model = Path(config.train_table.model.path)
        weights_gb = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
        if train.lora is not None:
            from backends.lora import adapter_shapes
            from backends.transfer.verify import checkpoint_shapes

            shapes = adapter_shapes(checkpoint_shapes(model), train.lora.rank)
            weights_gb = (4 if train.device == "cpu" else 2) * sum(map(math.prod, shapes.values())) / 1e9
        rows += _Trial(config, task, out, shared, backend, on_step, weights_gb).run()
    report = CheckReport(rows=rows)
    make_folder(out)
    write_json(out / CHECK_FILE, report.to_dict())
    return report


def _codec(config: RunConfig) -> tuple[Codec | None, str]:
    path = config.train_table.model.path
    if not Path(path).is_dir():  # a name would be looked for in the network
        return None, f"train.model.path={path!r} is no folder"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return load_codec(config), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except ConfigError as error:
        return None, str(error)


@dataclass(slots=True)
class _Trial:
    """A run of a few steps with measurements before it (mutable)."""

    config: RunConfig
    task: Task | None
    out: Path
    shared: bool
    backend: Backend
    on_step: Callable[[StepRow, dict[str, float]], None] | None
    weights_gb: float
    rows: list[CheckRow] = field(default_factory=list)
    device: str = "CPU"

    def run(self) -> list[CheckRow]:
        """Run; return the findings, a failure last."""
        short, began_s = check_config(self.config), time.monotonic()
        try:
            with driving(self.out) as lock, self.backend.open(short, logs=self.out / LOGS_FOLDER) as parts:
                measure = partial(self._measure, parts, began_s)
                report = drive(short, parts=parts, task=self.task, lock=lock, on_step=self.on_step, trial=measure)
        except RunInterruptedError:
            raise RunInterruptedError("interrupted; the check is not complete") from None
        except (RunFailedError, BackendError) as error:
            return [*self.rows, wrong("run", str(error), "mend this first; see docs/training_faults.md")]
        fitted = self._fitted()
        weights = {} if fitted is None else fitted.table.get("weights", {})
        expected = Expected.of(self.config, self.device)
        self.rows += run_rows(report, self.out, expected, weights=weights, weights_gb=self.weights_gb)
        return [*self.rows, self._hardware_row(fitted)]

    async def _measure(self, parts: Parts, began_s: float) -> None:
        what = f"start of {len(parts.engines)} engines and {self.config.trainer_ranks} ranks"
        self.rows.append(CheckRow(what=what, measured=f"{time.monotonic() - began_s:.0f} s"))
        if parts.self_test is None:
            self.rows.append(unchecked("machines and links", "this backend does not measure them"))
            return
        from backends.ray.placement import versions

        marker = self.out / MARKER
        marker.touch()
        try:
            link_bytes = LINK_BYTES[self.config.train_table.device]
            test = await parts.self_test(link_bytes, str(marker) if self.shared else None)
        finally:
            marker.unlink()
        self.device = test.ranks[0].device
        self.rows += machine_rows(self.config, test, versions(), self.weights_gb)
        samples, lengths = longest_pack(self.config, parts.codec.encode("0123456789"))
        first = await parts.trainer.train(samples, completes_step=True)  # the first step allocates and compiles
        result = await parts.trainer.train(taught(samples, first), completes_step=True)
        preflight_gb = self._preflight_gb(int(result.metrics.get("recomputed_layers", 0)))
        self.rows += pack_rows(self.config, result, lengths, test.ranks[0], preflight_gb)

    def _preflight_gb(self, recomputed: int) -> float | None:
        if self.config.train_table.device == "cpu":
            return None
        from transformers import AutoConfig

        from backends.trainer.footprint import footprint

        model = AutoConfig.from_pretrained(self.config.train_table.model.path)
        return footprint(self.config, model, own_share(self.config), activation_checkpointing=recomputed).total / 1e9

    def _fitted(self) -> HardwareFit | None:
        try:
            return calibrate_trace(self.out, self.config)
        except ConfigError:  # no step, or no rollout, that ended
            return None

    def _hardware_row(self, fitted: HardwareFit | None) -> CheckRow:
        if fitted is None:
            return unchecked(HARDWARE_FILE, "no optimizer step with a finished rollout was made")
        write_hardware(self.out, hardware_toml(fitted, "train --check"))
        poor = doubts(fitted)
        text = "; ".join(part.what for part in fitted.parts)
        return CheckRow(what=HARDWARE_FILE, measured=f"fitted: {text}", advice="; ".join(poor))
