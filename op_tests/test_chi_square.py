"""The law of every verifier's kernels: chi-square over three tokens of a million texts, of eight tokens each.

Drafts are drawn, verified and drawn on from where a round ended, all by launchers. Without a GPU a few texts go through
the interpreter, too few for any law: there they must be the references' texts, whose laws are enumerated elsewhere.
"""

import pytest
import torch

import eagle_kernels
from op_tests.harness.statistics import FALSE_ALARM, assert_follows_law
from op_tests.rounds import SCHEMES, emitted_in_rounds

# of the interpreter, in lanes that are masked
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")

VOCAB_SIZE, NUM_TOKENS = 8, 3
TREES = {"chain": [-1, 0, 1, 2], "wide": [-1, 0, 0, 0, 1], "deep": [-1, 0, 0, 1, 1, 2, 4]}
# of target and draft
TEMPERATURES = [(0.7, 1.2), (1.3, 0.8)]
CASES = [
    (scheme, shape, temperatures)
    for scheme in (*SCHEMES, "coins", "target match")
    for shape in (("chain",) if scheme in ("standard", "block") else TREES)
    for temperatures in TEMPERATURES
]


def is_short(scheme, shape, temperatures):
    """One case for each scheme without a GPU."""
    return temperatures == TEMPERATURES[0] and (shape == "deep" or scheme in ("standard", "block"))


@pytest.mark.cross
@pytest.mark.parametrize(
    ("scheme", "shape", "temperatures"),
    [pytest.param(*case, marks=() if is_short(*case) else pytest.mark.gpu) for case in CASES],
    ids=[f"{scheme}, {shape}, {temperatures[0]}" for scheme, shape, temperatures in CASES],
)
def test_texts_follow_the_target(scheme, shape, temperatures, device):
    """A draft near the target, and sharper: of some texts all drafts are kept, of others none."""
    target = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE)
    draft = 1.3 * target + 0.6 * torch.randn(VOCAB_SIZE, VOCAB_SIZE)
    step = torch.softmax(target.double() / temperatures[0], -1)
    target, draft = target.to(device), draft.to(device)
    sizes = {"lanes": 2**20 if device.type == "cuda" else 6, "num_tokens": NUM_TOKENS, "temperatures": temperatures}

    def texts(ops):
        torch.manual_seed(1)
        with device:
            return emitted_in_rounds(scheme, TREES[shape], target, draft, **sizes, ops=ops).cpu()

    text = texts(eagle_kernels.raw)
    if device.type == "cpu":
        assert torch.equal(text, texts(eagle_kernels))
    # [first, second, third]
    law = step[0][:, None, None] * step[:, :, None] * step[None]
    numbers = (text[:, 0] * VOCAB_SIZE + text[:, 1]) * VOCAB_SIZE + text[:, 2]
    assert_follows_law(numbers, law.flatten(), FALSE_ALARM / len(CASES))
