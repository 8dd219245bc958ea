"""What a plan claims of itself: written, read back, told, and refused where it is no claim."""

import pytest

from hocket.base.errors import InputFileError
from hocket.plan.claims import Claims

CLAIMS = Claims(
    step_s=2.0, peak_bytes=(5, 7), parts_s={"compute": 1.5, "hidden": -0.5}, step_bound_s=1.0,
    proven=False, gap=0.5, made_from="m-sct", counts={"tried": 3},
    certificate={"rate": 1.0, "trees": [1, 2]},
)  # fmt: skip


def test_claims_are_read_as_they_were_written():
    assert Claims.from_data(CLAIMS.to_data()) == CLAIMS
    assert Claims().to_data() == {}


def test_what_is_told_names_bounds_and_counts_as_the_command_does():
    assert CLAIMS.summary() == {
        "proven": False, "gap": 0.5, "made_from": "m-sct", "tried": 3, "lower_bound_s": 1.0,
    }  # fmt: skip


def test_further_claims_are_added_and_counts_and_parts_joined():
    more = CLAIMS.also(counts={"kept": 1}, parts_s={"compute": 2.0}, gap=0.25)
    assert (more.counts, more.gap) == ({"tried": 3, "kept": 1}, 0.25)
    assert more.parts_s == {"compute": 2.0, "hidden": -0.5}


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"step_s": -1.0}, "claims.step_s"),
        ({"peak_bytes": [1, -2]}, "claims.peak_bytes"),
        ({"gap": 1.5}, "claims.gap"),
        ({"proven": 1}, "claims.proven"),
        ({"parts_s": [1.0]}, "claims.parts_s"),
        ({"parts_s": {"compute": "long"}}, "claims.parts_s.compute"),
        ({"counts": {"tried": 1.5}}, "claims.counts.tried"),
        ({"made_from": 3}, "claims.made_from"),
        ({"sped": 2.0}, "sped"),
    ],
)
def test_what_is_no_claim_is_refused_by_its_place(data, where):
    with pytest.raises(InputFileError) as caught:
        Claims.from_data(data)
    assert where in str(caught.value)
