"""What a tokenizer does not keep of the text of a corpus: unknown tokens, dropped characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxres.data.sources.token_stream import TokenBlock
from jaxres.data.tokens import dropped_text
from jaxres.data.tokens.tokenizer import LibraryTokenizer, Tokenizer

NUM_NAMED = 8


@dataclass
class LostText:
    """Counts over the blocks of a build; the journal of an interrupted one has them."""

    tokenizer: LibraryTokenizer | None
    num_unknown: int = 0
    """Tokens that stand for text outside the vocabulary."""
    num_tokens: int = 0
    characters: set[str] = field(default_factory=set[str])
    """Distinct characters of the text, if the tokenizer may drop some."""

    @staticmethod
    def of(tokenizer: Tokenizer | None, fields: Mapping[str, Any]) -> LostText:
        """Returns the counts of a journal; without any those of an empty text."""
        library = tokenizer if isinstance(tokenizer, LibraryTokenizer) else None
        counts = {name: int(fields.get(name, 0)) for name in ("num_unknown", "num_tokens")}
        return LostText(library, **counts, characters=set(fields.get("characters", "")))

    def fields(self) -> dict[str, Any]:
        """Returns the counts for the journal."""
        counts = {"num_unknown": self.num_unknown, "num_tokens": self.num_tokens}
        return counts | {"characters": "".join(sorted(self.characters))}

    def count(self, block: TokenBlock) -> None:
        """Counts a block."""
        if self.tokenizer is not None and (token := self.tokenizer.unknown) is not None:
            self.num_unknown += int(np.count_nonzero(block.tokens == token))
            self.num_tokens += len(block.tokens)
        self.characters |= block.characters

    def lines(self) -> Iterator[str]:
        """Yields how much of the text is lost to the model."""
        if self.num_unknown:
            share = self.num_unknown / self.num_tokens
            yield (
                f"WARNING: {self.num_unknown:,} tokens ({share:.2%}) are the unknown token: the "
                "tokenizer does not have these words or characters"
            )
        if self.tokenizer is not None and (
            dropped := dropped_text.dropped(self.tokenizer, self.characters)
        ):
            named = " ".join(map(ascii, dropped[:NUM_NAMED]))
            yield (
                f"WARNING: the tokenizer drops {len(dropped):,} characters of the text that are "
                f"not in its vocabulary, such as {named}. Give it an unknown token or byte fallback"
            )
