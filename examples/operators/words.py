"""Two small operators. README.md beside this file says how to run them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from interlock.workers import TaskContext, TaskFailed, operator


@operator
def count(payload: dict[str, Any], ctx: TaskContext) -> dict[str, Any]:
    """Counts words: `--operator words:count`."""
    words = payload["text"].lower().split()
    if not words:
        raise TaskFailed("there is no word in the text", "NoWords")
    counted: Counter[str] = Counter()
    for number, word in enumerate(words, 1):
        counted[word] += 1
        ctx.progress(number / len(words), f"{number} of {len(words)} words")
    return {"words": len(words), "most_common": counted.most_common(1)[0][0]}


@operator("shout")
def shout(payload: dict[str, Any], ctx: TaskContext) -> str:
    """Shouts: `--operator words:shout`, or by the name that the decorator gives, `--operator shout`."""
    return str(payload["text"]).upper() + str(ctx.config.get("mark", "!"))
