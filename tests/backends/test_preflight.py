"""Wrong input to `pipelinerl train`: one clear line that names the key, status 2, and nothing started or written."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import assert_fails, sets
from needs import need

need("transformers", "tokenizers", "tensorboard", "vllm", "deepspeed", "ray")

from chat_tokenizers import CHATML, chat_tokenizer  # noqa: E402
from model_configs import ARCHITECTURES  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

from backends import kinds  # noqa: E402
from backends.driver import metrics as metrics_log  # noqa: E402
from backends.interface import Place  # noqa: E402
from backends.preflight import check_run, evaluation_task, task_of  # noqa: E402
from backends.trainer import footprint  # noqa: E402
from pipelinerl.config.run import load_run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_arithmetic.toml"
NGRAM = ["engine.speculation.method=ngram", "engine.speculation.tokens=3"]
TRAINED = [path for path in sorted(EXAMPLE.parent.glob("*.toml")) if load_run(path).train is not None]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, fit_steps=0)
    return folder


@pytest.fixture
def refuses(model, tmp_path, command):
    """Assert that a run file with these overrides is refused in one line, with these words, and nothing is written."""

    def check(*overrides, words, example=EXAMPLE):
        options = sets(f"train.model.path={model}", *overrides)
        assert_fails(command("train", example, "--out", tmp_path / "out", *options), 2, *words)
        assert not (tmp_path / "out").exists()

    return check


@pytest.fixture(scope="module")
def real_shape(tmp_path_factory):
    """Makes a folder with the shape of a model of the large examples, a tokenizer, and no weights."""

    def make(name):
        folder = tmp_path_factory.mktemp("models") / name
        chat_tokenizer(CHATML, "<|im_end|>").save_pretrained(folder)
        shape = ARCHITECTURES[name][0] | {"max_position_embeddings": 131_072}
        (folder / "config.json").write_text(json.dumps(shape))
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    return make


@pytest.mark.parametrize("example", TRAINED, ids=lambda path: path.stem)
def test_every_example_passes_the_checks_before_a_run(example, model, real_shape, tmp_path, monkeypatch):
    """On a machine of 2 TB, as H100s have; counting a 7B takes two seconds."""
    monkeypatch.setattr(footprint, "memory_bytes", lambda: 2e12)
    sets, train = [f"train.model.path={model}"], load_run(example).train
    if train.device == "gpu":
        problems = [json.dumps({"problem": f"{number} + 1", "answer": f"{number + 1}"}) for number in range(6000)]
        (tmp_path / "problems.jsonl").write_text("\n".join(problems))
        shape = real_shape(train.model.path.rpartition("/")[2])
        sets = [f"train.model.path={shape}", f"train.task.settings.path={tmp_path / 'problems.jsonl'}"]
    config = load_run(example, sets)
    kinds.backend_of(check_run(config)).check(config)
    evaluation_task(config, task_of(config))


@pytest.mark.parametrize(
    ("device", "value", "layers"),
    [("gpu", "true", (0, 2)), ("gpu", "false", None), ("gpu", "1", None), ("cpu", "true", None)],
)
def test_layers_to_recompute_are_chosen_on_gpus_where_the_run_file_leaves_it(model, tmp_path, device, value, layers):
    """None of two with 80 GB, all with 1 MB."""
    sets = [f"train.model.path={model}", f"train.trainer.activation_checkpointing={value}", f"train.device={device}"]
    config, place = load_run(EXAMPLE, sets), Place(options=({"num_cpus": 1},), weights_folder=tmp_path)
    choose = kinds.DEEPSPEED.make(config, place)._recomputed
    assert (choose and (choose(80e9), choose(1e6))) == layers


def changed(name, change):
    """Returns what changes files of JSON in a model's folder."""

    def make(folder):
        for path in folder.glob(name):
            path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return make


def without(name):
    return lambda folder: (folder / name).unlink()


def without_words(data):
    special = {one["content"] for one in data["added_tokens"]}
    words = {word: number for word, number in data["model"]["vocab"].items() if word in special}
    return data | {"model": data["model"] | {"vocab": words}}


def without_end(data):
    return {key: value for key, value in data.items() if key != "eos_token"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (shutil.rmtree, "must be a folder with a model (config.json), got"),
        (without("model.safetensors"), "must hold weights as *.safetensors"),
        (changed("config.json", lambda _: {"model_type": "abacus"}), "its config.json cannot be used"),
        (without("tokenizer.json"), "must hold the tokenizer, merges.txt or tokenizer.json or vocab.json, got"),
        (changed("tokenizer.json", without_words), "must hold a tokenizer that knows text, got"),
        (changed("*token*.json", without_end), "must have a tokenizer with an end token (eos_token)"),
        (changed("config.json", lambda data: data | {"tie_word_embeddings": True}), "tie_word_embeddings=false on dev"),
    ],
)
def test_a_model_that_cannot_be_trained(refuses, model, tmp_path, make, words):
    make(shutil.copytree(model, tmp_path / "model"))
    refuses(f"train.model.path={tmp_path / 'model'}", words=["train.model.path", words])


def other_words(data):
    words = {word.replace("7", "~"): number for word, number in data["model"]["vocab"].items()}
    return data | {"model": data["model"] | {"vocab": words}}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (shutil.rmtree, "must be a folder with a model (config.json), got"),
        (changed("tokenizer.json", other_words), "must have the tokens of train.model.path"),
        (
            changed("config.json", lambda data: data | {"vocab_size": 63}),
            "of at least the model's 64, got 63",
        ),
        (
            changed("config.json", lambda data: data | {"max_position_embeddings": 20}),
            "train.task.max_prompt_tokens + workload.length.max must be at most the teacher's 20 positions, got 22",
        ),
    ],
)
def test_a_teacher_that_cannot_teach(refuses, model, tmp_path, make, words):
    make(shutil.copytree(model, tmp_path / "model"))
    refuses(f"train.loss.teacher={tmp_path / 'model'}", words=[words])


@pytest.mark.slow
def test_a_7b_that_cannot_fit_is_refused_before_anything_starts(refuses, real_shape):
    """The main example, with the real shape of its model and no weights, as on a machine without GPUs."""
    refuses(
        f"train.model.path={real_shape('Qwen2.5-7B')}",
        "train.trainer.activation_checkpointing=false",
        example=EXAMPLE.parent / "qwen7b_128_h100.toml",
        words=["train.trainer.activation_checkpointing must be true", "needs 98.1 GB a GPU"],
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.task.name=no_such_module:Task"], "train.task.name "),
        (["train.trainer.kind=fsdp2"], "train.trainer.zero_stage must be 3 with kind='fsdp2', got 2"),
        (["train.trainer.expert_parallel=2"], "train.trainer.expert_parallel must be 1 with kind='deepspeed', got 2"),
        (
            ["train.trainer.kind=fsdp2", "train.trainer.zero_stage=3", "train.trainer.expert_parallel=2"],
            "train.trainer.expert_parallel must be 1 for a model without experts that transformers fuses",
        ),
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
        (["train.engine.vllm.quantization=fp8_per_block"], "train.engine.vllm.quantization must be left out on device"),
        (["train.loss.mask_low=0.1"], "train.loss.mask_low needs mask='token', 'sequence' or 'geometric', got no mask"),
        (
            ["train.loss.teacher=/a", "train.loss.kl_coefficient=0.1"],
            "kl_coefficient must be 0 with a teacher, got 0.1",
        ),
        (
            ["train.loss.teacher=/a", "scheduler.filter_no_signal=true"],
            "scheduler.filter_no_signal must be false with a teacher, who grades all tokens, got true",
        ),
        (["train.lora.rank=600", "train.lora.alpha=1"], "train.lora.rank must be at most 512, got 600"),
        (["train.trainer.router_replay=true"], "train.trainer.router_replay must be false on device='cpu', where vLLM"),
        ([*NGRAM, "engine.speculation.method=eagle"], "engine.speculation.method must be 'ngram' on device='cpu', got"),
        ([*NGRAM, "train.sampling.min_p=0.1"], "train.sampling.min_p must be 0 with engine.speculation, with which"),
        (
            ["engine.speculation.method=ngram", "engine.speculation.tokens=0"],
            "engine.speculation.tokens must be at least 1, got 0",
        ),
        (["train.weights_folder=/nowhere"], "train.weights_folder must be a folder that can be written"),
        (
            ["train.transport=pipelinerl.hardware.transport:UNKNOWN"],
            "train.transport must be file, broadcast, delta or a WeightTransport with ends, "
            "got 'pipelinerl.hardware.transport:UNKNOWN', which can only be simulated",
        ),
        (
            ["train.transport=refit"],
            "train.transport must be file, broadcast, delta or package.module:ATTRIBUTE, ",
        ),
        (
            ["scheduler.kind=conventional", "train.transport=broadcast"],
            "train.transport='broadcast' needs engines and trainer on accelerators of their own, "
            "got scheduler.kind='conventional'",
        ),
    ],
)
def test_settings_that_do_not_fit(refuses, overrides, words):
    refuses(*overrides, words=[words])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "train.engine.vllm.quantization=fp8_per_block",
            "must be 'fp8' with train.engine.vllm.quantization, got 'bf16'",
        ),
        ("hardware.engine_weights=fp8", "must be 'bf16' without train.engine.vllm.quantization, got 'fp8'"),
    ],
)
def test_engines_of_a_run_have_the_weights_that_are_simulated(refuses, override, words):
    refuses(override, example=EXAMPLE.parent / "qwen7b_128_h100.toml", words=[f"hardware.engine_weights {words}"])


def test_a_driver_older_than_torch_needs_is_one_line(refuses, monkeypatch):
    monkeypatch.setattr(kinds, "driver_fault", lambda: "the NVIDIA driver runs CUDA 12.8, and torch was built for 13.0")
    line = "train.device='gpu' needs a newer driver on this machine, or another torch: the NVIDIA driver runs CUDA 12.8"
    refuses("train.device=gpu", words=[line])


def test_a_run_file_without_the_train_table(command, tmp_path):
    result = command("train", EXAMPLE.parent / "quickstart.toml", "--out", tmp_path / "out")
    assert_fails(result, 2, "train is missing; pipelinerl train needs the table [train]: model, task, optimizer")


def test_no_folder_to_write_to(command):
    assert_fails(command("train", EXAMPLE), 2, "train needs --out DIR")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_missing_packages_name_the_extra(refuses, monkeypatch, device):
    monkeypatch.setattr(kinds, "find_spec", lambda name: None if name in ("vllm", "deepspeed") else object())
    advice = f"pip install -e '.[train-{device}]' in the project's folder"
    refuses(f"train.device={device}", words=[f"train needs vLLM, DeepSpeed, not installed: {advice}"])


def test_weights_and_biases_that_is_not_installed(refuses, monkeypatch):
    monkeypatch.setattr(metrics_log, "find_spec", lambda name: None)
    refuses("train.logging.wandb_project=x", words=["train.logging.wandb_project needs wandb"])


@pytest.mark.real
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.accelerators=640", "cluster.generation_accelerators=320"], "CPU cores of the Ray cluster, got 640"),
        (["train.device=gpu"], "at most the 0 GPUs of the Ray cluster, got 2"),
    ],
)
def test_more_accelerators_than_the_cluster_has(refuses, overrides, words):
    refuses(*overrides, words=[words])
    assert subprocess.run(["false"], check=False).returncode == 1  # Ray has left SIGCHLD as it was


def test_compiling_without_a_compiler_is_refused_before_anything_starts(refuses, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    refuses("train.trainer.fused=true", words=["train.trainer.fused must be false: "])
