"""vLLM behind the promises of ``Engine``: real processes on CPU, against transformers in float32.

One engine is started for the whole module; a second one from a folder with the weights that the first one was
updated to, and a third one that gets them by broadcast. The models are untrained and made here; that of the first
engine has no end token, so that its answers have the length asked for.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from character_model import make_model
from vllm_engine import PROMPT, REAL, Subject, settings

from backends.interface import Generated, GenerateRequest, UpdateTimes, Weights
from backends.vllm.engine import VLLMEngine
from backends.vllm.plugin import register
from backends.vllm.version import client
from pipelinerl.errors import BackendError, EngineLostError
from pipelinerl.hardware.transport import BROADCAST, FILE, WeightTransport
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate

pytestmark = REAL
T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]

END, TRIES = 1, 10


@pytest.fixture(scope="module")
def subject(run: Run[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for ``by_direct_copies``
    folder = tmp_path_factory.mktemp("engine")
    model = make_model(folder / "model", seed=0, end_token=None)
    subject = Subject(VLLMEngine(settings(folder / "model")), folder, [model])
    run(subject.engine.start())
    yield subject
    run(subject.engine.shutdown())


def request(
    rollout_id: int, num_tokens: int, *, prompt: tuple[int, ...] = PROMPT, temperature: float = 1.0, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(rollout_id, prompt, num_tokens, seed=rollout_id, temperature=temperature, **sampling)


def living(processes: list[Any]) -> list[Any]:
    return [one for one in processes if one.is_running() and one.status() != "zombie"]


async def update_in_flight(subject: Subject, kind: WeightUpdate, num_updates: int = 1) -> tuple[list[Any], UpdateTimes]:
    """Update while eight answers of 300 tokens are in progress, at 40 more each time; again if one was whole before."""
    for _ in range(TRIES):
        tasks = [asyncio.create_task(subject.engine.generate(request(number, 300))) for number in range(8)]
        for number in range(num_updates):
            await subject.engine.generate(request(100 + number, 40))
            times = await subject.engine.update(subject.next_weights(), kind)
        answers = await asyncio.gather(*tasks)
        if all(one.aborted or len(subject.versions) - 1 in one.spans.versions for one in answers):
            break
    return answers, times


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    subject: Subject, run: Run[Any], temperature: float
) -> None:
    answers = run(gather(subject.engine, [request(number, 60, temperature=temperature) for number in range(8)]))
    assert all(answer.spans == VersionSpans((0,), (60,)) and not answer.aborted for answer in answers)
    assert max(subject.error(answer, keep=False, temperature=temperature) for answer in answers) < 1e-5


@pytest.mark.parametrize("sampling", [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.85}], ids=["top_p", "top_k", "min_p"])
def test_log_probabilities_are_those_among_the_words_that_are_left(
    subject: Subject, run: Run[Any], sampling: dict[str, float]
) -> None:
    """Words are sorted by probability p; with the probability Z of those left, log mu = log p - log Z."""
    import torch

    answers = run(gather(subject.engine, [request(number, 60, temperature=2.0, **sampling) for number in range(4)]))
    for answer in answers:
        row = torch.tensor([[*PROMPT, *answer.tokens_T.tolist()]])
        with torch.no_grad():
            p_TV, word_TV = (subject.versions[0](row).logits[0, len(PROMPT) - 1 : -1] / 2.0).softmax(-1).sort(-1, True)
        before_TV = p_TV.cumsum(-1) - p_TV
        left_TV = before_TV < sampling.get("top_p", 1.0)
        left_TV &= p_TV >= sampling.get("min_p", 0.0) * p_TV[:, :1]
        left_TV[:, int(sampling.get("top_k", 64)) :] = False
        chosen_TV = word_TV == torch.tensor(answer.tokens_T)[:, None]
        assert (left_TV & chosen_TV).sum() == 60
        logprob_T = (p_TV[chosen_TV] / (p_TV * left_TV).sum(-1)).log().numpy()
        assert abs(logprob_T - answer.logprob_T).max() < 1e-5
        assert left_TV.float().mean() < 0.8  # the test can tell


def test_a_stop_text_ends_an_answer_and_is_in_it(subject: Subject, run: Run[Any]) -> None:
    seven = 9  # the token of the character
    answers = run(gather(subject.engine, [request(number, 300, stop=("7",)) for number in range(8)]))
    assert all(answer.tokens_T.tolist().index(seven) == len(answer.tokens_T) - 1 for answer in answers)
    assert max(subject.error(answer, keep=False) for answer in answers) < 1e-5


def test_temperature_0_takes_the_likeliest_token(subject: Subject, run: Run[Any]) -> None:
    import torch

    answer = run(subject.engine.generate(request(0, 30, temperature=0.0)))
    row = torch.tensor([[*PROMPT, *answer.tokens_T.tolist()]])
    likeliest = subject.versions[0](row).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert answer.tokens_T.tolist() == likeliest.tolist()


def test_a_request_that_cannot_be_answered_is_refused_and_the_engine_goes_on(subject: Subject, run: Run[Any]) -> None:
    with pytest.raises(BackendError, match="generation failed: engine=2 rollout=5; ") as refused:
        run(subject.engine.generate(request(5, 10, prompt=(3,) * 600)))
    assert not isinstance(refused.value, EngineLostError)
    assert run(subject.engine.generate(request(5, 10))).tokens_T.size == 10


async def by_direct_copies(engine: VLLMEngine) -> bool:
    """Whether all workers bring weights in by copies alone."""
    return all(await engine._vllm.llm.collective_rpc(lambda worker: worker.weight_transfer_engine._swap.direct))


def test_kept_sequences_go_on_with_the_old_keys_and_values(subject: Subject, run: Run[Any]) -> None:
    answers, times = run(update_in_flight(subject, WeightUpdate.KEEP, num_updates=2))
    assert all(len(answer.spans.versions) == 3 and not answer.aborted for answer in answers)
    assert max(subject.error(answer, keep=True) for answer in answers) < 1e-4
    assert min(subject.error(answer, keep=False) for answer in answers) > 0.01  # the test can tell
    assert min(times.pause_s, times.transfer_s, times.resume_s) > 0
    assert run(by_direct_copies(subject.engine))


def test_recomputed_sequences_go_on_with_new_keys_and_values(subject: Subject, run: Run[Any]) -> None:
    answers, _ = run(update_in_flight(subject, WeightUpdate.RECOMPUTE))
    assert all(len(answer.spans.versions) == 2 and not answer.aborted for answer in answers)
    assert max(subject.error(answer, keep=False) for answer in answers) < 1e-4
    assert min(subject.error(answer, keep=True) for answer in answers) > 0.01


def test_aborted_sequences_can_be_continued_with_the_new_weights(subject: Subject, run: Run[Any]) -> None:
    parts, _ = run(update_in_flight(subject, WeightUpdate.ABORT))
    newest = len(subject.versions) - 1
    assert all(part.aborted and part.spans.versions == (newest - 1,) for part in parts)
    prompts = [(*PROMPT, *part.tokens_T.tolist()) for part in parts]
    rests = run(gather(subject.engine, [request(i, 300 - parts[i].tokens_T.size, prompt=prompts[i]) for i in range(8)]))
    assert [part.tokens_T.size + rest.tokens_T.size for part, rest in zip(parts, rests, strict=True)] == [300] * 8
    assert all(rest.spans.versions == (newest,) and not rest.aborted for rest in rests)
    assert max(subject.error(rest, prompt, keep=False) for rest, prompt in zip(rests, prompts, strict=True)) < 1e-4


def test_a_prompt_is_computed_once_per_version(
    subject: Subject, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[Any] = []
    as_generated = client.as_generated
    monkeypatch.setattr(client, "as_generated", lambda output: outputs.append(output) or as_generated(output))
    prompt = tuple(2 + number % 50 for number in range(300))
    answers = [run(subject.engine.generate(request(0, 5, prompt=prompt))) for _ in range(2)]
    run(subject.engine.update(subject.next_weights(), WeightUpdate.KEEP))
    answers += [run(subject.engine.generate(request(0, 5, prompt=prompt))) for _ in range(2)]
    first, again, updated, updated_again = (output.num_cached_tokens for output in outputs)
    assert first == updated == 0
    assert again == updated_again == 256  # whole blocks of 128
    assert max(subject.error(answer, prompt, keep=False) for answer in answers) < 1e-4


def test_what_is_transferred_is_bit_for_bit_what_is_loaded_and_a_bad_file_changes_nothing(
    subject: Subject, run: Run[Any], tmp_path: Path
) -> None:
    make_model(tmp_path / "model", seed=0, end_token="<eos>")
    subject.versions[-1].save_pretrained(tmp_path / "model")
    fresh = VLLMEngine(settings(tmp_path / "model"))
    run(fresh.start())
    try:
        before = run(answers_bit_for_bit_the_same(fresh, subject.engine))
        run(bad_files_change_nothing(fresh, subject.next_weights(), tmp_path))
        after = [run(fresh.generate(request(number, 100))) for number in range(8)]
        assert [a.logprob_T.tobytes() for a in after] == [b.logprob_T.tobytes() for b in before]
        assert all(answer.spans.versions == (0,) for answer in after)
    finally:
        run(fresh.shutdown())
    subject.versions.pop()  # it was never loaded


async def answers_bit_for_bit_the_same(fresh: VLLMEngine, other: VLLMEngine) -> list[Generated]:
    """Hold two engines of the same weights to each other; return the answers of the first, which knows an end token."""
    digests = [await engine._vllm.llm.compute_weight_checksums() for engine in (fresh, other)]
    assert digests[0] == digests[1]
    # Packed parameters have no bytes to read on CPU: equal log-probabilities, to the last bit, stand for them.
    # One at a time: where parameters stay in place, the last bit of a product depends on how many rows it has.
    answers = [await fresh.generate(request(number, 100)) for number in range(8)]
    for number, answer in enumerate(answers):
        same = await other.generate(request(number, answer.tokens_T.size))
        assert same.tokens_T.tolist() == answer.tokens_T.tolist()
        assert same.logprob_T.tobytes() == answer.logprob_T.tobytes()
        assert END not in answer.tokens_T[:-1]
    assert any(answer.tokens_T[-1] == END for answer in answers)
    return answers


async def receive_only(engine: VLLMEngine, transport: WeightTransport, weights: Weights) -> None:
    """Have all workers receive and verify weights, past our own handling of failures."""
    published = {"version": weights.version, "location": weights.location, "checksums": weights.checksums}
    await engine._vllm.receive({"ends": transport.ends, "folder": engine._folder, **published})


async def bad_files_change_nothing(engine: VLLMEngine, weights: Weights, folder: Path) -> None:
    """Have workers read three bad files, then resume."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights.location.removeprefix("file:"))
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, folder / "incomplete")
    tensors["model.norm.weight"][0] += 1e-7
    save_file(tensors, folder / "corrupted")
    faults = {
        "incomplete": "have a wrong checksum in 1 of 27 parameters: lm_head.weight",
        "corrupted": "have a wrong checksum in 1 of 27 parameters: model.norm.weight",
        "missing": "cannot be read",
    }
    await engine._vllm.pause(WeightUpdate.KEEP)
    for name, text in faults.items():
        with pytest.raises(Exception, match=text):
            await receive_only(engine, FILE, replace(weights, location=f"file:{folder / name}"))
    await engine._vllm.resume()


def make_mixture(folder: Path) -> Any:
    """Write an untrained Qwen3 mixture of four experts in the place of the model in a folder; return it."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_model(folder, end_token=None)
    dense = AutoConfig.from_pretrained(folder).to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{name: dense[name] for name in kept}, **experts)).eval()
    model.save_pretrained(folder)
    return model


def test_two_workers_that_share_the_experts_of_a_mixture_load_every_version(
    run: Run[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has half of every expert; the trainer sends experts one by one.

    On CPU vLLM packs experts for its kernel, so the engine reloads them at every update. A GPU leaves them as the
    loader of a second model does, that each worker makes: there copies alone must give the same bits, and so must a
    delta, back to the first version. 17 s of a core.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model = make_mixture(tmp_path / "model")
    engine = VLLMEngine(settings(tmp_path / "model", tensor_parallel=2, cpu_cores="0|1"))
    subject = Subject(engine, tmp_path, [model])

    def by_copies(worker: Any, paths: list[str]) -> list[bool]:  # named by value: workers do not know this module
        import torch
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model

        from backends.transfer.delta import UNITS, Delta, body, encode, header
        from backends.transfer.row import layout, parameters_of, row_bytes, view_of
        from backends.vllm.direct_copies import Swap

        with set_current_vllm_config(worker.vllm_config):
            second = initialize_model(worker.vllm_config, prefix="second")
        swap = Swap(second, lambda tensors: second.load_weights(iter(tensors.items())))

        def as_loaded(path: str) -> bool:
            found = [one.clone() for one in second.parameters()]
            second.load_weights(iter(load_file(path).items()))
            return all(map(torch.equal, found, second.parameters()))

        def row_of(path: str) -> Any:
            row = torch.zeros(row_bytes(places), dtype=torch.uint8)
            for place in places:
                view_of(row, place).copy_(load_file(path)[place.name])
            return row

        same = []
        for path in paths:
            swap(load_file(path))
            same.append(as_loaded(path))
        places = layout(parameters_of(load_file(paths[0])))
        last, first = row_of(paths[-1]), row_of(paths[0])
        unit_bytes = min(place.dtype.itemsize for place in places)
        changes = encode(last.view(UNITS[unit_bytes]), first.view(UNITS[unit_bytes]))
        payload = [header([(0, len(changes.gaps_C))], unit_bytes), body([changes])]
        patched = swap.patch(Delta(places, torch.cat([first, *payload])))
        return [swap.direct, *same, patched, as_loaded(paths[0])]

    async def scenario() -> None:
        await engine.start()
        files = []
        for version in (1, 2, 3):
            weights = subject.next_weights()
            files.append(weights.location.removeprefix("file:"))
            await engine.update(weights, WeightUpdate.KEEP)
            answers = await gather(engine, [request(number, 40) for number in range(4)])
            assert all(answer.spans.versions == (version,) for answer in answers)
            assert max(subject.error(answer, keep=False) for answer in answers) < 1e-5
        assert await engine._vllm.llm.collective_rpc(by_copies, args=(files,)) == 2 * [6 * [True]]

    try:
        run(scenario())
        processes = list(engine._processes)
        assert len(processes) >= 3
        processes[0].kill()
    finally:
        run(engine.shutdown())
    assert not living(processes)


def broadcast_weights(version: int, model: Any) -> Weights:
    from transfer_group import digest_of, label_of

    tensors = model.state_dict()
    return Weights(version, f"broadcast:{label_of(tensors, version)}", {"all parameters": digest_of(tensors)})


def test_broadcast_weights_are_loaded_bit_for_bit_and_a_wrong_bit_changes_nothing(
    subject: Subject, run: Run[Any], tmp_path: Path
) -> None:
    import torch
    from transfer_group import Group

    make_model(tmp_path / "model", seed=9, end_token="<eos>")
    engine = VLLMEngine(settings(tmp_path / "model", transport=BROADCAST))
    model, other = subject.versions[-1], make_model(tmp_path / "other", seed=10, end_token=None)
    wrong = copy.deepcopy(other.state_dict())
    wrong["lm_head.weight"].view(torch.uint8)[5, 3] ^= 1

    async def scenario(group: Group) -> None:
        async def refuses(version: int, of: Any, text: str) -> None:
            with pytest.raises(Exception, match=text):
                await receive_only(engine, BROADCAST, broadcast_weights(version, of))

        await engine.start()
        await refuses(7, model, "the engine has joined no group")
        await engine.join_group(group.at, first_worker=1)
        await asyncio.to_thread(group.meet)
        assert await asyncio.to_thread(group.send, 7) == 0
        assert (await engine.generate(request(0, 60))).spans.versions == (0,)  # they have come, that is all
        weights = broadcast_weights(7, model)
        await engine.update(weights, WeightUpdate.KEEP)
        assert await engine.checksums() == weights.checksums
        before = await answers_bit_for_bit_the_same(engine, subject.engine)
        assert await asyncio.to_thread(group.send, 8, tensors=wrong, label_as=other.state_dict()) == 1
        await engine._vllm.pause(WeightUpdate.KEEP)
        for version, of in ((8, other), (7, model), (9, other)):
            await refuses(version, of, "are not staged: nothing that is complete and right is")
        await engine._vllm.resume()
        after = [await engine.generate(request(number, 100)) for number in range(8)]
        assert [a.logprob_T.tobytes() for a in after] == [b.logprob_T.tobytes() for b in before]
        assert await asyncio.to_thread(group.send, 8, tensors=other.state_dict()) == 0
        await engine.update(broadcast_weights(8, other), WeightUpdate.KEEP)
        answer = await engine.generate(request(0, 60))
        assert answer.spans.versions == (8,)
        subject.versions.append(other)
        as_newest = replace(answer, spans=VersionSpans((len(subject.versions) - 1,), answer.spans.ends))
        assert subject.error(as_newest, keep=False) < 1e-4
        subject.versions.pop()
        assert await by_direct_copies(engine)

    with ExitStack() as ends:
        ends.callback(lambda: run(engine.shutdown()))
        run(scenario(Group(ends, 1, tensors=model.state_dict(), timeout_s=600)))


async def in_progress_in_a_core_that_stands_still(engine: VLLMEngine, core: Any) -> asyncio.Task[Generated]:
    """Return an answer that has some tokens, and gets no more; once more where it was whole before."""
    for _ in range(TRIES):
        task = asyncio.create_task(engine.generate(request(0, 400)))
        await engine.generate(request(1, 5))
        core.suspend()
        await asyncio.wait({task}, timeout=1.0)  # what is on its way comes
        if not task.done():
            return task
        core.resume()
    raise AssertionError("answers were whole too early")


def test_a_dead_process_ends_all_calls_and_shutdown_leaves_none(subject: Subject, run: Run[Any]) -> None:
    engine = subject.engine
    processes = list(engine._processes)
    assert len(processes) == 1  # an only worker is in the scheduler's

    async def scenario() -> None:
        task = await in_progress_in_a_core_that_stands_still(engine, processes[0])
        tasks = [task, *(asyncio.create_task(engine.generate(request(number, 400))) for number in (2, 3, 4))]
        await asyncio.sleep(0)
        processes[0].kill()
        ends = await asyncio.gather(*tasks, engine._until(engine._vllm.llm.is_paused()), return_exceptions=True)
        assert all(isinstance(end, EngineLostError) for end in ends), ends  # some with tokens that are known
        assert all("engine=2; a process of vLLM has ended" in str(end) for end in ends)  # and none by a time-out

    run(scenario())
    with pytest.raises(EngineLostError, match="engine=2; a process of vLLM has ended"):
        run(engine.update(subject.next_weights(), WeightUpdate.KEEP))
    run(engine.shutdown())
    assert not living(processes)
    run(engine.shutdown())


async def gather(engine: VLLMEngine, requests: list[GenerateRequest]) -> list[Generated]:
    return await asyncio.gather(*map(engine.generate, requests))


def test_who_waits_for_another_process_of_the_engine_leaves_the_core_to_it() -> None:
    """Seconds of this thread on a core while it waits half a second for a reader that does not come."""
    register()  # as vLLM's processes do
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    queue = MessageQueue(n_reader=1, n_local_reader=1, max_chunks=1)
    queue.enqueue("nobody reads it")
    before_s = time.thread_time()
    with pytest.raises(TimeoutError):
        queue.enqueue("waits for room", timeout=0.5)
    assert time.thread_time() - before_s < 0.25
