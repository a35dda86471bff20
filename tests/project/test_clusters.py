"""Files for clusters, without a cluster: their form, their paths, and the commands in them."""

import os
import re
import stat
import subprocess

import pytest
import yaml
from page_commands import parsed
from pages import EXAMPLES, ROOT

CLUSTERS = EXAMPLES / "clusters"
SKYPILOT = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$LOG"
[ "$(basename "$0")" != scontrol ] || printf 'first\\nsecond\\nthird\\n'
[[ "$*" != *"python -c"* ]] || grep -c "python -c" "$LOG"
"""


@pytest.mark.parametrize("script", [CLUSTERS / "slurm.sh", SKYPILOT["run"], SKYPILOT["setup"]], ids=["slurm", "r", "s"])
def test_shell_scripts_are_well_formed(script):
    text = script if isinstance(script, str) else script.read_text()
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def program(path, text):
    path.write_text(text)
    path.chmod(stat.S_IRWXU)


def dry_run(script, folder, **variables):
    """Run a script with programs that only log their arguments."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text("")
    for name in ("srun", "scontrol", "sleep", "ray", "pipelinerl"):
        program(folder / name, STUB)
    log = folder / "log"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), **variables}
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


def test_slurm_starts_ray_on_every_machine_and_the_run_on_the_first(tmp_path):
    calls = dry_run(
        ["bash", str(CLUSTERS / "slurm.sh"), "run.toml", "/shared/out"], tmp_path, SLURM_JOB_NODELIST="first,second"
    )
    order = [call.split()[0] for call in calls if "sleep" in call or "python -c" in call or "pipelinerl" in call]
    assert order == [*3 * ["sleep", "srun"], "srun"]  # one more machine at each check, until all three are there
    started = [call for call in calls if call.startswith("srun") and "ray start" in call]
    assert sorted(re.search(r"--nodelist=(\w+)", call)[1] for call in started) == ["first", "second", "third"]
    assert [("--head" in call, "--nodelist=first" in call) for call in started].count((True, True)) == 1
    (trained,) = [call for call in calls if "pipelinerl train" in call]
    assert "--nodelist=first" in trained
    values = parsed(trained[trained.index("pipelinerl train") :])
    assert values["overrides"] == ["train.ray_address=auto"]
    assert str(values["out"]) == "/shared/out"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_skypilot_starts_the_run_on_the_first_machine_and_joins_it_from_the_others(tmp_path, rank):
    program(tmp_path / "python", "#!/bin/sh\necho 2\n")
    variables = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    variables |= {"SKYPILOT_TASK_ID": "task", **SKYPILOT["envs"]}
    calls = dry_run(["bash", "-e", "-c", SKYPILOT["run"]], tmp_path, **variables)
    if rank == "1":
        assert calls == ["sleep 20", "ray start --address=10.0.0.1:6379 --block"]
    else:
        assert calls[0] == "ray start --head --port=6379 --node-ip-address=10.0.0.1"
        values = parsed(calls[1])
        assert (ROOT / values["run"]).is_file()
        assert values["overrides"] == ["train.ray_address=auto"]


def test_the_image_copies_existing_files_and_installs_existing_extras():
    text = (CLUSTERS / "Dockerfile").read_text()
    steps = [line.split()[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert steps[0] == "FROM"
    assert set(steps) <= {"FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    copied = [name for line in re.findall(r"^COPY (.+)$", text, re.M) for name in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    packages = re.search(r"^include = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert {name.strip(' "*') for name in packages.split(",")} <= set(copied)
    (extras,) = re.findall(r"'\.\[(.+)\]'", text)
    assert [one for one in extras.split(",") if f"\n{one} = [" not in (ROOT / "pyproject.toml").read_text()] == []
