"""L2, the operators. `eagle_kernels.<op>` is the public function, `eagle_kernels.raw.<op>` the bare launcher.

`verify_tree` is not an op itself but calls one of two; `generate_token_bitmask` and `cache_addresses` run on the host.
Type checkers read `__init__.pyi`.
"""

from ..runtime.lazy import lazily
from .registry import FAMILIES, OPS

_HOMES = {
    "BuildTreeOutput": ".tree.build_tree:Output",
    "CommitOutput": ".verify.verify_commit:Output",
    "TreeMaskMode": ".tree.build_tree:TreeMaskMode",
    "VerifyOutput": ".verify.verify_tree_greedy:Output",
    "cache_addresses": ".cache_table:cache_addresses",
    "generate_token_bitmask": ".token_bitmask:generate_token_bitmask",
    "verify_tree": ".front_door:verify_tree",
    **{name: f".operators:{name}" for name in OPS},
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, {**_HOMES, **{family: f".{family}:" for family in FAMILIES}})
