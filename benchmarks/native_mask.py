"""Shows on a GPU that vLLM's own sampling mask holds every support, also with top_p or min_p alone.

    python -m benchmarks.native_mask

Needs a GPU and vLLM 0.28 or newer with Model Runner V2; it has not been run on the machines where this is developed,
which have no GPU. The engine wants a top_k with its mask, so requests without one carry the whole vocabulary as theirs,
which must cut nothing. One batch mixes top_p alone, min_p alone, penalties, top_k, several completions of a prompt,
chunked prefill, cached prefixes and preemption. The mask of each token must equal the finite entries of the engine's
log-probs of all tokens, and a transformers model with the same weights must give the reported log-probs back over it.

Ends with exit status 1 when one does not.
"""

from __future__ import annotations

import json
import sys
import tempfile

from tests.engines.mixed_batch import run, save_model


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = run(save_model(folder), {})
    print(json.dumps(found, indent=2))
    faults = {
        f"the engine's capture is {found['capture']!r}, not 'native'": found["capture"] != "native",
        f"{found['rows'] - found['equal']} masks of {found['rows']} are not the finite log-probs": (
            found["equal"] != found["rows"]
        ),
        f"a log-prob differs by {found['gap']} nats from that over its mask": not found["gap"] < 1e-3,
    }
    for fault, present in faults.items():
        if present:
            print(f"FAILED: {fault}.")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
