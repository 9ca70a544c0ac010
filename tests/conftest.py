"""Settings and fixtures that all tests share. One thread, and every random choice from a fixed seed."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "vmd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("vmd")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_global_seed():
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)
