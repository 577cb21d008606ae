from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.megatron.on_cpu import megatron_on_cpu
from tests.parts import module_that_needs, why_not

if not why_not("megatron-core"):
    # megatron-core compiles what it decorates when it is imported; here it must not.
    with megatron_on_cpu():
        import tests.megatron.parity  # noqa: F401
        from tests.megatron import tiny_gpt


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return module_that_needs("megatron-core", module_path=module_path, parent=parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"))


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """megatron-core on the CPU, in a group of one."""
    with megatron_on_cpu():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tiny_gpt.initialize_parallel()
        yield
        tiny_gpt.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_earlier_balancing_losses() -> None:
    tiny_gpt.forget_balancing_losses()
