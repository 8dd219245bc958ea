"""How many parts, and which classes in each."""

from __future__ import annotations

from hocket.classes.codes import cyclic_code, held_classes
from hocket.classes.fit import WholeTimes, cut_to, group_work, part_latency_s
from hocket.classes.groups import Groups, balanced_groups, even_sizes, evened
from hocket.classes.material import Material
from hocket.classes.outlook import FanOut, answer_s
from hocket.classes.settings import ANY_NUMBER

_MOST_PARTS = 16
_CLEAR_GAIN = 0.97
"""More parts must lower the answer's time to this share of what fewer give."""


def chosen_groups(material: Material, whole: WholeTimes, cores: int) -> Groups:
    """The groups that were asked for, or as many as are predicted to answer soonest."""
    request = material.request
    if request.parts != ANY_NUMBER:
        return _groups(material, request.parts)
    offers = [_groups(material, count) for count in _counts(material)]
    best = offers[0]
    best_s = _predicted_s(material, whole, best, cores)
    for offer in offers[1:]:
        now_s = _predicted_s(material, whole, offer, cores)
        if now_s < _CLEAR_GAIN * best_s:
            best, best_s = offer, now_s
    return best


def _counts(material: Material) -> range:
    # With as many copies as parts every part would have all classes.
    least = material.request.redundancy + 1
    return range(least, max(least, min(material.splits.num_classes, _MOST_PARTS)) + 1)


def _groups(material: Material, count: int) -> Groups:
    sizes = even_sizes(material.splits.num_classes, count)
    groups = balanced_groups(material.scores.embeddings, sizes, material.request.seed)
    return evened(groups, group_work(material)) if material.request.unequal else groups


def _predicted_s(material: Material, whole: WholeTimes, groups: Groups, cores: int) -> float:
    """An answer when every part has the work that its classes need; time linear in work."""
    work_of = group_work(material)
    classes = held_classes(groups, cyclic_code(len(groups), material.request.redundancy))
    small = part_latency_s(material, cut_to(material, classes[0], 0.1 * material.whole_macs))
    slope_s = max(whole.latency_s - small, 0.0) / 0.9
    part_s = [small + slope_s * (work_of(mine) / material.whole_macs - 0.1) for mine in classes]
    return answer_s(part_s, cores, FanOut())
