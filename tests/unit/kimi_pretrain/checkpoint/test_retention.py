"""Tests which checkpoints are kept."""

from hypothesis import given
from hypothesis import strategies as st

from kimi_pretrain.checkpoint.retention import steps_to_keep

STEPS = st.sets(st.integers(0, 60), min_size=1)
COUNTS = st.none() | st.integers(1, 12)


@given(STEPS, COUNTS, COUNTS, st.data())
def test_what_stays(steps, last, every, data):
    good = data.draw(st.none() | st.sampled_from(sorted(steps)))
    stay = steps_to_keep(steps, last, every, good=good)
    assert stay <= steps
    assert max(steps) in stay
    assert good is None or good in stay
    if last is None:
        assert stay == steps
        return
    upto = sorted(step for step in steps if good is None or step <= good)
    assert stay >= set(upto[-last:])
    assert stay >= {step for step in steps if every and step % every == 0}
    for step in stay - set(upto[-last:]) - {max(steps)}:
        assert every, step
        assert step % every == 0, step


@given(st.integers(1, 5), COUNTS, st.integers(1, 40))
def test_a_run_that_saves_keeps_as_many_as_it_was_told(last, every, saves):
    held: set[int] = set()
    for step in range(1, saves + 1):
        held = steps_to_keep(held | {step}, last, every, good=step)
    old = {step for step in range(1, saves + 1) if every and step % every == 0}
    assert held == set(range(max(1, saves - last + 1), saves + 1)) | old


def test_an_example():
    assert steps_to_keep([10, 20, 30, 40, 50], 2, 30) == {30, 40, 50}
    assert steps_to_keep([10, 20, 30, 40, 50], 1, None, good=30) == {30, 50}
