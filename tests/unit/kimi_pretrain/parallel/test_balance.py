"""Compares list scheduling with its plain form, which searches a list for the smallest load."""

from hypothesis import given
from hypothesis import strategies as st

from kimi_pretrain.optim.owners import _longest_first
from kimi_pretrain.parallel.balance import least_loaded, least_loaded_of

COSTS = st.lists(st.integers(0, 1 << 70), max_size=40)
LOADS = st.lists(st.integers(0, 1 << 70), min_size=1, max_size=9)
PAIRS = st.tuples(st.integers(0, 20), st.integers(0, 20))


def plain(costs: list[int], loads: list[int]) -> list[int]:
    loads, taken = list(loads), []
    for cost in costs:
        member = loads.index(min(loads))
        loads[member] += cost
        taken.append(member)
    return taken


@given(COSTS, LOADS)
def test_the_least_loaded_member_takes_the_next_job(costs, loads):
    everyone = list(range(len(loads)))
    assert least_loaded(costs, loads) == plain(costs, loads)
    assert least_loaded_of([(cost, everyone) for cost in costs], loads) == plain(costs, loads)


@given(st.dictionaries(st.text("abc"), PAIRS, max_size=30), st.lists(PAIRS, min_size=1, max_size=6))
def test_owners_by_two_costs(costs, loads):
    """The first cost is balanced, the second breaks ties, then the earlier member wins."""
    before, wanted = list(loads), {}
    for name in sorted(costs, key=lambda name: (-costs[name][0], -costs[name][1], name)):
        member = before.index(min(before))
        before[member] = tuple(map(sum, zip(before[member], costs[name], strict=True)))
        wanted[name] = member
    assert list(_longest_first(costs, loads).items()) == list(wanted.items())


def test_who_may_not_take_a_job_does_not():
    assert least_loaded_of([(3, [1, 2]), (2, [0, 1]), (2, [1, 2]), (1, [1])], [0, 0, 0]) == [
        1,
        0,
        2,
        1,
    ]
