"""The commands of the pages docs/fleet*.md work as printed, in order."""

import pytest
from pages.pages import pages_of, what_fails


@pytest.mark.timeout(600)  # many commands; the machine may be busy
@pytest.mark.parametrize("page", pages_of("fleet"), ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_as_printed_in_order(page, tmp_path):
    assert what_fails(page, tmp_path) == []
