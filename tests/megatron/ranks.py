"""Run a function on several gloo processes, with megatron-core on the CPU."""

import functools

from tests import ranks

run_on_ranks = functools.partial(ranks.run_on_ranks, within="tests.megatron.on_cpu:megatron_on_cpu")
