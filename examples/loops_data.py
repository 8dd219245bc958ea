"""Readers of three public formats for the examples: ratings as CSV, LIBSVM, UCI bags of words."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def lines(path: str | Path) -> Iterator[str]:
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        yield from file


def ratings(path: str | Path):
    """``user,item,rating`` per line, with or without a heading: users, items, values."""
    rows = [line.replace(",", " ").split()[:3] for line in lines(path)]
    kept = [row for row in rows if len(row) == 3 and row[0].lstrip("-").isdigit()]
    users, items, values = zip(*kept, strict=True)
    return np.array(users, np.int32), np.array(items, np.int32), np.array(values, np.float32)


def libsvm(path: str | Path):
    """``label index:value ...``, indices from 1: rows as CSR, labels 0 or 1."""
    indptr, indices, data, labels = [0], [], [], []
    for line in lines(path):
        label, *entries = line.split()
        labels.append(float(label) > 0)
        for entry in entries:
            index, _, value = entry.partition(":")
            indices.append(int(index) - 1)
            data.append(float(value))
        indptr.append(len(indices))
    return np.array(indptr), np.array(indices), np.array(data), np.array(labels, np.float64)


def bag_of_words(path: str | Path):
    """UCI ``docword``: three heading lines, then ``document word count`` from 1; one per token."""
    rows = np.array([line.split() for line in list(lines(path))[3:]], dtype=np.int64)
    document, word, count = rows[:, 0] - 1, rows[:, 1] - 1, rows[:, 2]
    return np.repeat(document, count), np.repeat(word, count)
