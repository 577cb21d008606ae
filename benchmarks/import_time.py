"""How long does it take to import the trainer, next to TRL's own?

    python -m benchmarks.import_time            # prints the table and writes benchmarks/data/import_time.csv

Each import runs in a new process with warm file caches. Times are CPU times of that process (user and system), so that
a busy machine shows less in them; the cases take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

from .results import write_rows

DATA = Path(__file__).parent / "data" / "import_time.csv"
CASES = {
    "nothing": "pass",
    "trl.GRPOTrainer": "from trl import GRPOTrainer",
    "trl_support_replay": "import trl_support_replay",
    "trl_support_replay.SupportReplayGRPOTrainer": "from trl_support_replay import SupportReplayGRPOTrainer",
}


def cpu_seconds(code: str) -> float:
    """CPU time of a new interpreter that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(repeats: int) -> dict[str, np.ndarray]:
    """`[repeats]` CPU seconds of each case, after one run that warms the caches."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats + 1):
        for name, code in CASES.items():
            times[name].append(cpu_seconds(code))
    return {name: np.array(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each case")
    parser.add_argument("--output", type=Path, default=DATA, help="CSV file to write")
    options = parser.parse_args()
    machine = {
        "cpus": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "trl")},
    }
    times = measure(options.repeats)
    stock = float(np.median(times["trl.GRPOTrainer"]))
    rows = []
    for name, values in times.items():
        low, median, high = np.percentile(values, [20, 50, 80])
        rows.append(
            {
                "imported": name,
                "cpu_s_p20": round(low, 3),
                "cpu_s_median": round(median, 3),
                "cpu_s_p80": round(high, 3),
                "times_trl": round(median / stock, 3),
            }
            | machine
        )
        print(f"{name:45} {median:7.2f} s {median / stock:6.2f} x")
    write_rows(options.output, rows)


if __name__ == "__main__":
    main()
