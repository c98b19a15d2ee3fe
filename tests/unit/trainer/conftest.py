"""One thread for torch: on shared cores, threads that spin for each other make a test fifty times slower."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
