"""Topics of a bag of words: dense Gibbs for few topics, WarpLDA-style passes for many.

python examples/loops_lda.py docword.txt.gz --topics 100 --sweeps 20

The Gibbs sweep goes over (document, word) in a rotation; only the totals of topics are seen late,
which is permitted. The Warp passes are two 1-D loops, one by word and one by document (Chen et al.,
VLDB 2016): each side proposes topics, which the other accepts by its own counts.
"""

from __future__ import annotations

import argparse
import time

import loops_data
import numpy as np

import hocket

ALPHA, BETA = 0.1, 0.01
MANY_TOPICS = 20


@hocket.parallel_for(permit={"totals": "buffer"}, fastmath=True)
def gibbs(d, w, z, nd, nw, totals, p, draws, alpha, beta, sum_beta):
    for n in range(len(d)):
        a = d[n]
        b = w[n]
        k = z[n]
        nd[a, k] -= 1
        nw[b, k] -= 1
        totals[k] -= 1
        total = 0.0
        for t in range(len(p)):
            total += (nd[a, t] + alpha) * (nw[b, t] + beta) / (totals[t] + sum_beta)
            p[t] = total
        x = draws[n] * total
        k = 0
        while p[k] < x:
            k += 1
        z[n] = k
        nd[a, k] += 1
        nw[b, k] += 1
        totals[k] += 1


def mixed(seed):
    """A random number below 2**32 from a number: the same for every worker and every order."""
    seed = (seed ^ (seed >> 15)) * 2246822519 & 4294967295
    seed = (seed ^ (seed >> 13)) * 3266489917 & 4294967295
    return (seed ^ (seed >> 16)) & 4294967295


@hocket.parallel_for
def by_group(ptr, z, proposed, count, totals, num_topics, prior, rest, seed):
    """One pass over the tokens of each group (a document or a word), which lie side by side.

    What the other side proposed is accepted by this group's counts alone, then this group proposes
    for the other side: a topic of one of its tokens, or any topic. ``count`` is each group's own
    and stays in the cache, where the counts of all groups would not."""
    for g in range(len(ptr) - 1):
        size = ptr[g + 1] - ptr[g]
        mine = z[ptr[g] : ptr[g + 1]]
        theirs = proposed[ptr[g] : ptr[g + 1]]
        draw = mixed(g * 40503 + seed)
        count[:] = 0
        for q in range(size):
            count[mine[q]] += 1
        for q in range(size):
            old = mine[q]
            new = theirs[q]
            draw = (draw * 747796405 + 2891336453) & 4294967295
            if new != old:
                top = (count[new] + prior) * (totals[old] + rest)
                low = (count[old] - 1 + prior) * (totals[new] + rest)
                if (draw >> 8) / 16777216.0 * low < top:
                    count[old] -= 1
                    count[new] += 1
                    mine[q] = new
        own = size / (size + num_topics * prior) * 16777216.0
        for q in range(size):
            draw = (draw * 747796405 + 2891336453) & 4294967295
            other = mixed(draw)
            if draw >> 8 < own:
                theirs[q] = mine[other * size >> 32]
            else:
                theirs[q] = other * num_topics >> 32


def counts(group, z, num_groups, num_topics):
    """Tokens of each group and topic."""
    flat = np.bincount(group * num_topics + z, minlength=num_groups * num_topics)
    return flat.reshape(num_groups, num_topics).astype(np.int32)


def likelihood_per_word(d, w, nd, nw, totals) -> float:
    theta = (nd + ALPHA) / (nd.sum(axis=1, keepdims=True) + ALPHA * nd.shape[1])
    phi = (nw + BETA) / (totals + BETA * len(nw))
    total = 0.0
    for start in range(0, len(d), 65536):
        part = slice(start, start + 65536)
        total += np.log((theta[d[part]] * phi[w[part]]).sum(axis=1)).sum()
    return total / len(d)


class Topics:
    """Tokens with their topics, and the counts of both sides."""

    def __init__(self, d, w, num_topics, seed=0):
        order = np.argsort(d, kind="stable")
        self.d, self.w, self.k = d[order], w[order], num_topics
        self.rng = np.random.default_rng(seed)
        self.z = self.rng.integers(0, num_topics, len(d), dtype=np.int32)
        self.by_word = np.argsort(self.w, kind="stable")
        self.word_ptr = np.concatenate([[0], np.cumsum(np.bincount(w))])
        self.document_ptr = np.concatenate([[0], np.cumsum(np.bincount(d))])
        self.proposed = self.rng.integers(0, num_topics, len(d), dtype=np.int32)
        self.count = np.zeros(num_topics, dtype=np.int32)
        self.recount()

    def recount(self):
        self.nd = counts(self.d, self.z, len(self.document_ptr) - 1, self.k)
        self.nw = counts(self.w, self.z, len(self.word_ptr) - 1, self.k)
        self.totals = self.nw.sum(axis=0).astype(np.int64)

    def likelihood(self):
        self.recount()
        return likelihood_per_word(self.d, self.w, self.nd, self.nw, self.totals)

    def sweep_gibbs(self):
        draws = self.rng.random(len(self.z))
        p = np.zeros(self.k)
        gibbs(self.d, self.w, self.z, self.nd, self.nw, self.totals, p, draws, ALPHA, BETA,
              BETA * len(self.nw))  # fmt: skip

    def sweep_warp(self, number):
        """By word, where tokens are brought side by side, then by document, where they are."""
        z, proposed = self.z[self.by_word], self.proposed[self.by_word]
        self.warp_pass(self.word_ptr, z, proposed, BETA, 2 * number)
        self.z[self.by_word], self.proposed[self.by_word] = z, proposed
        self.warp_pass(self.document_ptr, self.z, self.proposed, ALPHA, 2 * number + 1)

    def warp_pass(self, ptr, z, proposed, prior, number):
        rest = BETA * len(self.nw)
        by_group(ptr, z, proposed, self.count, self.totals, self.k, prior, rest, number * 7919)
        self.totals = np.bincount(z, minlength=self.k)


def made_up(documents=400, words=1500, tokens=60_000, seed=0):
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, documents, tokens)), (rng.zipf(1.3, tokens) - 1) % words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("docword", nargs="?", help="UCI bag of words; made up if left out")
    parser.add_argument("--topics", type=int, default=20)
    parser.add_argument("--sweeps", type=int, default=10)
    options = parser.parse_args()
    d, w = loops_data.bag_of_words(options.docword) if options.docword else made_up()
    topics = Topics(d, w, options.topics)
    for sweep in range(options.sweeps):
        start = time.perf_counter()
        if options.topics < MANY_TOPICS:
            topics.sweep_gibbs()
        else:
            topics.sweep_warp(sweep)
        seconds = time.perf_counter() - start
        value = topics.likelihood()
        print(f"sweep {sweep + 1}: {value:.4f} per word, {len(d) / seconds / 1e6:.2f} M tokens/s")
    print((gibbs if options.topics < MANY_TOPICS else by_group).explain())


if __name__ == "__main__":
    main()
