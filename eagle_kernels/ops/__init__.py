"""L2, the operators. `eagle_kernels.<op>` is the public function, `eagle_kernels.raw.<op>` the bare launcher.

`verify_tree` is no op of its own but the front door of two; `generate_token_bitmask` runs on the host. What type
checkers see of the names that the registry makes is in `__init__.pyi`.
"""

from .operators import PUBLIC
from .registry import OPS
from .token_bitmask import generate_token_bitmask
from .tree.build_tree import Output as BuildTreeOutput
from .tree.build_tree import TreeMaskMode
from .verify.verify_commit import Output as CommitOutput
from .verify.verify_tree_greedy import Output as VerifyOutput
from .verify_tree import verify_tree

globals().update(PUBLIC)
__all__ = [
    "BuildTreeOutput",
    "CommitOutput",
    "TreeMaskMode",
    "VerifyOutput",
    "generate_token_bitmask",
    "verify_tree",
    *OPS,
]
