"""Files for clusters, without a cluster: their form, their paths, and the commands in them."""

import os
import re
import stat
import subprocess

import pytest
import yaml
from page_commands import parsed
from pages import EXAMPLES, ROOT

from pipelinerl.config.run import is_model_id, load_run

CLUSTERS = EXAMPLES / "clusters"
SKYPILOT = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
SLURM, DOCKERFILE = ((CLUSTERS / name).read_text() for name in ("slurm.sh", "Dockerfile"))
OPTIONS = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM, re.M))
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$LOG"
[ "$(basename "$0")" != scontrol ] || printf 'first\\nsecond\\nthird\\n'
[ "$(basename "$0")" != python ] || grep -c "^python -c" "$LOG"
"""


@pytest.mark.parametrize("script", [CLUSTERS / "slurm.sh", SKYPILOT["run"], SKYPILOT["setup"]], ids=["slurm", "r", "s"])
def test_shell_scripts_are_well_formed(script):
    text = script if isinstance(script, str) else script.read_text()
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def program(path, text):
    path.write_text(text)
    path.chmod(stat.S_IRWXU)


def dry_run(script, folder, status=0, **variables):
    """Run a script with programs that only log their arguments, but for those that are in the folder."""
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").write_text("")
    for name in ("srun", "scontrol", "sleep", "ray", "pipelinerl", "python"):
        if not (folder / name).exists():
            program(folder / name, STUB)
    log = folder / "log"
    log.write_text("")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), **variables}
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return log.read_text().splitlines()


def slurm(folder, **more):
    """Run the script on three machines; return what it calls."""
    script = ["bash", str(CLUSTERS / "slurm.sh"), "run.toml", str(folder / "out")]
    return dry_run(script, folder, SLURM_JOB_NODELIST="first,second", SLURM_JOB_ID="7", **more)


def test_slurm_starts_ray_on_every_machine_and_the_run_on_the_first(tmp_path):
    calls = slurm(tmp_path)
    order = [call.split()[0] for call in calls if call.split()[0] in ("sleep", "python", "pipelinerl")]
    assert order == [*3 * ["sleep", "python"], "pipelinerl"]  # one more machine at each check, until all are there
    started = [call for call in calls if call.startswith("srun") and "ray start" in call]
    assert sorted(re.search(r"--nodelist=(\w+)", call)[1] for call in started) == ["first", "second", "third"]
    assert [("--head" in call, "--nodelist=first" in call) for call in started].count((True, True)) == 1
    values = parsed(calls[-1])
    assert values["overrides"] == ["train.ray_address=auto"]
    assert (values["out"], values["resume"]) == (tmp_path / "out", False)


def test_a_job_that_is_queued_again_goes_on_from_its_checkpoint_or_begins_anew(tmp_path):
    (tmp_path / "out").mkdir()
    assert not parsed(slurm(tmp_path, SLURM_RESTART_COUNT="2")[-1])["resume"]
    assert (tmp_path / "out.2").is_dir()
    (tmp_path / "out" / "checkpoints" / "50").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "50" / "manifest.json").touch()
    assert parsed(slurm(tmp_path)[-1])["resume"]


@pytest.mark.parametrize(("sent", "requeued"), [("USR1", ["scontrol requeue 7"]), ("TERM", [])])
def test_the_end_of_its_time_ends_the_run_with_a_checkpoint_and_queues_the_job_again(tmp_path, sent, requeued):
    """Slurm sends USR1 then; TERM is somebody's who cancels the job. The run may take its time to end."""
    waits = "while :; do /bin/sleep 0.05; done"
    on_end = "trap '/bin/sleep 0.2; echo ended >> \"$LOG\"; exit 1' TERM"
    program(tmp_path / "pipelinerl", f"#!/usr/bin/env bash\n{on_end}\nkill -{sent} $PPID\n{waits}\n")
    calls = slurm(tmp_path, status=1)
    assert calls[calls.index("ended") :] == ["ended", *requeued]
    assert re.fullmatch(r"B:USR1@\d+", OPTIONS["signal"])


def test_a_job_has_all_memory_of_its_machines_and_may_be_queued_again():
    assert OPTIONS["mem"] == "0"
    assert {"exclusive", "requeue"} <= OPTIONS.keys()


def test_the_accelerators_that_are_rented_are_those_of_the_run_file():
    wanted = {}
    for nodes, run_file in re.findall(r"^# +sbatch --nodes=(\d+) examples/clusters/slurm\.sh (\S+)", SLURM, re.M):
        wanted[run_file] = int(nodes) * int(OPTIONS["gpus-per-node"])
    assert len(wanted) == 2
    _, each = SKYPILOT["resources"]["accelerators"].split(":")
    on_sky = {SKYPILOT["envs"]["RUN_FILE"]: SKYPILOT["num_nodes"] * int(each)}
    for run_file, number in [*wanted.items(), *on_sky.items()]:
        assert load_run(ROOT / run_file).cluster.accelerators == number


def test_model_and_problems_of_the_run_file_are_where_it_looks_for_them():
    """In the image by mounts, on SkyPilot by the folder that it copies; the model is in Hugging Face's cache."""
    command = re.search(r"docker run .+?--check", DOCKERFILE.replace("\\\n#", ""), re.S)[0]
    flags = ("--gpus all", "--network host", "--ipc host", "--ulimit memlock=-1", "--device /dev/infiniband")
    assert [flag for flag in flags if flag not in command] == []
    mounts = dict(re.findall(r"-v \$PWD/(\S+):/work/(\S+)", command))
    assert all(here == there for here, there in mounts.items())
    for run_file in (re.search(r"examples/\S+\.toml", command)[0], SKYPILOT["envs"]["RUN_FILE"]):
        train = load_run(ROOT / run_file).train_table
        below = os.path.relpath(train.task.settings["path"], ROOT)
        assert any(below.startswith(f"{mount}/") for mount in mounts)
        assert is_model_id(train.model.path)
        assert "-v $HOME/.cache/huggingface:/root/.cache/huggingface " in command
        assert f"hf download {train.model.path} " in SKYPILOT["setup"]
    assert str(parsed(command[command.index("pipelinerl train") :])["out"]).startswith("runs/")
    assert "libibverbs1" in DOCKERFILE


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
    text = DOCKERFILE.replace("\\\n", " ")
    steps = [line.split()[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert steps[0] == "FROM"
    assert set(steps) <= {"FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    copied = [name for line in re.findall(r"^COPY (.+)$", text, re.M) for name in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    packages = re.search(r"^include = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert {name.strip(' "*') for name in packages.split(",")} <= set(copied)
    (extras,) = re.findall(r"'\.\[(.+)\]'", text)
    assert [one for one in extras.split(",") if f"\n{one} = [" not in (ROOT / "pyproject.toml").read_text()] == []
