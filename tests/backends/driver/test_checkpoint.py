"""Damaged checkpoints, and files of a run that were cut: a run resumes from whole ones only."""

import hashlib
import json
import os
import pickle
import pickletools
import shutil
import stat
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import pytest
from in_memory import config_of, parts_of, run, run_checked, turns_of
from refusals import message

from backends.driver import rollouts
from backends.driver.checkpoint import FOLDER, FORMAT, MANIFEST_FILE, fresh_state, read_newest
from backends.fake import FakeTrainer
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records import step_ledger
from pipelinerl.records.recording import GROWING_FILES, Recording
from pipelinerl.records.reports import RunMeasurements
from pipelinerl.records.run_folder import METRICS_FILE, TRACE_FILE
from pipelinerl.records.steps import STEPS_FILE
from pipelinerl.rl import segments
from pipelinerl.scheduler import events

CONFIG = config_of(steps=6, train={"checkpoint": {"every": 2, "keep": 3}})
NEWEST, BEFORE = "step_000006", "step_000004"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a run with checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("done") / "run"
    run(CONFIG, out, parts_of(CONFIG))
    return out


@pytest.fixture
def out(done, tmp_path):
    return Path(shutil.copytree(done, tmp_path / "run"))


def flip(path, place):
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["run.pickle", "trainer/fake.json", MANIFEST_FILE])
@pytest.mark.parametrize(
    "damage",
    [
        *(partial(flip, place=place) for place in (0, 10, -1)),
        Path.unlink,
        lambda path: path.with_name("states_7.pt").write_bytes(b"of another run"),
    ],
)
def test_where_a_file_is_changed_gone_or_too_many_the_checkpoint_before_is_used_and_named(out, caplog, name, damage):
    damage(out / FOLDER / NEWEST / name)
    checkpoint = read_newest(out, CONFIG)
    assert (checkpoint.state.version, checkpoint.trainer_folder.parent.name) == (4, BEFORE)
    (warning,) = caplog.messages
    assert f"{NEWEST} is broken" in warning
    assert f"going on from {BEFORE}" in warning


@pytest.mark.parametrize("number", [FORMAT + 1, FORMAT - 1, 0])
def test_a_checkpoint_of_another_format_is_refused_before_anything_is_unpickled(out, number):
    """Format 0 had no number: its manifest is a table of files."""
    manifest = {"files": {}, "format": number} if number else {"run.pickle": 64 * "0"}
    (out / FOLDER / NEWEST / MANIFEST_FILE).write_text(json.dumps(manifest))
    (out / FOLDER / NEWEST / "run.pickle").write_bytes(b"cbackends.gone\nState\n.")
    assert message(read_newest, out, CONFIG) == (
        f"--resume: {NEWEST} was written by another version of pipelinerl: format {number}, not {FORMAT}; "
        "go on with the version that wrote it"
    )


def names_in(pickled):
    """Names of modules, classes and attributes in a pickle, in order; names of numpy change with its version."""
    arguments = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
    return list(dict.fromkeys(name for name in arguments if "numpy" not in name))


PICKLED = "10cb6685ac311eff"
"""Digest of what ``FORMAT`` numbers; whoever has to change it counts ``FORMAT`` up, too."""


def test_whoever_changes_what_is_pickled_changes_the_number_of_the_format(tmp_path):
    """So that an older checkpoint is refused in one line. Values that cannot be changed are pickled without names."""
    roots = []
    for config in (CONFIG, turns_of(), config_of(kind="conventional")):
        recording = Recording(config, out=tmp_path / str(len(roots)), trace=True)
        roots += [fresh_state(config), recording.mark()]
        recording.finish(RunMeasurements())
    found = {"": names_in(pickle.dumps(roots, pickle.HIGHEST_PROTOCOL))}
    for module in (step_ledger, events, rollouts, segments):
        values = [cls for cls in vars(module).values() if isinstance(cls, type) and is_dataclass(cls)]
        found |= {cls.__qualname__: [field.name for field in fields(cls)] for cls in values}
    text = json.dumps(found, indent=1, sort_keys=True)
    assert (FORMAT, hashlib.sha256(text.encode()).hexdigest()[:16]) == (9, PICKLED), text


def test_without_a_whole_checkpoint_each_is_named_with_its_fault(out):
    for folder in (out / FOLDER).iterdir():
        flip(folder / "run.pickle", 7)
    with pytest.raises(ConfigError) as error:
        read_newest(out, CONFIG)
    lines = str(error.value).splitlines()
    assert [line.partition(" is broken: ")[0].rpartition("_")[2] for line in lines] == ["000006", "000004", "000002"]
    assert all(line.endswith("run.pickle is not as it was written (SHA-256)") for line in lines)


def test_there_is_no_checkpoint(tmp_path):
    assert "--resume needs a checkpoint" in message(read_newest, tmp_path, CONFIG)


def test_every_file_and_folder_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    fsync, rename = os.fsync, Path.rename
    settled, names, kept = set(), {}, []

    def noted(descriptor):
        found = os.fstat(descriptor)
        settled.add(found.st_ino)
        if stat.S_ISDIR(found.st_mode):
            names[found.st_ino] = os.listdir(descriptor)
        fsync(descriptor)

    def checked(path, target):
        if path.name == "checkpoint":
            all_of_it = [path, *path.rglob("*"), *(tmp_path / "run" / name for name in GROWING_FILES)]
            assert {one.stat().st_ino for one in all_of_it} <= settled
            assert {FOLDER, *GROWING_FILES} <= set(names.get((tmp_path / "run").stat().st_ino, ()))
            kept.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    run(CONFIG, tmp_path / "run", parts_of(CONFIG))
    assert len(set(kept)) == 3


def cut(path, size=-3):
    path.write_bytes(path.read_bytes()[:size])


def without_step(step, path):
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[step - 1 + (path.name == STEPS_FILE)]  # below its header
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (TRACE_FILE, lambda path: cut(path, 300), "bytes that step_000006 goes on from, got 300"),
        (TRACE_FILE, Path.unlink, "bytes that step_000006 goes on from, got 0"),
        *(
            (name, damage, "bytes that step_000006 goes on from, got ")
            for name in (STEPS_FILE, METRICS_FILE)
            for damage in (partial(without_step, 6), partial(without_step, 2), cut, Path.unlink)
        ),
        *(
            (name, partial(flip, place=100), "bytes that step_000006 goes on from as they were, but it was changed")
            for name in GROWING_FILES
        ),
    ],
)
def test_a_run_whose_files_do_not_reach_up_to_its_checkpoint_is_refused(out, name, damage, words):
    damage(out / name)
    before = {path.name: path.read_bytes() for path in out.glob("*.*")}
    refusal = message(read_newest, out, CONFIG)
    assert refusal.startswith(f"--resume: {out / name} must have the ")
    assert words in refusal
    assert before == {path.name: path.read_bytes() for path in out.glob("*.*")}


def test_what_came_after_the_checkpoint_does_not_matter(out):
    for name in (TRACE_FILE, STEPS_FILE, METRICS_FILE):
        with (out / name).open("ab") as file:
            file.write(b"cut off in the mid")
    run_checked(CONFIG, out, resume=True)


class Hashes(FakeTrainer):
    """Says the SHA-256 of what it has written."""

    async def save(self, folder):
        await super().save(folder)
        return self.digests


def hashes(digests):
    trainer = Hashes(train_batch_size=8)
    trainer.digests = digests
    return parts_of(CONFIG, trainer=trainer)


def test_what_the_trainer_has_hashed_is_not_read_and_must_be_there(tmp_path):
    run(CONFIG, tmp_path / "run", hashes({"fake.json": 64 * "0"}))
    with pytest.raises(ConfigError, match=r"step_000006 is broken: trainer/fake.json is not as it was written"):
        read_newest(tmp_path / "run", CONFIG)
    with pytest.raises(RunFailedError, match=r"trainer/fake_2.json: its rank has written it, .* all must share --out"):
        run(CONFIG, tmp_path / "other", hashes({"fake_2.json": 64 * "0"}))


def test_a_full_disk_is_said_with_the_path(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("backends.driver.checkpoint.seal", full)
    with pytest.raises(
        RunFailedError, match=rf"cannot write {tmp_path}/run/driver-1/\w+/checkpoint: No space left on device"
    ):
        run(CONFIG, tmp_path / "run", parts_of(CONFIG))
