"""What a process is called, as tests look for those of a run."""


def name_of(process):
    """Return name and command of a process (``psutil``), after its title if it is one of vLLM without one.

    ``setproctitle`` does nothing where a process has set the first variable of its environment anew, and Ray hands
    variables on in the order of a hash table: which is the first depends on all of them.
    """
    command = " ".join((process.name(), *process.cmdline()))
    if "multiprocessing.spawn" not in command or (parent := process.parent()) is None:
        return command
    above = name_of(parent)
    if "ray::VLLMEngine" in above:
        return f"VLLM::EngineCore {command}"
    return f"VLLM::Worker {command}" if "VLLM::EngineCore" in above else command
