"""Jobs that a table of speeds does not have, estimated from the jobs that it has.

A library for schedulers of one's own: the fleet's service measures new jobs instead.
"""

from __future__ import annotations

from hocket.contrib.unseen.belief import Belief, belief_from
from hocket.contrib.unseen.completion import Completed, complete
from hocket.contrib.unseen.estimate import Estimated, with_unseen_job

__all__ = ["Belief", "Completed", "Estimated", "belief_from", "complete", "with_unseen_job"]
