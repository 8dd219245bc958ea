"""Topics of the Associated Press corpus: tokens per second and likelihood, beside tomotopy.

    python benchmarks/loops/lda.py docword.ap.txt.gz [--tomotopy FOLDER]

FOLDER is where ``pip install --target FOLDER tomotopy`` put it. CPU seconds of one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import loops_data
from loops_lda import ALPHA, BETA, Topics


def sweeps(d, w, num_topics, kind, seconds):
    for is_warm in (False, True):
        topics = Topics(d, w, num_topics)
        step = (lambda number: topics.sweep_gibbs()) if kind == "gibbs" else topics.sweep_warp
        if not is_warm:
            step(0)
    count = 0
    spent, best = 0.0, 9e9
    while spent < seconds:
        start = time.process_time()
        step(count)
        each = time.process_time() - start
        spent, best, count = spent + each, min(best, each), count + 1
    value = topics.likelihood()
    print(f"  {kind:6} {len(d) / best / 1e6:6.2f} M tokens/s per core, {value:.4f} per word after "
          f"{count} sweeps in {spent:.1f} s")  # fmt: skip
    return len(d) / best


def tomotopy_rate(folder, d, w, num_topics, seconds):
    sys.path.insert(0, str(folder))
    import tomotopy

    model = tomotopy.LDAModel(k=num_topics, alpha=ALPHA, eta=BETA, seed=1)
    ends = np.searchsorted(d, np.arange(d.max() + 2))
    for document in range(d.max() + 1):
        words = w[ends[document] : ends[document + 1]]
        if len(words):
            model.add_doc([str(word) for word in words])
    model.optim_interval = 0
    model.train(1, workers=1)
    best, spent, count = 9e9, 0.0, 0
    while spent < seconds:
        start = time.process_time()
        model.train(2, workers=1)
        each = (time.process_time() - start) / 2
        best, spent, count = min(best, each), spent + 2 * each, count + 2
    print(f"  tomotopy {len(d) / best / 1e6:5.2f} M tokens/s per core, {count} sweeps")
    return len(d) / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("docword")
    parser.add_argument("--tomotopy", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    d, w = loops_data.bag_of_words(options.docword)
    for num_topics in (20, 100, 500):
        print(f"{num_topics} topics, {len(d)} tokens")
        ours = max(sweeps(d, w, num_topics, kind, options.seconds) for kind in ("gibbs", "warp"))
        if options.tomotopy:
            theirs = tomotopy_rate(options.tomotopy, d, w, num_topics, options.seconds)
            print(f"  ours over tomotopy {ours / theirs:.2f}x")


if __name__ == "__main__":
    main()
