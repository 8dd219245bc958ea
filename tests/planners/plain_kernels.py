"""Costs without shapes of kernels, for tests of planners that should not follow the cost model."""

from collections.abc import Iterator

import numpy as np
import pytest

from hocket.cost import efficiency


@pytest.fixture(scope="module", autouse=True)
def plain_kernels() -> Iterator[None]:
    """Every kernel at the usual rate of its family, whatever its shape."""
    with pytest.MonkeyPatch.context() as patch:
        usual = efficiency.ShapedWork
        patch.setattr(efficiency, "matrix_losses", lambda ops, *_: np.ones(len(ops)))
        patch.setattr(efficiency, "shaped_work", lambda ops, *_: usual(*np.ones((4, len(ops)))))
        yield
