"""Which hosts send compiled steps to which others: the same decision on all, or all compile."""

import json

import pytest

from jaxres.train.compiled.program_offers import Offer, Transfer, decide

KEYS = ("a", "b")
HAS = Offer(KEYS, ("1", "2")).encode()
HAS_OTHERS = Offer(KEYS, ("3", "4")).encode()
LACKS = Offer(KEYS).encode()


@pytest.mark.parametrize(
    ("messages", "sources", "takers"),
    [
        ({0: HAS, 1: HAS}, (0, 1), ()),
        ({0: HAS, 1: LACKS}, (0,), (1,)),
        ({0: LACKS, 1: HAS}, (1,), (0,)),
        ({0: LACKS, 1: LACKS, 2: HAS, 3: HAS}, (2, 3), (0, 1)),
        ({0: HAS, 1: HAS_OTHERS}, (0,), (1,)),
        ({0: HAS_OTHERS, 1: HAS, 2: HAS, 3: LACKS}, (1, 2), (0, 3)),
    ],
)
def test_hosts_that_have_the_steps_send_those_of_one_compilation(messages, sources, takers):
    assert decide(messages) == Transfer(("1", "2"), sources, takers)
    assert decide(dict(reversed(messages.items()))) == Transfer(("1", "2"), sources, takers)


def test_takers_are_spread_over_the_sources():
    transfer = Transfer(("1",), sources=(1, 4), takers=(0, 2, 3))
    assert [transfer.source_of(taker) for taker in transfer.takers] == [1, 4, 1]
    assert transfer.num_takers == 2


REFUSAL = "no key"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ({0: LACKS, 1: LACKS}, "no host has them"),
        ({0: HAS, 1: Offer(("a", "c")).encode()}, "hosts 0 and 1 have different versions"),
        ({0: HAS, 1: Offer(("b", "a")).encode()}, "hosts 0 and 1 have different versions"),
        ({0: HAS, 1: Offer(("a", "c"), ("1", "2")).encode()}, "different versions, devices"),
        ({0: HAS, 1: Offer(KEYS, refusal=REFUSAL).encode()}, "host 1 can't take them: no key"),
        (
            {0: Offer(KEYS, ("1", "2"), REFUSAL).encode(), 1: LACKS},
            "host 0 has them, and host 1 can't take them: no key",
        ),
        ({0: HAS, 1: "none"}, "different versions"),
        ({0: HAS, 1: "[" * 100_000}, "different versions"),
        ({0: HAS, 1: json.dumps({"keys": 1})}, "different versions"),
    ],
)
def test_otherwise_all_hosts_compile_for_one_reason(messages, reason):
    decided = decide(messages)
    assert isinstance(decided, str), "a host takes what it has not asked for"
    assert reason in decided


def test_a_refusal_does_not_matter_where_all_hosts_have_the_steps():
    has = Offer(KEYS, ("1", "2"), REFUSAL).encode()
    assert decide({0: has, 1: has}) == Transfer(("1", "2"), (0, 1), ())
