"""A stream takes one call at a time: a call during another thread's call raises, and the state stays whole."""

import threading

import pytest
import torch

import unfading


def test_a_call_during_another_threads_call_is_refused():
    stream = unfading.STAR(3, 5).eval().stream()
    inside, leave, step = threading.Event(), threading.Event(), stream._steps[0].push

    def slow(x, index):
        inside.set()
        leave.wait(10)
        return step(x, index)

    stream._steps[0].push = slow
    thread = threading.Thread(target=stream.push, args=(torch.ones(1, 3),))
    thread.start()
    inside.wait(10)
    for call in (lambda: stream.push(torch.ones(1, 3)), stream.reset, lambda: stream.states):
        with pytest.raises(RuntimeError, match=r"this stream is in use by another thread.*give each thread its own"):
            call()
    leave.set()
    thread.join()
    assert stream.index == 1
    stream.push(torch.ones(1, 3))


def test_an_error_inside_a_push_leaves_the_stream_usable():
    stream = unfading.STAR(3, 5).eval().stream()
    step = stream._steps[0].push
    stream._steps[0].push = lambda x, index: 1 / 0
    with pytest.raises(ZeroDivisionError):
        stream.push(torch.ones(1, 3))
    stream._steps[0].push = step
    stream.push(torch.ones(1, 3))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_pushes_of_eight_threads_are_whole_or_refused(backend):
    layer = unfading.LSTM(3, 64, num_layers=2, backend=backend).eval()
    stream, x = layer.stream(), torch.randn(1, 3)
    pushed = []

    def push():
        for _ in range(100):
            try:
                stream.push(x)
                pushed.append(1)
            except RuntimeError:
                pass

    threads = [threading.Thread(target=push) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.index == len(pushed) > 0
    alone = layer.stream()
    for _ in pushed:
        alone.push(x)
    for one, other in zip(stream.states, alone.states, strict=True):
        for part, expected in zip(one, other, strict=True):
            assert torch.equal(part, expected)
