"""Times of the collectives and transfers of parallel training on a cluster's network.

A group of n ranks that lie ``stride`` devices apart is inside a host or goes through the network;
there the members in one host share the adapters of all the devices that the groups beside them do
not use, so that r members get r times a device's bandwidth. Times are latency + bytes / bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel import efficiency
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.setting import Setting


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks that talk to each other."""

    num_ranks: FloatArray
    stride: FloatArray
    """Devices from one rank to the next."""

    def is_inside(self, setting: Setting) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """True if all ranks are in one host."""
        return np.asarray(self.num_ranks * self.stride <= setting.devices_per_host)

    def per_host(self, setting: Setting) -> FloatArray:
        """Ranks in one host."""
        return np.clip(setting.devices_per_host / self.stride, 1, self.num_ranks)


def all_reduce_s(
    size_bytes: FloatArray, group: RankGroup, setting: Setting, coefficients: Coefficients
) -> FloatArray:
    """All ranks get the sum of their ``size_bytes``."""
    return _collective_s(2 * size_bytes, group, setting, coefficients, starts=1.0)


def all_gather_s(
    size_bytes: FloatArray, group: RankGroup, setting: Setting, coefficients: Coefficients
) -> FloatArray:
    """All ranks end with ``size_bytes``; a reduce-scatter takes as long."""
    return _collective_s(size_bytes, group, setting, coefficients, starts=0.6)


def token_exchange_s(
    size_bytes: FloatArray,
    num_copies: FloatArray,
    group: RankGroup,
    setting: Setting,
    coefficients: Coefficients,
) -> FloatArray:
    """Each rank sends copies of its tokens (``size_bytes`` for one of each) to experts anywhere.

    Copies inside a host go over its own links. Where a token goes to each host once, a host gets it
    if any of its experts is there, which for even routing is 1 - (1 - 1 / hosts)^copies.
    """
    constants = efficiency.CONSTANTS
    ranks, near = group.num_ranks, np.minimum(group.per_host(setting), group.num_ranks)
    num_hosts = ranks / near
    far = num_copies * (1 - 1 / num_hosts)
    once = (num_hosts - 1) * (1 - (1 - 1 / num_hosts) ** num_copies)
    far = np.where(setting.sends_once > 0, once, far)
    inside_bps = setting.inside_bps * constants.inside_share / coefficients.tensor
    between_bps = setting.between_bps * constants.between_share / coefficients.network
    inside_s = size_bytes * num_copies * (near - 1) / near / inside_bps
    between_s = size_bytes * far / between_bps
    start_s = coefficients.latency * _start_s(group, setting)
    return np.where(ranks > 1, start_s + inside_s + between_s, 0.0)


def send_s(
    size_bytes: FloatArray,
    crosses_hosts: FloatArray,
    setting: Setting,
    coefficients: Coefficients,
) -> FloatArray:
    """One device sends to its counterpart in the next stage, as all devices of its host do."""
    constants = efficiency.CONSTANTS
    bandwidth_bps = np.where(
        crosses_hosts > 0,
        setting.between_bps * constants.send_share,
        setting.inside_bps * constants.inside_share,
    )
    return coefficients.pipeline * (constants.send_s + size_bytes / bandwidth_bps)


def inside_bandwidth_bps(
    group: RankGroup, setting: Setting, coefficients: Coefficients
) -> FloatArray:
    """Bus bandwidth of large collectives inside a host."""
    constants = efficiency.CONSTANTS
    share = constants.inside_share * group.num_ranks / (group.num_ranks + constants.inside_ranks)
    return setting.inside_bps * share / coefficients.tensor


def _collective_s(
    size_bytes: FloatArray,
    group: RankGroup,
    setting: Setting,
    coefficients: Coefficients,
    starts: float,
) -> FloatArray:
    ranks = group.num_ranks
    inside_bps = inside_bandwidth_bps(group, setting, coefficients)
    share = efficiency.CONSTANTS.between_share / coefficients.network
    between_bps = np.minimum(setting.between_bps * share * group.per_host(setting), inside_bps)
    bandwidth_bps = np.where(group.is_inside(setting), inside_bps, between_bps)
    start_s = starts * coefficients.latency * _start_s(group, setting)
    return np.where(ranks > 1, start_s + size_bytes * (ranks - 1) / ranks / bandwidth_bps, 0.0)


def _start_s(group: RankGroup, setting: Setting) -> FloatArray:
    constants = efficiency.CONSTANTS
    near = np.minimum(group.num_ranks, group.per_host(setting))
    num_hosts = group.num_ranks / near
    far_hop_s = constants.far_hop_s + setting.between_latency_s
    return (
        constants.start_s
        + near * (constants.hop_s + setting.inside_latency_s)
        + 2 * np.log2(num_hosts) * far_hop_s
    )
