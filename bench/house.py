"""Counts what makes the ops heavy or light to read: `python -m bench.house [--kernels]`.

Files and imports among them by family, arguments of kernels, lines of code, and bytes of the API pages.
"""

import argparse
import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPS = ROOT / "eagle_kernels" / "ops"


def kernel_arguments() -> dict[str, Counter]:
    """Counts the arguments of each kernel by kind: constant, and pointer, bundle or scalar of the others."""
    kernels = {}
    for file in sorted(OPS.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels[f"{file.relative_to(OPS)}::{node.name}"] = Counter(map(_kind, node.args.args))
    return kernels


def _kind(argument: ast.arg) -> str:
    if argument.annotation is not None:
        return "constants"
    return "pointers" if argument.arg.endswith("_ptr") else "others"


def families() -> list[tuple[str, int, int]]:
    """Returns (family, files, imports among them) of every family of ops."""
    rows = []
    for folder in sorted(path for path in OPS.iterdir() if path.is_dir() and path.name != "__pycache__"):
        files = [file for file in folder.rglob("*.py") if file.stem != "__init__"]
        rows.append((folder.name, len(files), sum(map(_imports_within, files, [folder] * len(files)))))
    return rows


def _imports_within(file: Path, folder: Path) -> int:
    """Counts the files of the folder that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found.update(base / alias.name for alias in node.names)
            found.add(base)
    return sum(path.with_suffix(".py").exists() and folder in path.parents for path in found)


def _num_lines(*folders: Path) -> int:
    return sum(
        len(file.read_text(encoding="utf-8").splitlines()) for folder in folders for file in folder.rglob("*.py")
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.house", description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="list every kernel")
    kernels = kernel_arguments()
    if parser.parse_args().kernels:
        for name, counts in sorted(kernels.items(), key=lambda kernel: -kernel[1].total()):
            print(f"{counts.total():4} {name} {dict(counts)}")
    for name, num_files, num_imports in families():
        print(f"{name:10} {num_files:3} files {num_imports:4} imports among them")
    total = sum(kernels.values(), Counter())
    largest = max(kernels, key=lambda name: kernels[name].total())
    print(f"{len(kernels)} kernels take {total.total()} arguments, {dict(total)}")
    print(f"the most: {largest}, {kernels[largest].total()}")
    print(f"{_num_lines(OPS, ROOT / 'reference')} lines of eagle_kernels/ops and reference")
    print(f"{sum(page.stat().st_size for page in (ROOT / 'eagle_kernels').rglob('API.md'))} bytes of API pages")


if __name__ == "__main__":
    main()
