"""``init_process_group("hocket")``: collectives over trees planned for the links that there are.

import hocket.torch_backend
torch.distributed.init_process_group("hocket")

The links are measured when the first collective is called (two seconds), or taken from the cluster
that ``HOCKET_CLUSTER`` names; docs/how-to/collectives.md says more.
"""

# ruff: noqa: E402

from __future__ import annotations

from hocket.base.extras import require

require("torch", "collectives of torch.distributed")

from hocket.plan.make import find_cluster
from hocket.runtime.collectives.process_group import register

register(find_cluster)
