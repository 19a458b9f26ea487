"""What becomes of Hopper's products that are on their way while the program goes on.

A wgmma that takes its left operand from registers reads them until it is awaited (PTX ISA, wgmma.mma_async). Triton
awaits one turn of a loop in the next one, and may by then have written that operand anew. Where the program needs sums
too early, ptxas lets each product wait for the one before.
"""

import re
import subprocess
import tempfile

_PRODUCT = re.compile(r"wgmma\.mma_async\S* \{[^}]*\}, \{([^}]*)\}")
_WAIT = re.compile(r"wgmma\.wait_group\S* (\d+)")
_WRITE = re.compile(r"(?:@!?%p\d+ +)?[a-z]\S*\s+(\{[^}]*\}|%\w+)")


def waits_of_ptxas(ptx: str) -> list[str]:
    """Returns what ptxas says of products of a kernel for sm_90 that wait for each other."""
    if "wgmma" not in ptx:
        return []
    from triton.backends.nvidia.compiler import get_ptxas

    ptxas = get_ptxas(*[90][: get_ptxas.__code__.co_argcount]).path  # triton 3.4 has one for all GPUs
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", "--gpu-name", "sm_90a", "-o", "/dev/null", file.name]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [line for line in words.splitlines() if "serialized" in line]


def overwritten(ptx: str) -> list[str]:
    """Returns the instructions of a kernel's loops that write registers that a product may still read."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    labels = {line.removesuffix(":"): number for number, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    found = []
    for stop, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if jump and labels[jump[1]] < stop:
            found += _of_loop(lines[labels[jump[1]] : stop])
    return found


def _of_loop(lines: list[str]) -> list[str]:
    instructions = [each.strip(" \t{}") if "wgmma" not in each else each for line in lines for each in line.split(";")]
    found, groups, group = [], [], set()
    for instruction in 2 * instructions:  # what one turn leaves in flight, the next one may write
        if product := _PRODUCT.search(instruction):
            group |= set(re.findall(r"%\w+", product[1]))
        elif "wgmma.commit_group" in instruction:
            groups, group = [*groups, group], set()
        elif wait := _WAIT.search(instruction):
            groups = groups[max(len(groups) - int(wait[1]), 0) :]
        elif (write := _WRITE.match(instruction)) and not set(re.findall(r"%\w+", write[1])).isdisjoint(
            set().union(*groups)
        ):
            found.append(instruction)
    return found
