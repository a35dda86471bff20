"""`pipelinerl train` as a user runs it, of which parts are killed: what the run says, and that it goes on."""

import json
import os
import re
import signal

import pytest
from needs import need

need("vllm", "deepspeed", "ray", "tensorboard")
pytest.importorskip("psutil")
torch = pytest.importorskip("torch")
constants = pytest.importorskip("huggingface_hub.constants")

from ledger_check import check_ledger, metrics_of, records  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from real_run import EXAMPLE, Process, cached_model, python_path  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from backends.driver.fleet import FleetRequest, ask  # noqa: E402
from backends.transfer.verify import checkpoint_shapes  # noqa: E402
from pipelinerl.config.run import load_run  # noqa: E402
from pipelinerl.scheduler.events import EngineJoined, EngineLeaving  # noqa: E402
from sim.run import simulate  # noqa: E402

pytestmark = [pytest.mark.real(seconds=90), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def unfitted(tmp_path_factory):
    """A mixture of four experts that knows nothing, in the place of the tiny model."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("models") / "unfitted"
    make_tiny_model(folder, fit_steps=0)
    dense = AutoConfig.from_pretrained(folder).to_dict()
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id",
    )  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{key: dense[key] for key in same}, **experts)).save_pretrained(folder)
    return folder


RAISES = """
import itertools
import os
import threading
import time
from pathlib import Path

import psutil
from process_names import name_of

from pipelinerl.rl.tasks import Arithmetic

NUMBER, ONE_AT_A_TIME = itertools.count(), threading.Lock()
FIRST_RUN = "KILLS" in os.environ
BATCH = 64
KILLS = {2 * BATCH: "ReferenceModel", 4 * BATCH: "VLLM::EngineCore"} if FIRST_RUN else {}
MOST = (14 if FIRST_RUN else 8) * BATCH


def kill(name):
    while True:
        for one in psutil.Process().children(recursive=True):
            try:
                if name in name_of(one):
                    one.kill()
                    return
            except psutil.Error:
                continue
        time.sleep(0.05)


class Moody(Arithmetic):
    def reward(self, problem, answer):
        with ONE_AT_A_TIME:
            number = next(NUMBER)
            if number in KILLS:
                kill(KILLS[number])
        while number >= MOST and not Path(__file__).with_name("go on").exists():
            time.sleep(0.05)
        if problem.prompt.startswith("4"):
            raise RuntimeError("no reward today")
        return super().reward(problem, answer)
"""


def check_same_model(*folders):
    """Bits, tokenizer, and what transformers makes of them."""
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
    assert len({type(AutoModelForCausalLM.from_pretrained(folder)) for folder in folders}) == 1


def test_a_run_survives_killed_parts_and_rewards_that_raise_and_goes_on_after_sigterm_to_its_group(
    unfitted, tmp_path, command, monkeypatch
):
    """First the reference and the engine are killed, in the run that goes on the trainer.

    No run ends before it has shown what it is to show: after ``MOST`` rewards it has to wait. Of problems 11 in 50
    begin with a 4. With ``max_lag=2`` there are at most 7 batches of answers when the engine is lost, so the eighth has
    some of the new one. The model is one of Hugging Face's cache.
    """
    snapshot = cached_model(unfitted, tmp_path / "huggingface", "some/model")
    (tmp_path / "moody.py").write_text(RAISES)
    out, env = tmp_path / "run", {"PYTHONPATH": python_path(tmp_path), "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HOME": str(tmp_path / "huggingface")}
    sets = ["optimizer_steps=22", "train.checkpoint.every=10", "train.evaluation.problems=0", "scheduler.max_lag=2"]
    sets += ["scheduler.train_batch_size=64", "scheduler.generation_batch_size=32"]
    given = [*sets, "train.transport=broadcast", "train.loss.kl_coefficient=0.01", "train.task.name=moody:Moody"]
    given += ["train.task.reward_timeout_s=1000"]
    run = Process("some/model", out, *given, env=env | {"KILLS": "yes"})
    for line in ("no reward today", "reference model died: phase=logprobs replica=0", "engine 0 lost"):
        run.wait_for_line(line)
    run.wait_for_step(5, **{"restarts/engines": 1})
    # The group of the command, as Slurm and ``timeout`` do: none of all that it has started is in it.
    assert len({name for name in ("raylet", "gcs_server", "DeepSpeedRank", "VLLM::") if run.named(name)}) == 4
    assert run.in_its_group() == []
    os.killpg(run.process.pid, signal.SIGTERM)
    status, _, stderr = run.end()
    assert status == 1
    assert stderr.splitlines()[-1].startswith("pipelinerl: interrupted; what was finished is kept")
    assert re.search(r"^0:\d\d:\d\d  \d+/22  reward \S+  lag \S+ .* tokens/s", stderr, re.MULTILINE)  # no terminal
    assert (out / "logs" / "reference-0.log").is_file()
    assert run.left_over() == []
    done = json.loads((out / "summary.json").read_text())["optimizer_steps"]
    assert done >= 5

    run = Process("some/model", out, *given, resume=True, env=env)
    run.wait_for_step(done + 4)
    run.kill("DeepSpeedRank")
    (tmp_path / "go on").touch()  # a trainer that has nothing to do is not missed
    run.wait_for_line("trainer died: ")
    summary = run.summary()
    (line,) = re.findall(r"trainer died: phase=\w+ rank=0 .*", run.err.read_text())  # in whatever phase it was
    assert int(line.rpartition("the run goes on from step ")[2]) in {done, done + 1, 10 * (done // 10 + 1)}
    assert summary.trainer_restarts == summary.engine_restarts == 1
    check_ledger(out, load_run(EXAMPLE, sets), summary)
    assert summary.rollouts.failed > 0
    metrics = metrics_of(out)
    assert metrics[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6)  # the policy is still the reference
    assert metrics[-1]["train/kl_loss"] > metrics[0]["train/kl_loss"]
    # What the engine has loaded is what was trained; a router that is undecided between two experts may differ.
    assert summary.mismatch.kl_at_lag_0 < 1e-5
    assert checkpoint_shapes(out / "model") == checkpoint_shapes(unfitted)
    assert run.left_over() == []
    assert load_run(out / "run.toml").train.model.path == "some/model"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(snapshot.parents[2]))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert command("export", out / "checkpoints" / "step_000022", "--out", tmp_path / "exported").status == 0
    check_same_model(tmp_path / "exported", out / "model")


WAITS = """
import itertools
import time
from pathlib import Path

from pipelinerl.rl.tasks import Arithmetic

NUMBER = itertools.count()


class Waiting(Arithmetic):
    def reward(self, problem, answer):
        while next(NUMBER) >= 12 * 64 and not Path("GO ON").exists():
            time.sleep(0.05)
        return super().reward(problem, answer)
"""
"""A task whose rewards wait for a file after twelve batches."""


@pytest.mark.usefixtures("subreaper")
def test_a_run_whose_engines_come_and_go_loses_nothing_and_is_simulated_from_its_own_trace(tmp_path):
    """Engine 0 is killed and comes back; one is added on a new machine, engine 1 is drained; then a rank is killed."""
    make_tiny_model(tmp_path / "model", fit_steps=0)
    (tmp_path / "waits.py").write_text(WAITS.replace("GO ON", str(tmp_path / "go on")))
    out = tmp_path / "run"
    sets = [
        *("optimizer_steps=24", "train.evaluation.problems=0", "scheduler.train_batch_size=64"),
        *("cluster.accelerators=3", "cluster.generation_accelerators=2", "train.checkpoint.every=2"),
        *("train.trainer.restarts=1", "train.task.name=waits:Waiting", "train.task.reward_timeout_s=900"),
        "train.transport=broadcast",
        "faults=[{kind='kill', engine=0, step=2}, {kind='kill', rank=0, step=20}]",
    ]

    def engines(**request):
        return ask(out, FleetRequest(**request))

    def wait_for(condition, what):
        run.wait_for(lambda: condition([one.state for one in engines()]), what)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        env = {"PYTHONPATH": python_path(tmp_path)}
        run = Process(tmp_path / "model", out, *sets, f"train.ray_address={cluster.address}", env=env)
        run.wait_for_step(4)
        added = engines(add=1)[2]
        assert (added.engine, added.state) == (None, "not started")
        cluster.add_node(num_cpus=1)
        wait_for(lambda states: states == ["up"] * 3, "three engines")
        engines(drain=["1"], notice_s=0.0)
        wait_for(lambda states: states == ["up"] * 2, "two engines")
        (tmp_path / "go on").touch()
        summary = run.summary()
    finally:
        cluster.shutdown()
    assert (summary.engine_restarts, summary.trainer_restarts, summary.rollouts.failed) == (1, 1, 0)
    check_ledger(out, load_run(EXAMPLE, sets), summary)
    changes = [row.event for row in records(out) if isinstance(row.event, EngineJoined | EngineLeaving)]
    assert sorted(one.engine for one in changes) == [0, 1, 2, 3]
    group = f"{{name='of the run', kind='spot', engines=3, capacity='{out}'}}"
    three = ["cluster.accelerators=4", "cluster.generation_accelerators=3", f"fleet.groups=[{group}]"]
    steps = "optimizer_steps=4000"  # nothing waits for a file there: time for all that happened
    simulated = simulate(load_run(EXAMPLE, [*sets[:-1], *three, steps]))  # without the faults: the record has them
    assert simulated.complete
    assert simulated.fleet.joined == 2
