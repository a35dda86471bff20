"""Write tests/data/decode_step_engines.csv: decode steps of two engines, by the kernel tables of AIConfigurator.

Needs its command in the path, which is no dependency of the project: `pip install aiconfigurator==0.12.0` in another
environment (850 MB), then `python scripts/decode_table.py /path/to/aiconfigurator`. Half an hour of one core is plenty.
"""

import csv
import itertools
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).parents[1] / "tests" / "data" / "decode_step_engines.csv"
SYSTEMS = {"H100": "h100_sxm", "B200": "b200_sxm"}
MODELS = {"Qwen3-8B": 1, "Llama-3.1-8B": 1, "Qwen3-32B": 4, "Qwen3-30B-A3B": 2, "Qwen3-235B-A22B": 8}
"""GPUs of an engine by model."""
OWNERS = {"Llama-3.1-8B": "meta-llama/Meta-"}
SEQUENCES = (1, 16, 64, 256)
INPUT_TOKENS, OUTPUT_TOKENS = 1000, 2000


def main(command: str) -> None:
    """Write the table."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["engine", "gpu", "model", "tensor_parallel", "sequences", "context", "decode_step_ms"])
        for backend, gpu, model, sequences in itertools.product(("vllm", "sglang"), SYSTEMS, MODELS, SEQUENCES):
            size = MODELS[model]
            options = {
                "--model-path": f"{OWNERS.get(model, 'Qwen/')}{model}",
                "--system": SYSTEMS[gpu],
                "--backend": backend,
                "--estimate-mode": "static_gen",
                "--batch-size": sequences,
                "--isl": INPUT_TOKENS,
                "--osl": OUTPUT_TOKENS,
                "--tp-size": size,
                **({"--moe-tp-size": size, "--moe-ep-size": 1} if "-A" in model else {}),
            }
            words = [command, "cli", "estimate", *(str(word) for pair in options.items() for word in pair)]
            text = subprocess.run(words, capture_output=True, text=True, check=False).stdout
            step, version = re.search(r"TPOT:\s+([\d.]+) ms", text), re.search(r"Backend:\s+\w+ \((.+)\)", text)
            if step is None or version is None:
                print(f"no step of {backend}, {gpu}, {model}, {sequences}", file=sys.stderr)
                continue
            context = INPUT_TOKENS + OUTPUT_TOKENS // 2
            rows.writerow([f"{backend}-{version[1]}", gpu, model, size, sequences, context, step[1]])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "aiconfigurator")
