"""A model by its id at Hugging Face: the snapshot in the cache, or one line."""

import sys

import pytest
from needs import need

need("huggingface_hub", "tensorboard")

from huggingface_hub import constants  # noqa: E402
from in_memory import config_of  # noqa: E402
from real_run import cached_model  # noqa: E402
from refusals import message  # noqa: E402

from backends.kinds import with_local_model  # noqa: E402


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_an_id_is_its_snapshot_and_a_folder_stays(cache):
    (cache / "model").mkdir()
    (cache / "model" / "config.json").write_text("{}")
    snapshot = cached_model(cache / "model", cache, "some/model")
    config = config_of(train={"model": {"path": "some/model"}})
    assert with_local_model(config).train.model.path == str(snapshot)
    assert config.train.model.path == "some/model"  # as the run file, and its checkpoints, have it
    for path in ("nowhere", "/no/where", str(cache / "model")):
        given = config_of(train={"model": {"path": path}})
        assert with_local_model(given) == given


def test_an_id_that_cannot_be_downloaded_is_one_line(cache):
    refusal = message(with_local_model, config_of(train={"model": {"path": "some/other"}}))
    assert refusal.startswith("train.model.path must be a folder with a model, or an id at Hugging Face that is in ")
    assert "got 'some/other': " in refusal


def test_without_the_package_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refusal = message(with_local_model, config_of(train={"model": {"path": "some/other"}}))
    assert refusal.startswith(
        "train needs huggingface_hub to read 'some/other', not installed: pip install -e '.[train-"
    )
