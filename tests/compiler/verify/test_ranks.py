"""Forked ranks: answers in order, the first failure ends all, nothing hangs."""

import os
import time

import pytest
from autopar.compiler.verify.ranks import run_ranks

pytestmark = pytest.mark.gloo


def squared(number):
    return number * number


def fails_or_sleeps(rank):
    if rank == 1:
        raise ValueError("rank one is unwell")
    time.sleep(60)


def dies_or_sleeps(rank):
    if rank == 0:
        os._exit(7)
    time.sleep(60)


def sleeps(seconds):
    time.sleep(seconds)


def runs_backward(rank):
    import torch

    weight = torch.ones(3, requires_grad=True)
    (weight * rank).sum().backward()
    return weight.grad.tolist()


def test_results_come_in_order():
    results, failure = run_ranks(squared, [(3,), (4,), (5,)], timeout_seconds=60)
    assert failure is None
    assert results == [9, 16, 25]


def test_the_error_of_a_rank_ends_the_others():
    begin = time.monotonic()
    results, failure = run_ranks(fails_or_sleeps, [(0,), (1,), (2,)], timeout_seconds=50)
    assert results == []
    assert failure is not None
    assert failure.rank == 1
    assert failure.error == "ValueError: rank one is unwell"
    assert "fails_or_sleeps" in failure.traceback
    assert time.monotonic() - begin < 30


def test_a_rank_that_dies_is_a_failure():
    _, failure = run_ranks(dies_or_sleeps, [(0,), (1,)], timeout_seconds=50)
    assert failure is not None
    assert failure.rank == 0
    assert "exit code 7" in failure.error


def test_the_time_limit_is_hard():
    begin = time.monotonic()
    _, failure = run_ranks(sleeps, [(0.0,), (60.0,)], timeout_seconds=2)
    assert failure is not None
    assert failure.rank == 1
    assert "within 2 seconds" in failure.error
    assert time.monotonic() - begin < 20


def test_autograd_works_in_ranks_of_a_process_that_ran_autograd():
    runs_backward(1)
    results, failure = run_ranks(runs_backward, [(2,), (3,)], timeout_seconds=60)
    assert failure is None
    assert results == [[2.0] * 3, [3.0] * 3]
