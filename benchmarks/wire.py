"""What do supports cost on the way from a server to the trainer, and how long does the client take to read them?

    python -m benchmarks.wire              # starts a server, prints the table, writes benchmarks/data/wire.csv

Baseline is TRL's own client with `logprobs=20`, which asks vLLM's `/v1/completions` for the 20 best candidates of each
token as JSON. Both ask the same server for the same seeded samples, and the tokens are compared. Bytes are those of the
answers' bodies as they travel. Reading time is CPU time on one thread, from the body to what the trainer goes on with:
nested lists for TRL's client, arrays for the packed endpoint (unpacking, checking and SHA-256 included).
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import AutoTokenizer
from trl.generation.vllm_client import VLLMClient

from tests.server.vllm_process import VLLMServe
from trl_support_replay.wire import protocol
from trl_support_replay.wire.protocol import GenerateRequest, Sample

DATA = Path(__file__).parent / "data" / "wire.csv"
TOPICS = ("the moon", "bread", "prime numbers")
CASES = {
    "top_k=20": {"top_k": 20, "top_p": 1.0},
    "top_k=20, top_p=0.9": {"top_k": 20, "top_p": 0.9},
    "top_p=0.95": {"top_k": 0, "top_p": 0.95},
}


def packed_answers(url: str, requests: Sequence[GenerateRequest]) -> list[bytes]:
    """Bodies of the packed endpoint's answers."""
    bodies = []
    for request in requests:
        answer = httpx.post(
            url + protocol.GENERATE, content=protocol.encode_request(request), timeout=600, trust_env=False
        )
        answer.raise_for_status()
        bodies.append(answer.content)
    return bodies


def read_packed(bodies: Sequence[bytes], requests: Sequence[GenerateRequest]) -> list[list[Sample]]:
    """What the client makes of bodies once it has them: compared with their digest, decoded and checked."""
    groups = []
    for body, request in zip(bodies, requests, strict=True):
        protocol.digest(body)
        groups.append(protocol.decode_samples(body, request))
    return groups


class KeptAnswers:
    """A TRL client whose HTTP answers are kept, and can be read again."""

    def __init__(self, url: str):
        self.client = VLLMClient(base_url=url)
        self._post = self.client._post
        self.answers: list[Any] = []

    def ask(self, requests: Sequence[GenerateRequest], logprobs: int) -> list[dict[str, Any]]:
        """Generate over the network, keeping the answers."""
        self.answers = []

        def post(address: str, **kwargs: Any) -> Any:
            answer = self.client.session.post(address, **kwargs)
            assert answer.status_code == 200, answer.text
            self.answers.append(answer)
            return answer.json()

        self.client._post = post
        return self._generate(requests, logprobs)

    def read(self, requests: Sequence[GenerateRequest], logprobs: int) -> list[dict[str, Any]]:
        """Read the kept answers by TRL's own code."""
        kept = iter(self.answers)
        self.client._post = lambda address, **kwargs: next(kept).json()
        return self._generate(requests, logprobs)

    def _generate(self, requests: Sequence[GenerateRequest], logprobs: int) -> list[dict[str, Any]]:
        results = []
        for request in requests:
            sampling = dict(request.sampling)
            seed = sampling.pop("seed")
            results.append(
                self.client.generate(
                    [request.prompt_ids.tolist()],
                    n=request.n,
                    logprobs=logprobs,
                    generation_kwargs={"seed": seed},
                    **sampling,
                )
            )
        return results


def cpu_microseconds(loads: Sequence[Callable[[], Any]], repeats: int, in_a_row: int = 5) -> np.ndarray:
    """`[len(loads), repeats]` CPU times of the process, each the mean of some loads in a row.

    The cases take turns, so that a busy machine is fair to all. In a row, since a load of a few hundred microseconds is
    otherwise measured with the caches that another case left behind.
    """
    times = np.zeros((len(loads), repeats + 1))
    for repeat in range(repeats + 1):
        for case, load in enumerate(loads):
            gc.collect()
            start = time.process_time()
            for _ in range(in_a_row):
                load()
            times[case, repeat] = (time.process_time() - start) * 1e6 / in_a_row
    return times[:, 1:]


def measure(url: str, tokenizer: Any, samples: int, max_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each way of asking and each case of sampling."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Write a short paragraph about {topic}."}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for topic in TOPICS
    ]
    rows = []
    for case, truncation in CASES.items():
        requests = [
            GenerateRequest(
                request_id=str(i),
                prompt_ids=np.array(prompt, np.int32),
                n=samples,
                sampling={"temperature": 1.0, **truncation, "max_tokens": max_tokens, "seed": i},
            )
            for i, prompt in enumerate(prompts)
        ]
        bodies = packed_answers(url, requests)
        groups = read_packed(bodies, requests)
        token_ids = [sample.token_ids.tolist() for group in groups for sample in group]
        num_tokens = sum(map(len, token_ids))
        sizes = np.concatenate([sample.support.sizes for group in groups for sample in group if sample.support])
        stock = {logprobs: KeptAnswers(url) for logprobs in (20, 0)}
        for logprobs, kept in stock.items():
            results = kept.ask(requests, logprobs)
            same = [ids for result in results for ids in result["completion_ids"]] == token_ids
            assert same, "the two endpoints drew other tokens from the same seeds"
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "packed": (sum(map(len, bodies)), partial(read_packed, bodies, requests)),
        }
        for logprobs, kept in stock.items():
            size = sum(len(answer.content) for answer in kept.answers)
            ways[f"TRL client, logprobs={logprobs}"] = (size, partial(kept.read, requests, logprobs))
        times = cpu_microseconds([load for _, load in ways.values()], repeats) / num_tokens
        baseline = np.median(times[list(ways).index("TRL client, logprobs=20")])
        for (way, (size, _)), microseconds in zip(ways.items(), times, strict=True):
            p20, median, p80 = np.percentile(microseconds, [20, 50, 80])
            rows.append(
                {
                    "sampling": case,
                    "tokens": num_tokens,
                    "mean_support": round(float(sizes.mean()), 2),
                    "way": way,
                    "supports": way == "packed" or (truncation["top_k"] == 20 and "logprobs=20" in way),
                    "bytes_per_token": round(size / num_tokens, 1),
                    "bytes_per_id": round(size / sizes.sum(), 2) if way == "packed" else None,
                    "read_us_per_token_p20": round(p20, 3),
                    "read_us_per_token_median": round(median, 3),
                    "read_us_per_token_p80": round(p80, 3),
                    "times_faster_than_trl_logprobs_20": round(baseline / median, 1),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder of the model that is served")
    parser.add_argument("--samples", type=int, default=8, help="samples for each of the prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, default=DATA)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    with VLLMServe(arguments.model, flags=["--max-model-len", "1024"]) as server:
        rows = measure(server.url, tokenizer, arguments.samples, arguments.max_tokens, arguments.repeats)
    machine = {
        "cpus": os.cpu_count(),
        "cpu": platform.machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("trl", "numpy", "msgspec", "httpx", "requests")},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.output, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *machine])
        writer.writeheader()
        writer.writerows({**row, **machine} for row in rows)
    for row in rows:
        print(
            f"{row['sampling']:22s} {row['way']:24s} {row['bytes_per_token']:7.1f} bytes/token "
            f"{row['bytes_per_id'] or '':>5} bytes/id "
            f"{row['read_us_per_token_median']:8.3f} us/token  {row['times_faster_than_trl_logprobs_20']:6.1f}x"
        )


if __name__ == "__main__":
    main()
