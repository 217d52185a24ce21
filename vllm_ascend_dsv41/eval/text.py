"""How much a text repeats: what loops is no measure of speed, and prompts that are alike are no measure of a cache."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Words of a loop: shorter ones are looked for, longer ones are not found.
LONGEST_PERIOD = 64
#: An answer loops when so much of it repeats what stands right before.
LOOPS = 0.5
FEWEST_WORDS = 24  # too short to tell


def words(text: str) -> list[str]:
    """Words, and each sign and each CJK character for itself."""
    return re.findall(r"[^\W_\u3000-\u9fff\uac00-\ud7af]+|[\u3000-\u9fff\uac00-\ud7af]|[^\w\s]|_", text)


def looping(text: str) -> float:
    """Share of the words that equal the one a period before, for the best period up to 64 words, counted where a
    period stands three times in a row at least; 0 for short texts. 0 to 1."""
    found = words(text)
    if len(found) < FEWEST_WORDS:
        return 0.0
    best = 0
    for period in range(1, min(LONGEST_PERIOD, len(found) // 3) + 1):
        run = repeated = 0
        for at in range(period, len(found)):
            run = run + 1 if found[at] == found[at - period] else 0
            if run == 2 * period:
                repeated += run
            elif run > 2 * period:
                repeated += 1
        best = max(best, repeated)
    return best / len(found)


def distinct(texts: Iterable[str], size: int) -> float | None:
    """Distinct n-grams of words among all, over all texts together (distinct-n, Li et al. 2016); None without any."""
    seen: set[tuple[str, ...]] = set()
    total = 0
    for text in texts:
        found = words(text)
        for at in range(len(found) - size + 1):
            seen.add(tuple(found[at : at + size]))
            total += 1
    return len(seen) / total if total else None


def passages(text: str, size: int, count: int) -> list[str]:
    """``count`` pieces of ``size`` words that follow each other and share nothing. Raises ValueError when the text is
    too short."""
    pieces = re.findall(r"\S+\s*", text)
    if len(pieces) < size * count:
        raise ValueError(f"{len(pieces):,} words of text; {count} prompts of {size} words take {size * count:,}")
    return ["".join(pieces[at * size : (at + 1) * size]).strip() for at in range(count)]
