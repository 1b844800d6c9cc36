"""The comparisons that need a GPU, one after the other; results go to JSON files in a folder.

    python benchmarks/gpu.py runs/benchmarks

gpt2-124m and a model of 1.3 B parameters on one GPU in bf16 (tokens per second and MFU beside a plain PyTorch
loop), then the loss curve beside the CPU's. Nothing here is special to GPUs but the sizes: each comparison is
a command line of another file, which runs on CPUs as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the project is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import loss_curves, throughput
from benchmarks.setting import BENCHMARKS
from pipeline.cluster.devices import visible_gpus

ONE_GPU = "--device cuda --precision bf16 --only plain one trainer --rounds 10"
COMMANDS = {
    "gpt2-124m": (throughput, f"{ONE_GPU} --model gpt2-124m --seq_length 1024 --batch 16 --steps 20"),
    # 16 bytes per parameter are 21 GB for each contender: one at a time.
    "gpt-1.3b": (
        throughput,
        f"{ONE_GPU} --model {BENCHMARKS / 'gpt-1.3b.json'} --seq_length 2048 --batch 4 --steps 5 "
        "--one_at_a_time",
    ),
    "loss_curves": (loss_curves, "--first cpu-fp32 --second cuda-bf16 --steps 500"),
}


def main(folder: Path) -> int:
    """The largest exit code of the comparisons; 2 without a GPU."""
    if not visible_gpus()[0]:
        print("these comparisons need a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    codes = [
        module.main([*arguments.split(), "--json", str(folder / f"{name}.json")])
        for name, (module, arguments) in COMMANDS.items()
    ]
    return max(codes)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder for the results")
    sys.exit(main(Path(sys.argv[1])))
