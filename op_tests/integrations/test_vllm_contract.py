"""What the plug-in relies on in vLLM is held against the sources of released versions, which are never imported.

Plain runs skip this. EAGLE_KERNELS_VLLM_WHEELS is a folder of wheels, or `download`, which reads 2 MB for each version:

    EAGLE_KERNELS_VLLM_WHEELS=download python -m pytest op_tests/integrations/test_vllm_contract.py
"""

import pytest

from eagle_kernels.integrations.shared.contract import rules
from eagle_kernels.integrations.shared.sources import Sources
from eagle_kernels.integrations.vllm import contract, hooks
from op_tests.integrations.releases import releases_of, without

released = releases_of("vLLM", "vllm")
PAIRS = list(rules((*hooks.GUARDS, *hooks.HOOKS), contract.CONTRACT))
RULES = dict(PAIRS)
# Releases between the ranges that are supported. There logits processors and thinking budgets have yet other forms.
BETWEEN = ("0.28.0", "0.29.0", "0.30.0")


@pytest.fixture(scope="module", params=dict.fromkeys(hooks.TESTED))
def sources(request) -> Sources:
    return released(request.param)


def test_no_two_rules_have_one_name():
    assert len(RULES) == len(PAIRS)


@pytest.mark.parametrize("name", RULES)
def test_it_holds(sources, name):
    assert RULES[name](sources) is None


@pytest.mark.parametrize("name", RULES)
def test_a_name_that_is_gone_is_told(name):
    """In one release at least: some rules are for those that have another name."""
    assert any(
        RULES[name](without(released(version), name)) is not None for version in (hooks.TESTED[0], hooks.TESTED[-1])
    )


@pytest.mark.parametrize("version", BETWEEN)
def test_what_is_not_supported_differs(version):
    assert {"Sampler.sample()"} <= {name for name, rule in PAIRS if rule(released(version)) is not None}
