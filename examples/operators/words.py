"""Two small operators. See README.md in this folder for how to run them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from interlock.workers import TaskContext, TaskFailed, operator


@operator
def count(payload: dict[str, Any], ctx: TaskContext) -> dict[str, Any]:
    """Counts words: `--operator words:count`."""
    words = payload["text"].lower().split()
    if not words:
        raise TaskFailed("the text has no words", "NoWords")
    counted: Counter[str] = Counter()
    for number, word in enumerate(words, 1):
        counted[word] += 1
        ctx.progress(number / len(words), f"{number} of {len(words)} words")
    return {"words": len(words), "most_common": counted.most_common(1)[0][0]}


@operator("shout")
def shout(payload: dict[str, Any], ctx: TaskContext) -> str:
    """Converts text to upper case: `--operator words:shout`, or `--operator shout` by the name in the decorator."""
    return str(payload["text"]).upper() + str(ctx.config.get("mark", "!"))
