from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def small_and_reproducible():
    """One thread (the tensors are tiny), one seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
