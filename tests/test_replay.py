"""Going back to an earlier moment: the random state and the buffers are what they were, parameters are left alone."""

import pytest
import torch
from torch import nn

from course_lib.replay import as_if_never_run, go_back, remember


def test_a_forward_pass_from_the_same_moment_gives_the_same_numbers():
    model = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Dropout(0.5))
    moment, inputs = remember(model), torch.ones(8, 4)
    first, second = model(inputs), model(inputs)
    assert not torch.equal(first, second)
    go_back(model, moment)
    assert torch.equal(model(inputs), first)


def test_without_buffers_only_the_random_state_goes_back():
    norm = nn.BatchNorm1d(2)
    moment = remember(norm, buffers=False)
    norm(torch.randn(4, 2))
    kept = norm.running_mean.clone()
    drawn = torch.rand(3)
    go_back(norm, moment)
    assert torch.equal(norm.running_mean, kept)
    torch.randn(4, 2)
    assert torch.equal(torch.rand(3), drawn)


def test_a_moment_is_a_copy():
    norm = nn.BatchNorm1d(2)
    moment = remember(norm)
    norm(torch.randn(4, 2))
    assert torch.equal(moment.buffers["running_mean"], torch.zeros(2))
    assert not torch.equal(norm.running_mean, torch.zeros(2))


@pytest.mark.parametrize("fails", [False, True])
def test_the_block_leaves_no_trace_even_after_an_error(fails):
    norm = nn.BatchNorm1d(2)
    state = torch.get_rng_state()
    try:
        with as_if_never_run(norm):
            norm(torch.randn(4, 2))
            assert int(norm.num_batches_tracked) == 1
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_are_not_set_back():
    norm = nn.BatchNorm1d(2)
    with as_if_never_run(norm), torch.no_grad():
        norm.weight.fill_(7)
    assert torch.equal(norm.weight.detach(), torch.full((2,), 7.0))
