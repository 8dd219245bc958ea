"""Shares of a batch as the division that carries a person's module."""

from __future__ import annotations

from hocket.base.errors import UsageError
from hocket.plan.sections import Shares
from hocket.transformer import Division


def division_of(shares: Shares) -> Division:
    """One rank per replica, with its share of every batch.

    Raises `UsageError` for shares that the loop of a person does not carry yet: stages cut from the
    graph, blocks that are recomputed, and microbatches, for which it has ``accumulate``.
    """
    if any(len(replica.devices) > 1 for replica in shares.replicas):
        raise UsageError(
            "a person's loop does not carry stages of a shared batch",
            hint="hocket run carries the plan out, hocket parallel divides a transformer",
        )
    if any(replica.recomputed or replica.update == "host" for replica in shares.replicas):
        raise UsageError(
            "a person's loop does not recompute blocks or update on the host within shares",
            hint="hocket.prepare(memory=…) does both on one device; hocket run carries the plan "
            "out without holding less",
        )
    most = max(len(replica.microbatches) for replica in shares.replicas)
    if most > 1:
        raise UsageError(
            f"the plan takes its batch in {most} microbatches",
            hint=f"give batches of a {most}th with accumulate={most}, and plan one of these",
        )
    return Division(
        data=len(shares.replicas),
        microbatch=1,
        global_batch=shares.num_samples,
        zero=3 if shares.sharded else 0,
        shares=tuple(replica.num_samples for replica in shares.replicas),
    )
