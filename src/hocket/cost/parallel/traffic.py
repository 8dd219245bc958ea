"""Times of the collectives and transfers of parallel training on a cluster's network.

A group of n ranks ``stride`` devices apart lies inside one host or spans several. Between hosts, r
members of a group on one host get r times a device's network bandwidth: with a stride of s, all
groups on the host together use its adapters evenly. Times are latency + bytes / bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.efficiency import CONSTANTS
from hocket.cost.parallel.setting import Setting


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks of one communication group."""

    num_ranks: FloatArray
    stride: FloatArray | float = 1.0
    """Number of devices from one rank of the group to the next."""

    def is_inside(self, setting: Setting) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """True if all ranks of the group are on one host."""
        return np.asarray(self.num_ranks * self.stride <= setting.devices_per_host)

    def per_host(self, setting: Setting) -> FloatArray:
        """Number of the group's ranks per host."""
        return np.clip(setting.devices_per_host / self.stride, 1, self.num_ranks)


def all_reduce_s(size_bytes: FloatArray, group: RankGroup, setting: Setting) -> FloatArray:
    """Seconds of an all-reduce of ``size_bytes``."""
    return _collective_s(2 * size_bytes, group, setting, starts=1.0)


def all_gather_s(size_bytes: FloatArray, group: RankGroup, setting: Setting) -> FloatArray:
    """Seconds of an all-gather with a result of ``size_bytes``; a reduce-scatter takes as long."""
    return _collective_s(size_bytes, group, setting, starts=0.6)


def token_exchange_s(
    size_bytes: FloatArray,
    num_copies: FloatArray,
    group: RankGroup,
    setting: Setting,
) -> FloatArray:
    """Seconds to send ``num_copies`` copies of every rank's tokens to experts on any rank.

    ``size_bytes`` is the size of one copy of all tokens of a rank. Copies inside a host use its own
    links. If a token is sent to each host once, a host receives it if any of the token's experts is
    there, with probability 1 - (1 - 1 / hosts)^copies under even routing.
    """
    ranks, near = group.num_ranks, np.minimum(group.per_host(setting), group.num_ranks)
    num_hosts = ranks / near
    far = num_copies * (1 - 1 / num_hosts)
    once = (num_hosts - 1) * (1 - (1 - 1 / num_hosts) ** num_copies)
    far = np.where(setting.sends_once > 0, once, far)
    inside_bps = setting.inside_bps * CONSTANTS.inside_share / setting.coefficients.tensor
    between_bps = setting.between_bps * CONSTANTS.between_share / setting.coefficients.network
    inside_s = size_bytes * num_copies * (near - 1) / near / inside_bps
    between_s = size_bytes * far / between_bps
    exchange_s = _start_s(group, setting) + inside_s + between_s
    return np.where(ranks > 1, exchange_s, 0.0)


def send_s(
    size_bytes: FloatArray,
    crosses_hosts: FloatArray,
    setting: Setting,
) -> FloatArray:
    """Seconds to send to the next stage, while all other devices of the host send as well."""
    bandwidth_bps = np.where(
        crosses_hosts > 0,
        setting.between_bps * CONSTANTS.send_share,
        setting.inside_bps * CONSTANTS.inside_share,
    )
    return setting.coefficients.pipeline * (CONSTANTS.send_s + size_bytes / bandwidth_bps)


def _collective_s(
    size_bytes: FloatArray, group: RankGroup, setting: Setting, starts: float
) -> FloatArray:
    ranks, coefficients = group.num_ranks, setting.coefficients
    # Few ranks attain a smaller fraction of the bandwidth inside a host.
    inside_share = CONSTANTS.inside_share * ranks / (ranks + CONSTANTS.inside_ranks)
    inside_bps = setting.inside_bps * inside_share / coefficients.tensor
    between_share = CONSTANTS.between_share * group.per_host(setting) / coefficients.network
    between_bps = np.minimum(setting.between_bps * between_share, inside_bps)
    bandwidth_bps = np.where(group.is_inside(setting), inside_bps, between_bps)
    start_s = starts * _start_s(group, setting)
    return np.where(ranks > 1, start_s + size_bytes * (ranks - 1) / ranks / bandwidth_bps, 0.0)


def _start_s(group: RankGroup, setting: Setting) -> FloatArray:
    near = np.minimum(group.num_ranks, group.per_host(setting))
    num_hosts = group.num_ranks / near
    near_s = near * (CONSTANTS.hop_s + setting.inside_latency_s)
    # A tree over hosts: there and back, hence twice the logarithm.
    far_s = 2 * np.log2(num_hosts) * (CONSTANTS.far_hop_s + setting.between_latency_s)
    return setting.coefficients.latency * (CONSTANTS.start_s + near_s + far_s)
