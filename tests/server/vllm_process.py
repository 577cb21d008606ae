"""A real `vllm-serve` in a process of its own."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time

import httpx

from tests.parts import require
from trl_support_replay.client.servers import read_info
from trl_support_replay.wire import protocol


class VLLMServe:
    """`trl-support-replay vllm-serve MODEL` on a free port, up when the block is entered.

    It is known by its own answer: another program may come to hold the port before it does.

    Args:
        model: folder of the model.
        weights_dir: `--weights-dir`.
        flags: further flags.
        api_key: `--api-key`.
        names: names of the model for ordinary requests, beside one that no other server has.
    """

    def __init__(self, model, weights_dir=None, flags=(), api_key=None, names=()):
        require("vllm")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.weights_dir = weights_dir
        self.api_key = api_key
        self._name = f"served-{secrets.token_hex(8)}"
        own = [] if weights_dir is None else ["--weights-dir", str(weights_dir)]
        self._command = [
            sys.executable,
            "-c",
            "import sys; from trl_support_replay.server.command import main; main(sys.argv[1:])",
            str(model),
            *own,
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--seed", "0"),
            *("--served-model-name", self._name, *names),
            *flags,
            *([] if api_key is None else ["--api-key", api_key]),
        ]
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        # Torchrun variables of the test process would make the server believe it is one of several ranks.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            self._environment.pop(name, None)
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - closed with the server

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()
        self._log.close()

    def start(self, wait=True):
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        if wait:
            self.wait()

    def wait(self, timeout=500):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vllm-serve ended with {self._process.returncode}:\n{self.log()[-4000:]}")
            if self._answers():
                return
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"vllm-serve did not come up in {timeout} s:\n{self.log()[-4000:]}")

    def _answers(self):
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        try:
            answer = httpx.get(self.url + protocol.INFO, headers=headers, trust_env=False)
            return answer.status_code == 200 and read_info(answer.content)["model"] == self._name
        except (httpx.TransportError, protocol.MessageError):
            return False

    def kill(self):
        """End the server and its engine at once, as a crash would."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def log(self):
        with open(self._log.name, errors="replace") as file:
            return file.read()
