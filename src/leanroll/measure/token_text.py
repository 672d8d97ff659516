"""Where each token of a completion lies in its text: tokens may be halves of characters, or have no text at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

_CONTEXT_TOKENS = 6
"""Tokens decoded again before new ones: some decoders drop the space before the very first token."""
_BROKEN = "\ufffd"  # what an unfinished character decodes to


@dataclass(frozen=True, slots=True)
class TokenText:
    """A completion's text, and per token the characters [start, stop) that it adds to.

    Halves of a character all have the whole of it: "a€" as the bytes 61 e2 82 ac → spans (0, 1), (1, 2), (1, 2), (1, 2). A token
    without text (a stop token) has an empty span where it stands.
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> TokenText:
        """Decode a completion once, in short overlapping pieces: linear in its length.

        decode: ids → text, special tokens left out; of any tokenizer.
        """
        ids, text = tuple(token_ids), ""
        spans: list[tuple[int, int]] = []
        ends = [0]  # after this many tokens no character is unfinished
        window = 0  # first token that is decoded along with the new ones
        settled = ""  # text of the tokens from there to the first new one
        partial: list[str] = []  # text from there to each new token
        for i in range(len(ids)):
            partial.append(decode(ids[window : i + 1]))
            if partial[-1].endswith(_BROKEN) and i + 1 < len(ids):
                continue  # the rest of the character may follow
            base, last = len(text) - len(settled), partial[-1]
            before = _common(settled, last)
            for piece in partial:
                stop = _common(piece, last)
                half = stop < len(piece)  # its last character became another one
                again = (
                    stop == before > 0 and not half and piece.endswith(_BROKEN)
                )  # more of a character that stays broken
                spans.append((base + before - again, base + stop + half))
                before = stop
            text = text[:base] + last
            ends.append(len(spans))
            window = max(end for end in ends if end <= max(len(spans) - _CONTEXT_TOKENS, 0))
            ends = [end for end in ends if end >= window]
            settled, partial = decode(ids[window : i + 1]), []
        return cls(text, tuple(spans))


def _common(a: str, b: str) -> int:
    """Characters that two texts have in common from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
