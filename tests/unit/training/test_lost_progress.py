"""Progress that is lost when a run resumes from a checkpoint: steps and time since then."""

from nestrec.training.state import LostProgress, StepProgressFile


def test_lost_progress_counts_steps_and_time_since_resume(tmp_path):
    now = [100.0]
    progress = StepProgressFile(tmp_path / "progress", clock=lambda: now[0])
    assert progress.lost_progress(0) is None, "the run has not started"
    progress.record_resume_point(0)
    for step in range(1, 60):
        now[0] += 0.5
        progress.record_step(step)
        if step % 10 == 0:
            progress.record_resume_point(step)
    progress.close()
    again = StepProgressFile(tmp_path / "progress")
    assert again.lost_progress(50) == LostProgress(9, 4.5)
    assert again.lost_progress(40) == LostProgress(19, 9.5), "the checkpoint of the later step is incomplete"
    assert again.lost_progress(45) == LostProgress(14, None), "step 45 was not recorded as a resume point"
    assert again.lost_progress(59) is None
    assert [str(again.lost_progress(step)) for step in (58, 50)] == ["lost: 1 step", "lost: 9 steps, 4.5 s of work"]
