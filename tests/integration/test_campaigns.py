"""Wrong inputs in number each end in their sentence; `make campaign` shows which do not."""

import importlib

import pytest
from campaigns.campaign import NAMES, outcomes


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_case_ends_as_it_should(name):
    found = outcomes(importlib.import_module(f"campaigns.{name}").CASES)
    wrong = [f"{one.case.name}: {one.kind}: {one.words}" for one in found if not one.right]
    assert not wrong, "\n".join(wrong)
