"""The Triton kernels: their values under the interpreter, and that they compile for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from trl_support_replay.scoring import LMHead, SupportCSR, score_support


@pytest.mark.needs("triton")
def test_kernels_match_the_reference_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "tests.scoring.triton_cases"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all cases pass" in done.stdout


@pytest.mark.needs("triton")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_a_gpu(dtype, capability, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trl_support_replay.scoring import kernels_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"BLOCK_PAIRS": kernels_triton.BLOCK_PAIRS, "BLOCK_WIDTH": kernels_triton.BLOCK_WIDTH}
    number, index, source = "i32", "*i64", f"*{dtype}"
    signatures = {
        kernels_triton.dots_kernel: [source, source, index, index, "*fp32", number, number, number, number],
        kernels_triton.weighted_sum_kernel: ["*fp32", source, index, index, index, index, "*fp32"] + [number] * 3,
    }
    for kernel, types in signatures.items():
        constants = sizes | ({"ACCUMULATE": True} if "ACCUMULATE" in kernel.arg_names else {})
        names = [name for name in kernel.arg_names if name not in constants]
        signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
        compiled = triton.compile(
            ASTSource(kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", capability, 32)
        )
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
        assert "atom" not in compiled.asm["ptx"]


def test_triton_is_not_taken_on_a_cpu():
    from trl_support_replay.scoring.arguments import choose_kernel

    weight = torch.zeros(3, 2)
    assert choose_kernel("auto", weight, weight) == "sparse"
    assert choose_kernel("auto", weight, weight.bfloat16()) == "union"


def test_triton_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    head, support = LMHead(torch.zeros(3, 2)), SupportCSR.from_lists([[0, 1]])
    with pytest.raises(ValueError, match="implementation='triton' needs .* a CUDA device, not on cpu"):
        score_support(torch.zeros(1, 2), head, torch.tensor([1]), support, implementation="triton")
