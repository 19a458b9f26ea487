"""Which parts of a framework a plug-in replaces: those that are asked for, on, and in use."""

import logging
from dataclasses import dataclass, field


@dataclass(eq=False)
class Parts:
    """The parts of one plug-in, in this process. variable: of the environment, names parts. parts: those that it may
    name, and what each is. logger: says what is on and in use. more: parts that come with others, and only so."""

    variable: str
    parts: dict[str, str]
    logger: logging.Logger
    more: dict[str, str] = field(default_factory=dict)
    on: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)

    def named(self, text: str) -> frozenset[str] | None:
        """Returns the parts that a value of the variable names, none for `none`, and None where it is empty."""
        if not text.strip():
            return None
        names = [name.strip() for name in text.split(",") if name.strip()]
        if names == ["none"]:
            return frozenset()
        if names == ["all"]:
            return frozenset(self.parts)
        for name in names:
            if name not in self.parts:
                raise ValueError(
                    f"eagle_kernels: {self.variable} must be none, all, or parts among {', '.join(self.parts)}, "
                    f"separated by commas; got {name!r}"
                )
        return frozenset(names)

    def turn_on(self, parts: frozenset[str], **notes: str) -> None:
        """Turns these parts on in this process, and says so, a line each. notes: what else is said of a part."""
        for part, what in (self.parts | self.more).items():
            if part in parts:
                more = f"; {notes[part]}" if notes.get(part) else ""
                self.logger.info("eagle_kernels: %s is on: %s%s", part, what, more)
        self.on.update(parts)

    def is_on(self, part: str) -> bool:
        """Tells whether a part is on in this process."""
        return part in self.on

    def note_use(self, part: str) -> None:
        """Notes that a part was used, and logs the first time."""
        if part and part not in self.used:
            self.used.add(part)
            self.logger.info("eagle_kernels: %s is in use", part)

    def unused(self, parts: set[str]) -> set[str]:
        """Returns those of these parts that are on and were not used so far."""
        return (parts & self.on) - self.used
