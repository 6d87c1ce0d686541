"""Two pieces of work really run at the same time, and neither outlives the other."""

from __future__ import annotations

from threading import Barrier, Event

import pytest
import torch

from bild_lab.engine.methods.ppd.pipeline import one_thread_a_lane, two_lanes

CPU = torch.device("cpu")


def test_both_pieces_run_at_once_in_inference_mode() -> None:
    meeting = Barrier(2)

    def meet() -> bool:
        meeting.wait(timeout=20)  # breaks unless the other one comes while this one waits
        return torch.is_inference_mode_enabled() and torch.get_num_threads() == 1

    with torch.inference_mode(), two_lanes(CPU) as together, one_thread_a_lane(CPU):
        assert together(meet, meet) == (True, True)


def test_an_error_here_waits_for_the_work_beside() -> None:
    done = Event()

    def fail() -> None:
        raise ValueError("here")

    with two_lanes(CPU) as together:
        with pytest.raises(ValueError, match="here"):
            together(fail, lambda: done.wait(0.05) or done.set())
        assert done.is_set()  # before the lanes end, which waits too


def test_an_error_beside_is_raised_and_the_threads_are_as_before() -> None:
    def fail() -> None:
        raise ValueError("beside")

    before = torch.get_num_threads()
    torch.set_num_threads(3)  # of one core too
    try:
        with pytest.raises(ValueError, match="beside"), two_lanes(CPU) as together:
            with one_thread_a_lane(CPU):
                together(lambda: None, fail)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
