"""Decides which hosts send compiled steps to which others; the same on all hosts. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """The programs that a host needs, and can load, as it publishes them for the others."""

    keys: tuple[str, ...]
    """Keys of the programs that it needs."""
    compilations: tuple[str, ...] = ()
    """Name of the compilation of each; empty: it can't load all of them."""
    refusal: str = ""
    """Why it neither sends nor takes programs; "": it does."""

    def encode(self) -> str:
        """Returns the message for the other hosts."""
        return json.dumps([self.keys, self.compilations, self.refusal])


@dataclass(frozen=True)
class Transfer:
    """Programs that some hosts send to the others."""

    compilations: tuple[str, ...]
    sources: tuple[int, ...]
    takers: tuple[int, ...]
    """The other hosts, some perhaps with another compilation; none: all have the same one."""

    def source_of(self, taker: int) -> int:
        """Returns the host that sends to a taker; the takers are spread over all sources."""
        return self.sources[self.takers.index(taker) % len(self.sources)]

    @property
    def num_takers(self) -> int:
        """Largest number of takers of one source."""
        return -(-len(self.takers) // len(self.sources))


def decode(message: str) -> Offer:
    """Returns the offer of a message; another message offers and needs nothing.

    >>> decode(Offer(("a",), ("1",)).encode())
    Offer(keys=('a',), compilations=('1',), refusal='')
    """
    try:
        keys, compilations, refusal = json.loads(message)
        return Offer(tuple(map(str, keys)), tuple(map(str, compilations)), str(refusal))
    except (ValueError, TypeError, RecursionError):
        return Offer(())


def decide(messages: Mapping[int, str]) -> Transfer | str:
    """Returns the transfer after which all hosts have programs of one compilation.

    Otherwise returns why all hosts must compile.

    Args:
      messages: the offer of each host, as published.
    """
    offers = {host: decode(message) for host, message in sorted(messages.items())}
    (first, one), *others = offers.items()
    for host, offer in others:
        if offer.keys != one.keys:
            return (
                f"hosts {first} and {host} have different versions, devices, XLA flags or "
                "settings, so their programs differ"
            )
    held = {host: offer.compilations for host, offer in offers.items() if offer.compilations}
    if not held:
        return "no host has them"
    # Counter keeps the order of equal counts: then that of the lowest host is the first.
    chosen = Counter(held.values()).most_common(1)[0][0]
    sources = tuple(host for host, compilations in held.items() if compilations == chosen)
    takers = tuple(host for host in offers if host not in sources)
    refusal = next((offer.refusal for offer in offers.values() if offer.refusal), "")
    if takers and refusal:
        return f"host {sources[0]} has them, and host {takers[0]} can't take them: {refusal}"
    return Transfer(chosen, sources, takers)
