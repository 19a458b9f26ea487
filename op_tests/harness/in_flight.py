"""Finds registers that a loop writes while Hopper's tensor cores may still read an operand from them.

A wgmma that takes its left operand from registers reads them while the program goes on, until it is awaited (PTX ISA,
wgmma.mma_async). Triton awaits one turn of a loop in the next one, and may by then have written that operand anew.
"""

import re

_PRODUCT = re.compile(r"wgmma\.mma_async\S* \{[^}]*\}, \{([^}]*)\}")
_WAIT = re.compile(r"wgmma\.wait_group\S* (\d+)")
_WRITE = re.compile(r"(?:@!?%p\d+ +)?[a-z]\S*\s+(\{[^}]*\}|%\w+)")


def overwritten(ptx: str) -> list[str]:
    """Returns the instructions of a kernel's loops that write such registers."""
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
