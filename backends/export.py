"""The model of a checkpoint in Hugging Face format, merged from the ranks' parts on a machine without accelerators."""

from __future__ import annotations

import os
from pathlib import Path

import transformers

from backends.driver.checkpoint import MANIFEST_FILE, TRAINER_FOLDER, OtherFormatError, check_sealed
from backends.kinds import model_config, with_local_model
from backends.lora import add_adapters, save_folded
from backends.trainer.model import TRAINED_DTYPES
from backends.trainer.state import fill_policy
from pipelinerl.config.run import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.run_folder import RUN_FILE, writing


def export(checkpoint: Path, out: Path) -> None:
    """Write the policy as it was published, and the tokenizer, into a new folder; nothing is unpickled.

    ``ConfigError`` if the checkpoint is not whole, or not in its run's folder, or ``out`` exists.
    """
    if not (checkpoint / MANIFEST_FILE).is_file():
        raise ConfigError(f"CHECKPOINT must be a folder of checkpoints/ in a run's folder, got {checkpoint}")
    if out.exists():
        raise ConfigError(f"--out must be a new folder, got {out}")
    config = with_local_model(load_run(checkpoint.absolute().parent.parent / RUN_FILE), with_teacher=False)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        check_sealed(checkpoint)
    except (ValueError, OtherFormatError) as error:
        raise ConfigError(f"CHECKPOINT must be whole, got {checkpoint}: {error}") from None
    transformers.utils.logging.disable_progress_bar()
    path, dtype = config.train_table.model.path, TRAINED_DTYPES[config.train_table.device]
    model_config(path)
    policy = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if config.train_table.lora is not None:
        add_adapters(policy, config.train_table.lora)
    fill_policy(policy, checkpoint / TRAINER_FOLDER)
    partial = out.with_name(f"{out.name}.partial")
    with writing(partial):
        save_folded(policy, partial) if config.train_table.lora else policy.save_pretrained(partial)
        transformers.AutoTokenizer.from_pretrained(path).save_pretrained(partial)
        partial.rename(out)
