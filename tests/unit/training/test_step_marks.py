"""What a start that goes on from a checkpoint says has been lost since."""

from nestrec.training.state import LostProgress, StepProgressFile


def test_steps_and_time_since_the_step_that_is_gone_on_from_are_lost(tmp_path):
    now = [100.0]
    progress = StepProgressFile(tmp_path / "progress", clock=lambda: now[0])
    assert progress.lost(0) is None, "nobody has begun"
    progress.mark(0)
    for step in range(1, 60):
        now[0] += 0.5
        progress.reached(step)
        if step % 10 == 0:
            progress.mark(step)
    progress.close()
    again = StepProgressFile(tmp_path / "progress")
    assert again.lost(50) == LostProgress(9, 4.5)
    assert again.lost(40) == LostProgress(19, 9.5), "the save of a later step was not finished"
    assert again.lost(45) == LostProgress(14, None), "a step that nobody marked"
    assert again.lost(59) is None
    assert [str(again.lost(step)) for step in (58, 50)] == ["lost: 1 step", "lost: 9 steps, 4.5 s of work"]
