"""L2, the operators. `eagle_kernels.<op>` is the public function, `eagle_kernels.raw.<op>` the bare launcher."""

from ..runtime.library import operator

build_tree = operator("tree.build_tree")
