"""Wrong input to `pipelinerl train`: one clear line that names the key, status 2, and nothing started or written."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import need

need("transformers", "tokenizers", "tensorboard", "vllm", "deepspeed", "ray")

from backends import kinds  # noqa: E402
from backends.driver import metrics as metrics_log  # noqa: E402
from backends.tiny_model import make_tiny_model  # noqa: E402
from pipelinerl.cli import main  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_arithmetic.toml"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, fit_steps=0)
    return folder


@pytest.fixture
def said_to(monkeypatch, capfd):
    """Returns what a command line that is wrong is answered."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["pipelinerl", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("pipelinerl: ")]
        assert len(lines) == 1, lines
        return lines[0]

    return run


@pytest.fixture
def complaint(model, tmp_path, said_to):
    """Returns what is said to a run file with these overrides."""

    def run(*sets, example=EXAMPLE, extra=()):
        overrides = (f"train.model.path={model}", *sets)
        options = [part for one in overrides for part in ("--set", one)]
        out = tmp_path / "out"
        line = said_to("train", example, "--out", out, *options, *extra)
        assert not out.exists()
        return line

    return run


def copied(model, folder, name, change):
    """Copy a model's folder; a file of JSON is changed."""
    shutil.copytree(model, folder)
    for path in folder.glob(name):
        path.write_text(json.dumps(change(json.loads(path.read_text()))))


def without_tokenizer(model, folder):
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()


def without_words(data):
    special = {one["content"] for one in data["added_tokens"]}
    words = {word: number for word, number in data["model"]["vocab"].items() if word in special}
    return data | {"model": data["model"] | {"vocab": words}}


def without_end(data):
    return {key: value for key, value in data.items() if key != "eos_token"}


def of_unknown_kind(_, folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "abacus"}')
    (folder / "model.safetensors").write_bytes(b"")


def without_weights(_, folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda *_: None, "must be a folder with a model (config.json), got"),
        (without_weights, "must hold weights as *.safetensors"),
        (of_unknown_kind, "its config.json cannot be used"),
        (without_tokenizer, "must hold the tokenizer, merges.txt or tokenizer.json or vocab.json, got"),
        (lambda *at: copied(*at, "tokenizer.json", without_words), "must hold a tokenizer that knows text, got"),
        (lambda *at: copied(*at, "*token*.json", without_end), "must have a tokenizer with an end token (eos_token)"),
        (
            lambda *at: copied(*at, "config.json", lambda data: data | {"tie_word_embeddings": True}),
            "tie_word_embeddings=false on device='cpu'",
        ),
    ],
)
def test_a_model_that_cannot_be_trained(complaint, model, tmp_path, make, says):
    make(model, tmp_path / "model")
    line = complaint(f"train.model.path={tmp_path / 'model'}")
    assert "train.model.path" in line
    assert says in line


@pytest.mark.slow
def test_a_7b_that_cannot_fit_is_refused_before_anything_starts(complaint, tmp_path):
    """The main example, with the real shape of its model and no weights, as on a machine without GPUs."""
    folder = tmp_path / "Qwen2.5-7B"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    shape = {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28}
    shape |= {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
    (folder / "config.json").write_text(json.dumps(shape | {"model_type": "qwen2", "tie_word_embeddings": False}))
    sets = (f"train.model.path={folder}", "train.trainer.activation_checkpointing=false")
    line = complaint(*sets, example=EXAMPLE.parent / "qwen7b_128_h100.toml")
    assert "train.trainer.activation_checkpointing must be true" in line
    assert "needs 114.7 GB a GPU" in line


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["train.task.name=no_such_module:Task"], "train.task.name "),
        (
            ["scheduler.kind=conventional", "scheduler.partial_rollouts=true", "scheduler.weight_update=keep"],
            "scheduler.kind='partial_rollouts' is for the simulator",
        ),
        (
            ["train.task.max_prompt_tokens=510", "train.trainer.pack_tokens=1000"],
            "must be at most the model's 512 positions, got 516",
        ),
        (
            ["train.trainer.pack_tokens=20"],
            "must hold the longest rollout, train.task.max_prompt_tokens + workload.length.max = 22 tokens, "
            "got pack_tokens=20",
        ),
        (["train.evaluation.problems=251"], "at most the task's 250 held-out problems, got 251"),
        (["train.engine.vllm.dtype=float16"], "train.engine.vllm.dtype must be left out, since train.device decides"),
        (["train.weights_folder=/nowhere"], "train.weights_folder must be a folder that can be written"),
        (
            ["train.transport=pipelinerl.hardware.transport:UNKNOWN"],
            "train.transport must be file, broadcast, streamed or a WeightTransport with ends, "
            "got 'pipelinerl.hardware.transport:UNKNOWN', which can only be simulated",
        ),
        (["train.transport=refit"], "train.transport must be file, broadcast, streamed or package.module:ATTRIBUTE, "),
        (
            ["scheduler.kind=conventional", "train.transport=broadcast"],
            "train.transport='broadcast' needs engines and trainer on accelerators of their own, "
            "got scheduler.kind='conventional'",
        ),
    ],
)
def test_settings_that_do_not_fit(complaint, sets, says):
    assert says in complaint(*sets)


def test_a_run_file_without_the_train_table(said_to, tmp_path):
    line = said_to("train", EXAMPLE.parent / "quickstart.toml", "--out", tmp_path / "out")
    assert "train is missing; pipelinerl train needs the table [train]: model, task, optimizer" in line


def test_no_folder_to_write_to(said_to):
    assert "train needs --out DIR" in said_to("train", EXAMPLE)


def test_nothing_to_resume(complaint):
    assert "--resume needs a checkpoint" in complaint(extra=["--resume"])


@pytest.mark.parametrize(("device", "extra"), [("cpu", "train-cpu"), ("gpu", "train-gpu")])
def test_missing_packages_name_the_extra(complaint, monkeypatch, device, extra):
    monkeypatch.setattr(kinds, "find_spec", lambda name: None if name in ("vllm", "deepspeed") else object())
    line = complaint(f"train.device={device}")
    assert f"train needs vLLM, DeepSpeed, not installed: pip install -e '.[{extra}]' in the project's folder" in line


def test_weights_and_biases_that_is_not_installed(complaint, monkeypatch):
    monkeypatch.setattr(metrics_log, "find_spec", lambda name: None)
    assert "train.logging.wandb_project needs wandb" in complaint("train.logging.wandb_project=x")


@pytest.mark.real
@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["cluster.accelerators=640", "cluster.generation_accelerators=320"], "CPU cores of the Ray cluster, got 640"),
        (["train.device=gpu"], "at most the 0 GPUs of the Ray cluster, got 2"),
    ],
)
def test_more_accelerators_than_the_cluster_has(complaint, sets, what):
    assert what in complaint(*sets)
    assert subprocess.run(["false"], check=False).returncode == 1  # Ray has left SIGCHLD as it was
