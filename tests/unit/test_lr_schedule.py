"""The learning rate schedule, compared with numbers worked out by hand."""

import pytest

from rl.learner.sharded_trainer import lr_schedule


@pytest.mark.parametrize(
    ("name", "warmup_steps", "wanted"),
    [
        # 12 steps; the factor at steps 0, 1, 3, 4, 6, 8, 12 and long after
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 4, [0.25, 0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", 4, [0.25, 0.5, 1, 1, 0.75, 0.5, 0, 0]),
        ("linear", 0, [1, 11 / 12, 0.75, 2 / 3, 0.5, 1 / 3, 0, 0]),
        ("cosine", 4, [0.25, 0.5, 1, 1, 0.853553, 0.5, 0, 0]),  # (1 + cos(pi / 4)) / 2 at step 6
        ("cosine", 0, [1, 0.982963, 0.853553, 0.75, 0.5, 0.25, 0, 0]),
    ],
)
def test_lr_schedule(name: str, warmup_steps: int, wanted: list[float]) -> None:
    factor = lr_schedule(name, warmup_steps, num_steps=12)
    assert [factor(step) for step in (0, 1, 3, 4, 6, 8, 12, 1000)] == pytest.approx(wanted, abs=1e-6)


def test_lr_schedule_whose_warm_up_is_the_whole_run() -> None:
    factor = lr_schedule("linear", warmup_steps=4, num_steps=4)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
