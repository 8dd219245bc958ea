"""Topic models."""

from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import I, K, N, U, column, loop, whole


def lda_counts_totals(d, w, z, nd, nw, nt, p, u):
    for n in range(len(d)):
        k = z[n]
        nd[d[n], k] -= 1
        nw[w[n], k] -= 1
        nt[k] -= 1
        total = 0
        for t in range(len(p)):
            total += (abs(nd[d[n], t]) + 1) * (abs(nw[w[n], t]) + 1)
            p[t] = total
        x = u[n] % total
        k = 0
        while p[k] <= x:
            k += 1
        z[n] = k
        nd[d[n], k] += 1
        nw[w[n], k] += 1
        nt[k] += 1


LDA = (U, I, column(N, K), whole(5, K), whole(4, K), whole(K), np.zeros(K, np.int64), column(N, 99))


@loop("rotation", *LDA, permit={"nt": "buffer"})
def lda_buffered(d, w, z, nd, nw, nt, p, u):
    for n in range(len(d)):
        k = z[n]
        nd[d[n], k] -= 1
        nw[w[n], k] -= 1
        nt[k] -= 1
        total = 0
        for t in range(len(p)):
            total += (abs(nd[d[n], t]) + 1) * (abs(nw[w[n], t]) + 1) + abs(nt[t])
            p[t] = total
        x = u[n] % total
        k = 0
        while p[k] <= x:
            k += 1
        z[n] = k
        nd[d[n], k] += 1
        nw[w[n], k] += 1
        nt[k] += 1


@loop("serial", *LDA)
def lda_reads_totals(d, w, z, nd, nw, nt, p, u):
    for n in range(len(d)):
        k = z[n]
        nd[d[n], k] -= 1
        nw[w[n], k] -= 1
        nt[k] -= 1
        total = 0
        for t in range(len(p)):
            total += (abs(nd[d[n], t]) + 1) * (abs(nw[w[n], t]) + 1) + abs(nt[t])
            p[t] = total
        x = u[n] % total
        k = 0
        while p[k] <= x:
            k += 1
        z[n] = k
        nd[d[n], k] += 1
        nw[w[n], k] += 1
        nt[k] += 1


loop("rotation", *LDA, ordered="serial")(lda_counts_totals)


@loop("1d", U, column(N, K), np.zeros((5, K), np.int64))
def count_topics_of_documents(d, z, nd):
    for n in range(len(d)):
        nd[d[n], z[n]] += 1
